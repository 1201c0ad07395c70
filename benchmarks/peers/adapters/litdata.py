"""LitData: chunks of tokens made by ``optimize``, read by its ``TokensLoader`` in blocks of a row and one token.

As its documentation of pretraining has it: whole documents go into a chunk until it holds a multiple of the block;
blocks are cut from each chunk, inputs and labels from each block.
"""

import io
import itertools
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from benchmarks.peers.adapters import Batch, Batches, Documents, Peer, Run
from benchmarks.peers.adapters.text import Encoder

_CHUNK_TOKENS = 16 * 2**20  # about 64 MB of int32, its default size of a chunk in bytes


class Adapter(Peer):
    title = "LitData"
    packages = ("litdata", "torch", "numpy")
    settings = {  # noqa: RUF012
        "defaults": {},
        "drop_last, full shuffle in chunks": {"drop_last": True, "item_shuffle_window": 0},
    }
    forks_ranks = True
    notes = (
        "LitData: `shuffle=True`, `TokensLoader(block_size=seq_len + 1)`, arrays of the smallest type. By default it "
        "shuffles in windows of 256 rows of a chunk (`item_shuffle_window`); with 0, all rows of a chunk.",
        "LitData cuts each chunk by itself and drops the rest of it, and with several ranks it sets `drop_last`; a "
        "checkpoint of several is then refused by one rank unless `drop_last=True` is given there. Where the ranks do "
        "not divide the global batch it goes back to the last whole step of the new size without a message.",
    )

    def write(self, documents: Documents, folder: Path, seq_len: int) -> None:
        parts = _parts_of(documents, max(1, len(documents.tokens) // _CHUNK_TOKENS))
        _optimize(partial(_part_of, documents.folder), parts, folder, seq_len, 1)

    def write_text(self, texts: Sequence[Path], tokenizer: Path, folder: Path, seq_len: int, cores: int) -> None:
        _optimize(partial(_encode, tokenizer), [str(path) for path in texts], folder, seq_len, cores)

    def open(self, folder: Path, run: Run, checkpoint: bytes | None = None) -> Batches:
        # Lightning sets these; torchrun's RANK alone is not looked at.
        os.environ.update(WORLD_SIZE=str(run.ranks), GLOBAL_RANK=str(run.rank))
        return LitDataBatches(folder, run, checkpoint)

    def checkpoint(self, states: Sequence[Any]) -> bytes:
        """As its documentation saves it; all ranks have the same."""
        file = io.BytesIO()
        torch.save(states[0], file)
        return file.getvalue()


class LitDataBatches(Batches):
    def __init__(self, folder: Path, run: Run, checkpoint: bytes | None) -> None:
        dataset = StreamingDataset(
            str(folder),
            item_loader=TokensLoader(block_size=run.seq_len + 1),
            shuffle=True,
            seed=run.seed,
            **(run.extra or {}),
        )
        self._loader = StreamingDataLoader(
            dataset, batch_size=run.batch_rows, num_workers=run.workers, collate_fn=_collate
        )
        if checkpoint is not None:
            self._loader.load_state_dict(torch.load(io.BytesIO(checkpoint)))
        self._items: Any = iter(self._loader)

    def __next__(self) -> Batch:
        rows = next(self._items)
        return Batch(rows[:, :-1], rows[:, 1:])

    def state(self) -> Any:
        return self._loader.state_dict()

    def close(self) -> None:
        self._items = None  # ends its workers


def _collate(blocks: Sequence[np.ndarray]) -> torch.Tensor:
    batch = np.empty((len(blocks), len(blocks[0])), np.int64)
    for row, block in zip(batch, blocks, strict=True):
        row[:] = block
    return torch.from_numpy(batch)


def _optimize(function: Any, inputs: Sequence[Any], folder: Path, seq_len: int, workers: int) -> None:
    optimize(
        function,
        inputs=inputs,
        output_dir=str(folder),
        chunk_size=_CHUNK_TOKENS // (seq_len + 1) * (seq_len + 1),
        item_loader=TokensLoader(),
        num_workers=workers,
        start_method="fork",  # faster than its default, spawn
        verbose=False,
    )


def _encode(tokenizer: Path, path: str) -> Iterator[np.ndarray]:
    """Runs in its worker processes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core
    yield from Encoder(tokenizer).file(Path(path))


def _parts_of(documents: Documents, count: int) -> list[tuple[int, int]]:
    cuts = [number * len(documents) // count for number in range(count + 1)]
    return list(itertools.pairwise(cuts))


def _part_of(folder: Path, part: tuple[int, int]) -> Iterator[np.ndarray]:
    documents = Documents(folder)
    ends = np.concatenate([[0], documents.lengths.cumsum()])
    for number in range(*part):
        yield np.array(documents.tokens[ends[number] : ends[number + 1]])
