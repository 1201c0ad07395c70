"""What worker processes cost: the processor time that they add to each batch.

    PYTHONPATH=. python benchmarks/workers.py

Random tokens in a temporary folder, all of them in memory; batches of 8 x 2,048 taken as fast as they come, without
workers and with some. What workers add is the processor time of all processes less that without workers. Two others
stand beside it: sending the bytes of a batch through a socket, from a forked process that has them, and receiving them
in fresh memory; and torch's DataLoader, whose workers read the same rows with the same code. Prints medians of the
rounds, and of their ratios.
"""

import argparse
import itertools
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.deliver import make_loader, make_store
from benchmarks.tables import table
from zephon_patches.loader.collate import Item
from zephon_patches.loader.loader import Loader


def main() -> None:
    parser = argparse.ArgumentParser(description="Processor time that workers add")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers (1 and 2)")
    parser.add_argument("--batches", type=int, default=3000, help="batches of a measurement (3,000)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (9)")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch (8)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a row (2,048)")
    args = parser.parse_args()
    socket_copy = "copied through a socket"
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder), 64, 1_000_000)
        for shard in range(64):
            store.tokens(shard).sum()  # brings every page into memory

        def make(workers: int) -> Loader:
            return make_loader(store, args.rows, args.seq_len, workers)

        measurements: dict[str, Callable[[], tuple[float, float]]] = {
            socket_copy: lambda: through_socket(args.rows * (args.seq_len + 1), args.batches),
            "without workers": lambda: deliver(make(0), args.batches),
        }
        for workers in args.workers:
            some = f"{workers} worker{'s' if workers > 1 else ''}"
            measurements[some] = lambda workers=workers: deliver(make(workers), args.batches)
            measurements[f"{some}, DataLoader"] = lambda workers=workers: deliver(
                DataLoader(Rows(make(0)), batch_size=None, num_workers=workers), args.batches
            )
        rounds = [{name: measure() for name, measure in measurements.items()} for _ in range(args.rounds)]
    rows = []
    for name in measurements:
        ours, others = (statistics.median(found[name][i] for found in rounds) for i in (0, 1))
        rows.append([name, f"{1e6 * ours:.0f}", f"{1e6 * others:.0f}", "-", "-", "-"])
        if others and name != socket_copy:
            added = [sum(found[name]) - sum(found["without workers"]) for found in rounds]
            ratios = [a / sum(found[socket_copy]) for a, found in zip(added, rounds, strict=True)]
            rows[-1][3:] = [f"{1e6 * statistics.median(added):.0f}", f"{statistics.median(ratios):.2f}"]
            rows[-1].append(f"{min(ratios):.2f} to {max(ratios):.2f}")
    print(table(["", "us, this process", "us, others", "us added", "of the copy", "over the rounds"], rows))
    print("processor time a batch")


class Rows(IterableDataset[Item]):
    """The items of a loader for torch's DataLoader, of whose workers each reads its part."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        plan = itertools.islice(self._loader._plan(), worker.id, None, worker.num_workers)
        return map(self._loader._reader.read, plan)


def deliver(loader: Iterable[Item], batches: int) -> tuple[float, float]:
    """Processor time of this process and of the workers a batch, in the middle of a pass."""
    items = iter(loader)
    for _ in range(batches // 10):
        next(items)
    workers = [child.pid for child in multiprocessing.active_children()]
    before, ours = sum(map(processor_time, workers)), time.process_time()
    for _ in range(batches):
        next(items)
    return (time.process_time() - ours) / batches, (sum(map(processor_time, workers)) - before) / batches


def processor_time(pid: int | None) -> float:
    """Seconds of a running process and its threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def through_socket(words: int, times: int) -> tuple[float, float]:
    """Processor time of receiving so many words, int64, in fresh memory, and of sending them."""
    ours, theirs = socket.socketpair()
    values = np.ones(words, dtype=np.int64)
    pid = os.fork()
    if pid == 0:
        for _ in range(times):
            theirs.sendall(values.data)
        os._exit(0)
    theirs.close()
    started = time.process_time()
    for _ in range(times):
        view = np.empty(words, dtype=np.int64).data.cast("B")
        while view:
            view = view[ours.recv_into(view) :]
    seconds = time.process_time() - started
    _, _, usage = os.wait4(pid, 0)
    ours.close()
    return seconds / times, (usage.ru_utime + usage.ru_stime) / times


if __name__ == "__main__":
    main()
