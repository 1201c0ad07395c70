"""How long a training loop waits for its data, which takes a batch of 8 x 2,048 and computes for 2 ms.

    PYTHONPATH=. python benchmarks/wait.py

Random tokens in a temporary folder, all of them in memory. The loop sleeps for the 2 ms (``--busy``: computes, on the
core that the loader also needs), as one that waits for an accelerator does. Prints ``loader.seconds_waited`` by the
time of the whole loop, without its first batch, for which workers start; the median of the rounds, for 0 and 2 workers.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.deliver import make_loader, make_store
from benchmarks.tables import table
from zephon_patches.loader.loader import Loader


def main() -> None:
    parser = argparse.ArgumentParser(description="Share of a training loop that waits for data")
    parser.add_argument("--milliseconds", type=float, default=2, help="of computing for each batch (2)")
    parser.add_argument("--busy", action="store_true", help="compute; else sleep")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="numbers of workers (0 and 2)")
    parser.add_argument("--batches", type=int, default=2000, help="batches of a round (2,000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch (8)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a row (2,048)")
    args = parser.parse_args()
    seconds = args.milliseconds / 1000
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder), 64, 1_000_000)
        for shard in range(64):
            store.tokens(shard).sum()  # brings every page into memory
        found: dict[int, list[tuple[float, float, float]]] = {workers: [] for workers in args.workers}
        for _ in range(args.rounds):
            for workers in args.workers:
                found[workers].append(
                    train(make_loader(store, args.rows, args.seq_len, workers), args.batches, seconds, args.busy)
                )
    rows = []
    for workers, rounds in found.items():
        share, a_batch, a_step = (statistics.median(each) for each in zip(*rounds, strict=True))
        spread = f"{100 * min(r[0] for r in rounds):.2f} to {100 * max(r[0] for r in rounds):.2f} %"
        rows.append([f"{workers}", f"{100 * share:.2f} %", spread, f"{1e6 * a_batch:.0f}", f"{1e6 * a_step:.0f}"])
    print(table(["workers", "waits", "over the rounds", "us of waiting a batch", "us of a step"], rows))
    print(f"a step computes for {args.milliseconds:g} ms, {'busy' if args.busy else 'asleep'}")


def train(loader: Loader, batches: int, seconds: float, busy: bool) -> tuple[float, float, float]:
    """The share of the time that is waited, and seconds of waiting and of all a batch."""
    items = iter(loader)
    next(items)
    before, started = loader.seconds_waited, time.perf_counter()
    for _ in range(batches):
        next(items)
        if busy:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                pass
        else:
            time.sleep(seconds)
    waited, whole = loader.seconds_waited - before, time.perf_counter() - started
    return waited / whole, waited / batches, whole / batches


if __name__ == "__main__":
    main()
