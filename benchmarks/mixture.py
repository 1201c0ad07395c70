"""What a sample costs from 100 sources with 10 stages, against one from a single source.

    PYTHONPATH=. python benchmarks/mixture.py

Makes stores of random tokens in a temporary folder, as many tokens in all for the one source as for the hundred, then
alternates between two loaders (order, mapping, reading; no workers), each from a place within the last stage. Prints
the ratio of the times of each pair and their median; and the same for the order alone, without reading a row. Absolute
speeds depend on the machine.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.deliver import make_store
from zephon_patches.loader.collate import MicroBatchReader
from zephon_patches.loader.loader import Loader
from zephon_patches.mapping import Topology
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.order.shuffle import SourceOrder
from zephon_patches.order.stages import Stage
from zephon_patches.samples.chunking import num_samples
from zephon_patches.store.reader import TokenStore


class PlacesOnly(MicroBatchReader):
    """Reads nothing."""

    def read(self, rows: list[Any]) -> Any:
        return {}, rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of a sample of a mixture against one of a single source")
    parser.add_argument("--sources", type=int, default=100, help="sources of the mixture (100)")
    parser.add_argument("--stages", type=int, default=10, help="its stages (10)")
    parser.add_argument(
        "--tokens", type=int, default=200_000_000, help="tokens in the stores of a loader (200,000,000)"
    )
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch (8)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a row (2,048)")
    parser.add_argument("--batches", type=int, default=4000, help="batches of a measurement (4,000)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of measurements (7)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one = [make_store(_new(folder, "one"), args.sources, args.tokens // args.sources)]
        many = [make_store(_new(folder, f"{i}"), 4, args.tokens // args.sources // 4) for i in range(args.sources)]
        for store in (*one, *many):
            for shard in range(len(store.tokens_per_shard)):
                store.tokens(shard).sum()  # brings every page into memory
        # Uneven weights that change from stage to stage.
        stages = [
            Stage(1000 * stage, tuple(1 + (7 * source + 11 * stage) % 50 for source in range(args.sources)))
            for stage in range(args.stages)
        ]
        for what, reader in (("with rows", MicroBatchReader), ("order alone", PlacesOnly)):
            pair = [
                make_loader(stores, of, reader(stores, args.seq_len), args)
                for stores, of in ((one, None), (many, stages))
            ]
            ratios = []
            for _ in range(args.rounds):
                single, mixed = (deliver(loader, args.batches) for loader in pair)
                ratios.append(mixed / single)
            found = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            median = statistics.median(ratios)
            print(f"{what}: a sample of the mixture costs {median:.2f} of the single source's ({found})")


def _new(folder: str, name: str) -> Path:
    path = Path(folder) / name
    path.mkdir()
    return path


def make_loader(
    stores: list[TokenStore], stages: list[Stage] | None, reader: MicroBatchReader, args: argparse.Namespace
) -> Loader:
    sources = [
        SourceOrder(f"{number}", num_samples(store.tokens_per_shard, args.seq_len), 0, 256)
        for number, store in enumerate(stores)
    ]
    return Loader(
        GlobalOrder(sources, stages),
        reader,
        "{}",
        global_batch_size=args.rows,
        local_batch_size=args.rows,
        topology=Topology(0, 1),
        end=None,
    )


def deliver(loader: Loader, batches: int) -> float:
    """Seconds of this process to take batches from a fresh iterator, from within the last stage on."""
    loader.seek(20_000)
    started = time.process_time()
    for _ in itertools.islice(loader, batches):
        pass
    return time.process_time() - started


if __name__ == "__main__":
    main()
