"""This repository's loader."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.peers.adapters import Batch, Batches, Documents, Peer, Run
from zephon_patches import DataConfig, SourceConfig, build_loader
from zephon_patches.cli.__main__ import main as zephon_data
from zephon_patches.loader.loader import Loader
from zephon_patches.prepare.tokenizers import TextTokenizer


class Adapter(Peer):
    title = "this repository"
    packages = ("torch", "numpy")

    def write(self, documents: Documents, folder: Path, seq_len: int) -> None:
        """Ids as a column of lists, and the store made of them."""
        folder.mkdir(parents=True)
        (folder / "tokenizer").symlink_to(documents.tokenizer.resolve())
        table = pa.table({"ids": pa.array([ids.astype("int32") for ids in documents], pa.list_(pa.int32()))})
        pq.write_table(table, folder / "ids.parquet", row_group_size=1000)
        open_loader(folder, Run())

    def write_text(self, texts: Sequence[Path], tokenizer: Path, folder: Path, seq_len: int, cores: int) -> None:
        source = ["--source", f"text={texts[0].parent}", "--tokenizer", str(tokenizer)]
        if zephon_data(["prepare", *source, "--cache-dir", str(folder), "--workers", str(cores)]):
            raise RuntimeError("zephon-data prepare failed; its messages are in the log")

    def open(self, folder: Path, run: Run, checkpoint: bytes | None = None) -> Batches:
        return OurBatches(open_loader(folder, run), checkpoint)

    def open_text(
        self, texts: Sequence[Path], tokenizer: Path, folder: Path, run: Run, checkpoint: bytes | None = None
    ) -> Batches:
        """Tokenizes all of it into a store, then delivers."""
        source = SourceConfig(name="text", path=str(texts[0].parent))
        return OurBatches(_build(source, tokenizer, folder, run), checkpoint)

    def checkpoint(self, states: Sequence[Any]) -> bytes:
        return json.dumps(states[0]).encode()  # the same on every rank


class OurBatches(Batches):
    def __init__(self, loader: Loader, checkpoint: bytes | None = None) -> None:
        self._loader = loader
        if checkpoint is not None:
            loader.load_state_dict(json.loads(checkpoint))
        self._items = iter(loader)

    def __next__(self) -> Batch:
        inputs, labels = next(self._items)
        return Batch(inputs["input"], labels)

    def state(self) -> Any:
        return self._loader.state_dict()

    def close(self) -> None:
        self._items = iter(())  # ends its workers


def open_loader(folder: Path, run: Run) -> Loader:
    """The loader on what ``Adapter.write`` wrote."""
    source = SourceConfig(name="ids", path=str(folder / "ids.parquet"), token_field="ids")
    return _build(source, folder / "tokenizer", folder / "cache", run)


def _build(source: SourceConfig, tokenizer: Path, cache: Path, run: Run) -> Loader:
    return build_loader(
        DataConfig(sources=[source], cache_dir=str(cache), seed=run.seed, max_build_minutes=600),
        tokenizer if run.ranks == 1 else _tokenizer(tokenizer),
        seq_len=run.seq_len,
        global_batch_size=run.global_batch or run.ranks * run.batch_rows,
        local_batch_size=run.batch_rows,
        dp_rank=run.rank,
        dp_size=run.ranks,
        num_workers=run.workers,
        infinite=False,
    )


@functools.cache
def _tokenizer(folder: Path) -> TextTokenizer:
    """Read once for all ranks of this process; where there is one rank, reading it is part of opening."""
    return TextTokenizer(folder)
