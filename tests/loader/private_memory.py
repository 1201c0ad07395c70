"""Private memory of a loader and of its workers over an epoch, of a process that does nothing else.

python -m tests.loader.private_memory '[[150, 16385, 2, "fork"]]'    # shards, tokens of each, workers, how they start

Private is what the process has written (``Private_Dirty``): pages of the stores' files are the system's, and shared.
"""

import gc
import itertools
import json
import multiprocessing
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from zephon_patches.loader.collate import MicroBatchReader
from zephon_patches.loader.loader import Loader
from zephon_patches.loader.workers import Delivery
from zephon_patches.mapping import Topology
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.order.shuffle import SourceOrder
from zephon_patches.samples.chunking import num_samples
from zephon_patches.store.manifest import MANIFEST, Manifest, ShardRecord
from zephon_patches.store.reader import TokenStore

SEQ_LEN, ROWS = 2048, 8


def write_sparse_store(folder: Path, shards: int, shard_tokens: int, files: bool = True) -> None:
    """A store that opens as any other, and whose tokens are all 0: its files are holes.

    Args:
        folder: Made where it is not there.
        shards: How many.
        shard_tokens: Of each shard.
        files: Whether the shards have files; else the manifest alone is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        ShardRecord(f"{n:06d}-000", 1, shard_tokens, f"{n:016x}", f"{2**63 + n:016x}", "c" * 16) for n in range(shards)
    ]
    (folder / MANIFEST).write_bytes(Manifest({}, "<u2", [], records).to_json())
    if files:
        for record in records:
            with open(folder / f"{record.name}.bin", "wb") as file:
                file.truncate(2 * shard_tokens)


def private(process: int | str = "self") -> float:
    """MiB that a process has written."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024


def children() -> list[int]:
    found = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return [int(pid) for pid in found]


def measure(folder: Path, workers: int, method: str | None) -> dict[str, Any]:
    """MiB of this process before and after opening; then of it and of its largest worker, from the first batch on."""

    def now() -> list[float]:
        gc.collect()
        return [private(), max(map(private, children()), default=0.0)]

    now()
    before = private()
    store = TokenStore(folder)
    order = GlobalOrder([SourceOrder("sparse", num_samples(store.tokens_per_shard, SEQ_LEN), 0, 256)])
    loader = Loader(
        order,
        MicroBatchReader([store], SEQ_LEN),
        "{}",
        global_batch_size=ROWS,
        local_batch_size=ROWS,
        topology=Topology(0, 1),
        end=order.num_samples,
        delivery=Delivery(workers, multiprocessing_context=method),
    )
    opened = now()[0]
    batches = -(-order.num_samples // ROWS)
    # The last ones stay, or the workers would be gone.
    parts = sorted([1, 8 * (workers + 1), batches // 4, batches // 2, batches - 8 * (workers + 1)])
    items, taken, epoch = iter(loader), 0, []
    for part in parts:
        taken += sum(1 for _ in itertools.islice(items, part - taken))
        epoch.append(now())
    rest = sum(1 for _ in items)
    assert taken + rest == batches, (taken, rest, batches)
    return {"start": before, "opened": opened, "epoch": epoch}


def measured_apart(shards: int, shard_tokens: int, workers: int, method: str | None) -> dict[str, Any]:
    """As ``measure``, in a fork, over a store of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sparse_store(folder, shards, shard_tokens)
        gc.collect()
        context = multiprocessing.get_context("fork")
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_measure_and_send, args=(sending, folder, workers, method))
        process.start()
        sending.close()
        found: dict[str, Any] = receiving.recv()  # EOFError if it failed, and it has said why
        process.join()
        return found


def _measure_and_send(sending: Connection, *case: Any) -> None:
    sending.send(measure(*case))


if __name__ == "__main__":
    print(json.dumps([measured_apart(*case) for case in json.loads(sys.argv[1])]))
