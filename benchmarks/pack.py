"""Packing: how fast plans are made, how full they are, and how fast packed samples are delivered.

    PYTHONPATH=. python benchmarks/pack.py [STORE]

Four tables, each with one run's numbers beside each other; absolute speeds depend on the machine:

- plans of log-normal lengths, as those of web pages: million documents a second, in one process;
- how full samples are: the labels that count by the places there are, for best-fit, first-fit (both take the largest
  piece first; first-fit takes the first sample with room), one document a sample, and concat, which cuts
  documents wherever a sample ends; with the documents that are cut though they would fit into a sample;
- the same for the documents of a finished store, if one is given: STORE is its folder;
- the speed of best-fit samples from the loader by that of concat ones of the same store, which take turns.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from zephon_patches.loader.collate import Item, MicroBatchReader, Row
from zephon_patches.loader.loader import Loader
from zephon_patches.mapping import Topology
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.order.shuffle import SourceOrder
from zephon_patches.samples.best_fit import plan_best_fit
from zephon_patches.samples.chunking import num_samples
from zephon_patches.samples.packed import fill_rows, packed_shard
from zephon_patches.samples.pieces import cut_pieces, plan_documents
from zephon_patches.samples.plan_file import ensure_plan
from zephon_patches.samples.sequence import IGNORE_INDEX
from zephon_patches.store.atomic import write_atomic
from zephon_patches.store.indexed import HEADER
from zephon_patches.store.manifest import MANIFEST, Manifest
from zephon_patches.store.reader import TokenStore
from zephon_patches.store.writer import ShardWriter

_TURN = 256  # batches that one loader delivers before the other does: as many as are located at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", type=Path, help="folder of a finished store, for its fill")
    parser.add_argument("--documents", type=int, default=10_000_000, help="documents of a plan (10,000,000)")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[2048, 8192], help="places of a sample (2048 8192)")
    parser.add_argument("--first-fit", type=int, default=200_000, help="documents for the comparison (200,000)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements, of which the median counts (5)")
    parser.add_argument("--batches", type=int, default=1000, help="batches of 8 rows of a measurement (1,000)")
    args = parser.parse_args()
    lengths = log_normal(args.documents)
    print(f"{args.documents:,} log-normal lengths, mean {lengths.mean():,.0f} tokens, median {np.median(lengths):,.0f}")
    for seq_len in args.seq_len:
        speed(lengths, seq_len, args.rounds)
    few = lengths[: args.first_fit]
    for seq_len in args.seq_len:
        fill(f"{len(few):,} of them", [few], seq_len)
    if args.store is not None:
        shards = lengths_of(args.store)
        for seq_len in args.seq_len:
            fill(f"{sum(map(len, shards)):,} documents of {args.store}", shards, seq_len)
    for seq_len in args.seq_len:
        deliver(lengths, seq_len, args.rounds, args.batches)


def log_normal(documents: int) -> np.ndarray:
    return np.random.default_rng(0).lognormal(6.0, 1.1, documents).astype(np.int32) + 2


def lengths_of(folder: Path) -> list[np.ndarray]:
    """The lengths of the documents of each shard of a store."""
    shards = Manifest.read(folder).shards
    return [np.fromfile(folder / f"{s.name}.idx", "<i4", s.documents, offset=HEADER.size) for s in shards]


def speed(lengths: np.ndarray, seq_len: int, rounds: int) -> None:
    speeds = []
    for _ in range(rounds):
        started = time.perf_counter()
        plan = plan_best_fit(lengths, seq_len)
        speeds.append(len(lengths) / (time.perf_counter() - started) / 1e6)
    full = plan.num_labels / (plan.num_samples * seq_len)
    shown = ", ".join(f"{value:.2f}" for value in speeds)
    print(f"plan, seq_len {seq_len}: {shown}; median {statistics.median(speeds):.2f} M documents/s, fill {full:.5f}")


def fill(what: str, shards: Sequence[np.ndarray], seq_len: int) -> None:
    """Prints how full the samples of some shards are."""
    best, documents = ([planner(lengths, seq_len) for lengths in shards] for planner in (plan_best_fit, plan_documents))
    labels = sum(plan.num_labels for plan in best)
    samples = {
        "best-fit": sum(plan.num_samples for plan in best),
        "first-fit": sum(first_fit(lengths, seq_len) for lengths in shards),
        "document": sum(plan.num_samples for plan in documents),
    }
    shown = ", ".join(f"{name} {labels / (count * seq_len):.5f}" for name, count in samples.items())
    tokens = np.array([int(lengths.sum(dtype=np.int64)) for lengths in shards])
    concat_labels, concat_samples = int(np.maximum(tokens - 1, 0).sum()), int(num_samples(tokens, seq_len).sum())
    cut = sum(cut_by_concat(lengths, seq_len) for lengths in shards) / sum(map(len, shards))
    print(f"fill, {what}, seq_len {seq_len}: {shown}, concat {concat_labels / (concat_samples * seq_len):.5f}", end="")
    print(f" (which cuts {cut:.1%} of the documents though they would fit)")


def first_fit(lengths: np.ndarray, seq_len: int) -> int:
    """Samples that first-fit-decreasing takes, with a tree of the largest room below each node."""
    pieces, _ = cut_pieces(lengths, seq_len)
    places = np.sort(pieces[:, 1] - 1)[::-1].tolist()
    width = 1 << max(1, len(places)).bit_length()
    room = [seq_len] * (2 * width)
    begun = 0
    for place in places:
        node = 1
        while node < width:
            node *= 2
            node += room[node] < place
        begun = max(begun, node - width + 1)
        room[node] -= place
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return begun


def cut_by_concat(lengths: np.ndarray, seq_len: int) -> int:
    """Documents that lie in more than one sample, though their labels have room in one."""
    stops = np.cumsum(lengths, dtype=np.int64)
    first, last = stops - lengths + 1, stops - 1  # labels, but a document's first token
    return int(((lengths > 1) & (lengths - 1 <= seq_len) & ((first - 1) // seq_len != (last - 1) // seq_len)).sum())


class PackedReader(MicroBatchReader):
    """Reads rows of best-fit samples of one store."""

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        super().__init__([store], seq_len)
        plans = [ensure_plan(store.folder, shard, "best_fit", seq_len) for shard in store.manifest.shards]
        self.samples = np.array([plan.num_samples for plan in plans], dtype=np.int64)
        self._shards = [packed_shard(store.tokens(number), plan) for number, plan in enumerate(plans)]

    def read(self, rows: Sequence[Row]) -> Item:
        buffer = torch.empty((2, len(rows), self.seq_len), dtype=torch.int64)
        inputs, labels = buffer.numpy()
        fill_rows(inputs, labels, [(self._shards[row.shard], row.sample) for row in rows])
        for i, row in enumerate(rows):
            if row.padding:
                labels[i] = IGNORE_INDEX
        return {"input": buffer[0]}, buffer[1]


def deliver(lengths: np.ndarray, seq_len: int, rounds: int, batches: int, shards: int = 32) -> None:
    """Prints the speed of best-fit samples by that of concat ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random = np.random.default_rng(0)
        records = []
        for shard in range(shards):
            part = lengths[1500 * shard : 1500 * (shard + 1)]
            with ShardWriter(folder, f"{shard:06d}-000", np.dtype("<u2")) as writer:
                writer.add(random.integers(0, 2**16, part.sum(), dtype=np.uint16), part.tolist(), [(0, 0)] * len(part))
                records.append(writer.finish([]))
        write_atomic(folder / MANIFEST, Manifest({}, "<u2", [], records).to_json())
        store = TokenStore(folder)
        for shard in range(shards):
            store.tokens(shard).sum()  # brings every page into memory
        packed = PackedReader(store, seq_len)
        readers = [(MicroBatchReader([store], seq_len), num_samples(store.tokens_per_shard, seq_len))]
        readers.append((packed, packed.samples))
        loaders = [
            Loader(
                GlobalOrder([SourceOrder("random", samples, 0, 256)]),
                reader,
                "{}",
                global_batch_size=8,
                local_batch_size=8,
                topology=Topology(0, 1),
                end=None,
            )
            for reader, samples in readers
        ]
        items = [iter(loader) for loader in loaders]
        ratios = []
        for _ in range(rounds):
            # In turns, and by the processor's time, so that whatever else the machine does changes little.
            concat, best = zip(*([seconds(item) for item in items] for _ in range(batches // _TURN)), strict=True)
            ratios.append(statistics.median(concat) / statistics.median(best))
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"delivery, seq_len {seq_len}: best-fit by concat {shown}; median {statistics.median(ratios):.2f}")


def seconds(items: Iterator[Item]) -> float:
    started = time.process_time()
    for _ in itertools.islice(items, _TURN):
        pass
    return time.process_time() - started


if __name__ == "__main__":
    main()
