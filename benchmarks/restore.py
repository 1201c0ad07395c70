"""The first batch after a restore, at 90 % of an epoch and at sample 10^15, against one of a fresh start.

    PYTHONPATH=. python benchmarks/restore.py

The store is real but for its size (``show_far.py``): 10^12 samples, whose texts are gone and whose tokens are holes.
Fresh and restored starts take turns, in one process, with the caches of the order emptied before each. A start is
``build_loader``, ``load_state_dict`` where a state is restored, and ``next(iter(loader))``; the second figure leaves
the building out. Prints the median, over the rounds, of the ratios to the round's fresh start, by the clock and by what
the processor worked.
"""

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.show_far import SEQ_LEN, write_source
from benchmarks.tables import table
from zephon_patches import build_loader
from zephon_patches.loader.loader import Loader
from zephon_patches.loader.state import CURSOR
from zephon_patches.order import permutation
from zephon_patches.training_config import read_training_config

ROWS = 8


class Start(NamedTuple):
    """Seconds by the clock and of the processor, from the start on and without the building."""

    clock: float
    work: float
    built_clock: float
    built_work: float


def main() -> None:
    parser = argparse.ArgumentParser(description="First batch after a restore against a fresh start")
    parser.add_argument("--shards", type=int, default=1000, help="shards (1,000)")
    parser.add_argument("--samples", type=int, default=10**12, help="samples of all shards (10^12)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds, each of one start at each place (15)")
    args = parser.parse_args()
    logging.disable()  # a line about where it goes on
    with tempfile.TemporaryDirectory() as name:
        training = read_training_config(write_source(Path(name), args.shards, args.samples // args.shards))

        def build() -> Loader:
            return build_loader(
                training.data, training.tokenizer, seq_len=SEQ_LEN, global_batch_size=ROWS, local_batch_size=ROWS
            )

        places = {"fresh": None, "90 % of an epoch": args.samples * 9 // 10, "10^15": 10**15}
        found: dict[str, list[Start]] = {place: [] for place in places}
        first_batch(build, 10**15)
        for _ in range(args.rounds):
            for place, cursor in places.items():
                found[place].append(first_batch(build, cursor))
    rows = []
    for place, starts in found.items():
        ratios = [
            [a / b for a, b in zip(s, fresh, strict=True)] for s, fresh in zip(starts, found["fresh"], strict=True)
        ]
        rows.append([place, *(f"{statistics.median(each):.2f}" for each in zip(*ratios, strict=True))])
    header = ["first batch", "all, clock", "all, work", "loader built, clock", "loader built, work"]
    print(table(header, rows))
    fresh = [1e3 * statistics.median(each) for each in zip(*found["fresh"], strict=True)]
    print("1.00 is " + ", ".join(f"{each:.1f} ms" for each in fresh))


def first_batch(build: Callable[[], Loader], cursor: int | None) -> Start:
    """A start, restored at a cursor or fresh."""
    permutation._table.cache_clear()
    begin = time.perf_counter(), time.process_time()
    loader = build()
    built = time.perf_counter(), time.process_time()
    if cursor is not None:
        loader.load_state_dict({**loader.state_dict(), CURSOR: cursor})
    inputs, _ = next(iter(loader))
    end = time.perf_counter(), time.process_time()
    assert inputs["input"].shape == (ROWS, SEQ_LEN)
    return Start(end[0] - begin[0], end[1] - begin[1], end[0] - built[0], end[1] - built[1])


if __name__ == "__main__":
    main()
