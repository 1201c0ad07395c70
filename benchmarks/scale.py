"""What grows with the data, and what does not: orders of up to 10^12 samples, 10^5 shards, 1,000 sources, 16,384 ranks.

    PYTHONPATH=. python benchmarks/scale.py

There is no data: the order, the mapping and the loader are the product's, and a reader gives the places of rows in
place of their tokens. Each case is measured from nothing, all cases of a table in turn, round after round: making the
order; the first item at its place, with the block of places that is found for it; and the items of later blocks. Tables
have the ratio to the table's first case, by the medians of the rounds, and the largest memory of it all, by tracemalloc
in a round of its own. Times are what the processor worked for this process, on which other load of the machine tells
little. The last table opens stores of which the manifest alone is there.
"""

import argparse
import itertools
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.mixture import PlacesOnly
from benchmarks.tables import table
from tests.loader.private_memory import write_sparse_store
from zephon_patches.loader.loader import Loader
from zephon_patches.mapping import Topology
from zephon_patches.order import permutation
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.order.shuffle import SourceOrder
from zephon_patches.order.stages import Stage
from zephon_patches.store.reader import TokenStore

ROWS = 8
BLOCK = 32_768  # rows whose places a loader finds at once, at the most
MIB = 1 << 20


class Case(NamedTuple):
    """One data set, one place in it and one rank of a number of them."""

    samples: int
    shards: int
    sources: int = 1
    place: int = 0
    dp: int = 1

    def make(self) -> Loader:
        """A loader of rank dp // 2, without tokens."""
        permutation._table.cache_clear()
        shards = self.shards // self.sources
        sizes = np.full(shards, self.samples // self.shards, dtype=np.int64)
        sources = [SourceOrder(f"{source}", sizes, 0, 256) for source in range(self.sources)]
        weights = tuple(1 + 7 * source % 50 for source in range(self.sources))
        return Loader(
            GlobalOrder(sources, [Stage(0, weights)] if self.sources > 1 else None),
            PlacesOnly([], 2048),
            "{}",
            global_batch_size=ROWS * self.dp,
            local_batch_size=ROWS,
            topology=Topology(self.dp // 2, self.dp),
            end=None,
        )


class Costs(NamedTuple):
    """Seconds of work for the parts of a case."""

    make: float
    first: float
    items: float


def tables() -> dict[str, dict[str, Case]]:
    powers = (3, 6, 9, 12)
    return {
        "samples (1,000 shards, at 90 % of an epoch)": {
            f"10^{k}": Case(10**k, 1000, place=9 * 10 ** (k - 1)) for k in powers
        },
        "shards (10^9 samples, at 90 % of an epoch)": {
            f"10^{k}": Case(10**9, 10**k, place=9 * 10**8) for k in range(6)
        },
        "place (10^12 samples in 10^5 shards)": {
            f"{place:,}": Case(10**12, 10**5, place=place)
            for place in (0, 9 * 10**11, 10**13 + 7, 10**15, 2**60 - 10**9)
        },
        "sources (10^9 samples, 1,000 shards)": {
            f"{sources:,}": Case(10**9, 1000, sources, place=9 * 10**8) for sources in (1, 10, 100, 1000)
        },
        "ranks (10^12 samples in 10^4 shards, 8 rows a rank)": {
            f"{dp:,}": Case(10**12, 10**4, place=9 * 10**11, dp=dp) for dp in (1, 16, 256, 1024, 4096, 16_384)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Costs by number of samples, shards, sources, ranks, and by place")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each table (5)")
    parser.add_argument("--items", type=int, default=8192, help="items that follow the first one, of 8 rows (8,192)")
    args = parser.parse_args()
    for title, cases in tables().items():
        for case in cases.values():
            measure(case, 1)  # imports and the like
        measured = in_turn(
            {name: lambda case=case: measure(case, args.items) for name, case in cases.items()}, args.rounds
        )
        first = next(iter(measured.values()))
        rows = []
        for name, case in cases.items():
            found = [f"{mine / base:.2f}" for mine, base in zip(measured[name], first, strict=True)]
            rows.append([name, *found, f"{peak(lambda case=case: measure(case, args.items)) / MIB:.1f}"])
        print(table([title, "make", "first item", "next items", "MiB"], rows), flush=True)
        absolute = (
            f"{1e3 * first[0]:.2f} ms, {1e3 * first[1]:.2f} ms, {1e6 * first[2] / args.items / ROWS:.2f} us a sample"
        )
        print(f"1.00 is {absolute}\n", flush=True)
    print(opening(args.rounds))


def measure(case: Case, items: int) -> Costs:
    started = time.process_time()
    loader = case.make()
    made = time.process_time()
    loader.seek(case.place)
    iterator = iter(loader)
    next(iterator)
    begun = time.process_time()
    for _ in itertools.islice(iterator, BLOCK // ROWS - 1):  # of the first blocks, which are shorter
        pass
    going = time.process_time()
    for _ in itertools.islice(iterator, items):
        pass
    return Costs(made - started, begun - made, time.process_time() - going)


def in_turn(cases: Mapping[str, Callable[[], tuple[float, ...]]], rounds: int) -> dict[str, list[float]]:
    """The medians of each case's costs."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            found[name].append(case())
    return {name: [statistics.median(each) for each in zip(*costs, strict=True)] for name, costs in found.items()}


def peak(work: Callable[[], object], kept: bool = False) -> int:
    """Bytes of memory at the most, or what is kept of it by the result."""
    tracemalloc.start()
    try:
        result = work()
        traced = tracemalloc.get_traced_memory()
        del result
        return traced[0 if kept else 1]
    finally:
        tracemalloc.stop()


def opening(rounds: int) -> str:
    """The table of stores that are opened."""
    with tempfile.TemporaryDirectory() as name:
        folders = {f"10^{k}": Path(name) / str(k) for k in range(6)}
        for k, folder in enumerate(folders.values()):
            write_sparse_store(folder, 10**k, 4 * 10**6, files=False)

        def seconds(folder: Path) -> tuple[float]:
            started = time.process_time()
            TokenStore(folder)
            return (time.process_time() - started,)

        seconds(folders["10^0"])
        measured = in_turn({k: lambda folder=folder: seconds(folder) for k, folder in folders.items()}, rounds)
        rows = []
        for number, (k, folder) in enumerate(folders.items()):
            (taken,), (least,) = measured[k], measured["10^0"]
            a_shard = 1e6 * (taken - least) / 10**number if number else 0
            memory = [peak(lambda folder=folder: TokenStore(folder), kept) / MIB for kept in (False, True)]
            rows.append([k, f"{taken / least:.1f}", f"{a_shard:.1f}", *(f"{each:.1f}" for each in memory)])
        header = ["shards of a store", "open", "us more a shard", "MiB at most", "MiB kept"]
        return table(header, rows)


if __name__ == "__main__":
    main()
