"""TorchTitan's own loader, of the release; it tokenizes text while it trains."""

import pickle
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from datasets import load_dataset

from benchmarks.peers.adapters import Batch, Batches, Documents, Peer, Run
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import DatasetConfig, text_datasets


class Adapter(Peer):
    title = "TorchTitan's loader"
    packages = ("torchtitan", "torchdata", "datasets", "torch")
    reads_tokens = False
    # As its `c4` is loaded, and as its `c4_test` is.
    settings = {"streaming": True, "map-style": False}  # noqa: RUF012
    text_settings = settings
    notes = ("TorchTitan's loader reads text alone, so its restores and its memory are those of text.",)

    def write(self, documents: Documents, folder: Path, seq_len: int) -> None:
        (folder / "jsonl").mkdir(parents=True)
        for path in documents.texts:
            shutil.copy(path, folder / "jsonl")
        shutil.copytree(documents.tokenizer, folder / "tokenizer")
        _load(list((folder / "jsonl").iterdir()), folder / "cache", False, "")  # the conversion, once

    def open(self, folder: Path, run: Run, checkpoint: bytes | None = None) -> Batches:
        return StockBatches(
            sorted((folder / "jsonl").iterdir()), folder / "tokenizer", folder / "cache", run, checkpoint
        )

    def open_text(
        self, texts: Sequence[Path], tokenizer: Path, folder: Path, run: Run, checkpoint: bytes | None = None
    ) -> Batches:
        return StockBatches(texts, tokenizer, folder, run, checkpoint)

    def checkpoint(self, states: Sequence[Any]) -> bytes:
        """Each rank's entry, and the number of ranks."""
        return pickle.dumps({key: value for state in states for key, value in state.items()})


def _load(texts: Sequence[Path], cache: Path, streaming: bool, path: str) -> Any:
    files = [str(text) for text in texts]
    return load_dataset("json", data_files=files, split="train", streaming=streaming, cache_dir=str(cache))


class StockBatches(Batches):
    def __init__(
        self, texts: Sequence[Path], tokenizer: Path, cache: Path, run: Run, checkpoint: bytes | None = None
    ) -> None:
        text_datasets.DATASETS["benchmark"] = DatasetConfig(
            path="", loader=partial(_load, texts, cache, run.extra), sample_processor=lambda record: record["text"]
        )
        config = JobConfig()
        config.training.dataset = "benchmark"
        config.training.local_batch_size = run.batch_rows
        config.training.seq_len = run.seq_len
        config.training.dataloader.num_workers = run.workers
        self._loader: ParallelAwareDataloader = text_datasets.build_text_dataloader(
            run.ranks, run.rank, HuggingFaceTokenizer(str(tokenizer)), config, infinite=False
        )
        if checkpoint is not None:
            entries = pickle.loads(checkpoint)
            if entries["world_size"] == run.ranks:
                self._loader.load_state_dict(entries)
            else:  # what its checkpoints do then
                with tempfile.TemporaryDirectory() as folder:
                    dcp.save({"dataloader": entries}, checkpoint_id=folder, no_dist=True)
                    dcp.load({"dataloader": self._loader}, checkpoint_id=folder, no_dist=True)
        self._items = iter(self._loader)

    def __next__(self) -> Batch:
        inputs, labels = next(self._items)
        return Batch(inputs["input"], labels)

    def state(self) -> Any:
        return self._loader.state_dict()

    def close(self) -> None:
        self._items = None  # ends its workers
