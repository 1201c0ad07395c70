"""How long it takes to open a store of many shards, against reading the same manifest as plain JSON.

    PYTHONPATH=. python benchmarks/open_store.py

Writes the manifest of a store with that many shards and files into a temporary folder, then alternates between
opening the store and ``json.loads``. Prints each time, their medians, and the ratio of the medians; absolute times
depend on the machine.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from zephon_patches.store.manifest import MANIFEST, FileRecord, InputRange, Manifest, ShardRecord
from zephon_patches.store.reader import TokenStore


def main() -> None:
    parser = argparse.ArgumentParser(description="Opening a store against reading its manifest as JSON")
    parser.add_argument("--shards", type=int, default=10_000, help="shards, each of a file of its own (10,000)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of measurements (7)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_manifest(folder, args.shards)
        opening, parsing = [], []
        for _ in range(args.rounds):
            started = time.perf_counter()
            TokenStore(folder)
            opened = time.perf_counter()
            json.loads((folder / MANIFEST).read_bytes())
            opening.append(opened - started)
            parsing.append(time.perf_counter() - opened)
            print(f"open {opening[-1]:.3f} s, JSON alone {parsing[-1]:.3f} s")
        medians = statistics.median(opening), statistics.median(parsing)
        print(
            f"{args.shards:,} shards, medians: open {medians[0]:.3f} s, {medians[0] / medians[1]:.1f} times JSON alone"
        )


def write_manifest(folder: Path, shards: int) -> None:
    """The manifest of a store that is not there."""
    files = [FileRecord(f"part-{number:05d}.jsonl", 2**24, 1_700_000_000_000_000_000) for number in range(shards)]
    records = [
        ShardRecord(f"{n:06d}-000", 4000, 4_000_000, f"{n:016x}", "b" * 16, "c" * 16, [InputRange(n, 0, 2**24, 4000)])
        for n in range(shards)
    ]
    (folder / MANIFEST).write_bytes(Manifest({}, "<u2", files, records).to_json())


if __name__ == "__main__":
    main()
