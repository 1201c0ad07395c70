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
from tokenizers import Tokenizer, models

from zephon_patches import DataConfig, SourceConfig, build_loader
from zephon_patches.loader.collate import Item
from zephon_patches.samples.best_fit import plan_best_fit
from zephon_patches.samples.chunking import num_samples
from zephon_patches.samples.pieces import cut_pieces, plan_documents
from zephon_patches.store.indexed import HEADER, encode_index
from zephon_patches.store.manifest import Manifest

_IDS = 50_000
_TURN = 1024  # batches that one loader delivers before the other does: as many as are located at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", type=Path, help="folder of a finished store, for its fill")
    parser.add_argument("--documents", type=int, default=10_000_000, help="documents of a plan (10,000,000)")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[2048, 8192], help="places of a sample (2048 8192)")
    parser.add_argument("--first-fit", type=int, default=200_000, help="documents for the comparison (200,000)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements, of which the median counts (5)")
    parser.add_argument("--batches", type=int, default=4096, help="batches of 8 rows of a measurement (4,096)")
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


def deliver(lengths: np.ndarray, seq_len: int, rounds: int, batches: int, documents: int = 48_000) -> None:
    """Prints the speed of best-fit samples by that of concat ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = lengths[:documents]
        tokens = np.random.default_rng(0).integers(0, _IDS, lengths.sum(), dtype=np.uint16)
        (folder / "random.bin").write_bytes(tokens.tobytes())
        (folder / "random.idx").write_bytes(encode_index(lengths, tokens.dtype))
        (folder / "tokenizer").mkdir()
        tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(_IDS)}, unk_token="0"))
        tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
        source = SourceConfig("random", str(folder / "random"))
        shard_bytes = tokens.nbytes // 32
        loaders = [
            build_loader(
                DataConfig(sources=[source], cache_dir=str(folder / "c"), shard_bytes=shard_bytes, packing=packing),
                folder / "tokenizer",
                seq_len=seq_len,
                global_batch_size=8,
                local_batch_size=8,
            )
            for packing in ("concat", "best_fit")
        ]
        items = [iter(loader) for loader in loaders]
        for item in items:  # brings pages and plans into memory
            for _ in range(int(tokens.size) // (8 * seq_len)):
                next(item)
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
