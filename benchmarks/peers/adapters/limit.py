"""The limit: the same rows copied from the same files, with their places known before the clock starts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers.adapters import Batch, Batches, Documents, Peer, Run, Unsupported, ours
from zephon_patches.store.manifest import MANIFEST
from zephon_patches.store.reader import TokenStore


class Adapter(Peer):
    title = "the limit: row copies, places known"
    packages = ("torch", "numpy")
    settings = {"our store": False, "one file": True}  # noqa: RUF012
    notes = (
        "The limit copies each row by one slice from mapped files into a fresh int64 buffer of the batch; the order "
        "is this repository's (`our store`), or a permutation of the rows of one file (`one file`). It has no state.",
    )

    def write(self, documents: Documents, folder: Path, seq_len: int) -> None:
        ours.Adapter().write(documents, folder, seq_len)
        np.save(folder / "tokens.npy", documents.tokens)

    def open(self, folder: Path, run: Run, checkpoint: bytes | None = None) -> Batches:
        if checkpoint is not None or run.ranks > 1 or run.workers:
            raise Unsupported("one process, no state")
        if run.extra:
            tokens = np.load(folder / "tokens.npy", mmap_mode="r")
            rows = np.random.default_rng(run.seed).permutation((len(tokens) - 1) // run.seq_len)
            return RowCopies([tokens], [(0, start) for start in (rows * run.seq_len).tolist()], run)
        loader = ours.open_loader(folder, run)
        assert loader.end is not None
        place = loader.order.locate(np.arange(loader.end))
        (manifest,) = (folder / "cache" / "ids").glob(f"*/{MANIFEST}")
        store = TokenStore(manifest.parent)
        maps = [store.tokens(shard) for shard in range(len(store.tokens_per_shard))]
        places = zip(place.shard.tolist(), (place.sample * run.seq_len).tolist(), strict=True)
        return RowCopies(maps, list(places), run)


class RowCopies(Batches):
    def __init__(self, maps: list[np.ndarray], places: list[tuple[int, int]], run: Run) -> None:
        self._batches = copy_rows(maps, places, run)

    def __next__(self) -> Batch:
        return next(self._batches)


def copy_rows(maps: list[np.ndarray], places: list[tuple[int, int]], run: Run) -> Iterator[Batch]:
    # The last rows of a shard may be short; the order has few of them.
    places = [(shard, start) for shard, start in places if start + run.seq_len < len(maps[shard])]
    for first in range(0, len(places), run.batch_rows):
        part = places[first : first + run.batch_rows]
        buffer = np.empty((len(part), run.seq_len + 1), dtype=np.int64)
        for row, (shard, start) in enumerate(part):
            buffer[row] = maps[shard][start : start + run.seq_len + 1]
        yield Batch(torch.from_numpy(buffer[:, :-1]), torch.from_numpy(buffer[:, 1:]))
