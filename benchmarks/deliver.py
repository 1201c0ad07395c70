"""How fast the loader delivers tokenized data, against copying the same rows with their places known.

    PYTHONPATH=. python benchmarks/deliver.py

Makes a store of random tokens in a temporary folder, then alternates between the loader (order, mapping,
reading, masking; no workers) and the limit: one slice copied per row from the same files into a fresh int64
buffer, where the places have been computed before the clock starts. Prints the ratio of each pair and their
median; absolute speeds depend on the machine.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from zephon_patches.loader.collate import MicroBatchReader
from zephon_patches.loader.loader import Loader
from zephon_patches.loader.workers import Delivery
from zephon_patches.mapping import Topology
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.order.shuffle import SourceOrder
from zephon_patches.samples.chunking import num_samples
from zephon_patches.store.atomic import write_atomic
from zephon_patches.store.manifest import MANIFEST, Manifest
from zephon_patches.store.reader import TokenStore
from zephon_patches.store.writer import ShardWriter


def main() -> None:
    parser = argparse.ArgumentParser(description="Loader against row copies with known places")
    parser.add_argument("--shards", type=int, default=64, help="shards of the store (64)")
    parser.add_argument("--shard-tokens", type=int, default=2_000_000, help="tokens of a shard (2,000,000)")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch (8)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a row (2,048)")
    parser.add_argument("--batches", type=int, default=2000, help="batches of a measurement (2,000)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of measurements (7)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder), args.shards, args.shard_tokens)
        loader = make_loader(store, args.rows, args.seq_len)
        place = loader.order.locate(np.arange(args.batches * args.rows))
        places = list(zip(place.shard.tolist(), (place.sample * args.seq_len).tolist(), strict=True))
        maps = [store.tokens(shard) for shard in range(args.shards)]
        checksum = sum(int(tokens.sum()) for tokens in maps)  # brings every page into memory
        print(f"store: {store.num_tokens:,} tokens in {args.shards} shards (checksum {checksum})")
        ratios = []
        for round_number in range(args.rounds):
            limit = copy_rows(maps, places, args.rows, args.seq_len)
            ours = deliver(loader, args.batches)
            ratios.append(limit / ours)
            speed = args.batches * args.rows * args.seq_len / ours / 1e6
            print(f"round {round_number + 1}: loader {speed:,.0f} M tokens/s, {ratios[-1]:.2f} of the row copies")
        print(f"median: {statistics.median(ratios):.2f} of the row copies")


def make_store(folder: Path, shards: int, shard_tokens: int) -> TokenStore:
    """A store of random uint16 tokens, one document a shard."""
    random = np.random.default_rng(0)
    records = []
    for shard in range(shards):
        with ShardWriter(folder, f"{shard:06d}-000", np.dtype("<u2")) as writer:
            writer.add(random.integers(0, 2**16, shard_tokens, dtype=np.uint16), [shard_tokens], [(0, shard)])
            records.append(writer.finish([]))
    write_atomic(folder / MANIFEST, Manifest({}, "<u2", [], records).to_json())
    return TokenStore(folder)


def make_loader(store: TokenStore, rows: int, seq_len: int, num_workers: int = 0) -> Loader:
    """Of one rank, whose micro-batch is the global batch."""
    return Loader(
        GlobalOrder([SourceOrder("random", num_samples(store.tokens_per_shard, seq_len), 0, 256)]),
        MicroBatchReader([store], seq_len),
        "{}",
        global_batch_size=rows,
        local_batch_size=rows,
        topology=Topology(0, 1),
        end=None,
        delivery=Delivery(num_workers),
    )


def copy_rows(maps: list[np.ndarray], places: list[tuple[int, int]], rows: int, seq_len: int) -> float:
    """Seconds to copy all rows, a fresh buffer for each batch."""
    started = time.perf_counter()
    for start in range(0, len(places), rows):
        buffer = torch.empty((rows, seq_len + 1), dtype=torch.int64)
        array = buffer.numpy()
        for i, (shard, offset) in enumerate(places[start : start + rows]):
            tokens = maps[shard][offset : offset + seq_len + 1]
            array[i, : len(tokens)] = tokens
    return time.perf_counter() - started


def deliver(loader: Loader, batches: int) -> float:
    """Seconds to take batches from a fresh iterator."""
    started = time.perf_counter()
    for _ in itertools.islice(loader, batches):
        pass
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
