"""The private memory of a loader and of its workers over an epoch, of little data and of much, of few shards and many.

    PYTHONPATH=. python benchmarks/memory.py

The stores' files are holes. Each case is measured in a process of its own (``tests/loader/private_memory.py``): what it
and its workers have written, ``Private_Dirty`` of ``/proc/PID/smaps_rollup``. Pages of the stores' files are the
system's, which takes them back as it needs to, and all processes share them. A forked worker starts with what it shares
with its parent and counts what either has written since; a spawned one counts all its imports.
"""

import argparse
import json
import subprocess
import sys

from benchmarks.tables import table

CASES = [
    (64, 200_001),
    (64, 2_000_001),
    (640, 200_001),
    (10_000, 16_385),
    (100_000, 4_097),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Private memory over an epoch")
    parser.add_argument("--largest", type=int, default=100_000, help="leave out cases of more shards (100,000)")
    parser.add_argument("--workers", nargs="+", default=["0", "2:fork", "2:spawn"], help="workers, how they start")
    args = parser.parse_args()
    rows = []
    for shards, tokens in CASES:
        for kind in args.workers if shards <= args.largest else ():
            workers, _, method = kind.partition(":")
            case = [[shards, tokens, int(workers), method or None]]
            ended = subprocess.run(
                [sys.executable, "-m", "tests.loader.private_memory", json.dumps(case)],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            (found,) = json.loads(ended.stdout)
            (main_first, worker_first), *_, (main_last, worker_last) = found["epoch"]
            rows.append([f"{shards:,}", f"{shards * tokens / 1e6:,.0f} M", kind.replace(":", ", ")])
            rows[-1] += [f"{found['opened'] - found['start']:.1f}", f"{main_last - main_first:.1f}"]
            rows[-1] += [f"{worker_first:.1f}", f"{worker_last - worker_first:.1f}"] if int(workers) else ["-", "-"]
            print(*rows[-1], file=sys.stderr, flush=True)
    header = ["shards", "tokens", "workers", "opening", "an epoch, main", "a worker at first", "an epoch, worker"]
    print(table(header, rows))
    print("MiB; of the workers the largest")


if __name__ == "__main__":
    main()
