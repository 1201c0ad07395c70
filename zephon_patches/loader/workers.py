"""From planned rows to items: read in this process, or in worker processes that read ahead.

With workers it is torch's DataLoader over a map-style data set and a sampler of our own. The order is evaluated
in the main process; workers get the places of a micro-batch's rows and send back its tensors. So nothing in the
data can depend on how many there are, how they start or how far they read ahead. Without workers there is no
DataLoader in the path.

Only their parent ends workers. A SIGTERM or SIGINT to the process group (torchrun, schedulers and Ctrl-C send those)
is the trainer's to deal with, which may want to finish its step. They are blocked from before a worker starts, since
a spawned one imports for seconds; a SIGTERM by the parent itself, as multiprocessing sends it at exit, still counts.
A worker whose parent is gone ends too: torch's workers look every 5 seconds.
"""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from zephon_patches.errors import ConfigError
from zephon_patches.loader.collate import Buffers, Item, MicroBatchReader, Row

__all__ = ["Delivery", "ItemReader"]


@dataclass(frozen=True)
class Delivery:
    """How items are read, as torch's DataLoader takes it; changes nothing in them."""

    num_workers: int = 0
    """Worker processes; 0 reads in the calling process"""
    prefetch_factor: int | None = None
    """Items that each worker reads ahead; counts only with workers"""
    persistent_workers: bool = False
    """Whether workers stay when the loader starts at another place; counts only with workers"""
    pin_memory: bool = False
    """Whether tensors lie in page-locked memory; counts only with an accelerator"""
    multiprocessing_context: str | None = None
    """How workers start: "fork", "spawn" or "forkserver"; counts only with workers"""

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ConfigError(f"num_workers = {self.num_workers}: expected at least 0")


class ItemReader:
    """Reads planned rows into items, from any place of the order, as often as needed.

    Args:
        reader: Reads one micro-batch.
        delivery: With or without workers.
    """

    def __init__(self, reader: MicroBatchReader, delivery: Delivery) -> None:
        self._reader = reader
        self._pins = delivery.pin_memory and torch.accelerator.is_available()
        self._plan = _Plan()
        self._start_method = delivery.multiprocessing_context
        self._workers = (
            DataLoader(
                _MicroBatches(reader),
                batch_size=None,
                sampler=self._plan,
                num_workers=delivery.num_workers,
                collate_fn=_unchanged,
                worker_init_fn=_end_by_parent_alone if _KNOWS_SENDERS else None,
                prefetch_factor=delivery.prefetch_factor,
                persistent_workers=delivery.persistent_workers,
                pin_memory=self._pins,
                multiprocessing_context=delivery.multiprocessing_context,
                # DataLoader draws its workers' seeds; from a generator of its own, the global one stays as it is.
                generator=torch.Generator(),
            )
            if delivery.num_workers
            else None
        )

    def items(self, plan: Iterator[Sequence[Row]]) -> Iterator[Item]:
        """The items of a plan. With workers, asking anew drops what was read ahead for the plan before.

        Args:
            plan: Rows of each micro-batch. It must hold no reference to who owns this object, or persistent workers
                would outlive their owner.
        """
        if self._workers is None:
            return map(self._read_pinned if self._pins else self._reader.read, plan)
        self._plan.rows = plan
        if multiprocessing.get_context(self._start_method).get_start_method() != "fork":
            resource_tracker.ensure_running()  # where it starts with the first worker, it unblocks the signals
        with _signals_blocked():  # workers inherit it
            return map(self._reader.item, iter(self._workers))

    def _read_pinned(self, rows: Sequence[Row]) -> Item:
        tokens, labels, positions = (
            None if buffer is None else buffer.pin_memory() for buffer in self._reader.read_buffers(rows)
        )
        assert tokens is not None
        return self._reader.item((tokens, labels, positions))


class _MicroBatches(Dataset):  # type: ignore[type-arg]
    def __init__(self, reader: MicroBatchReader) -> None:
        self._reader = reader

    def __getitem__(self, rows: Sequence[Row]) -> Buffers:
        return self._reader.read_buffers(rows)


class _Plan(Sampler):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.rows: Iterator[Sequence[Row]] = iter(())

    def __iter__(self) -> Iterator[Sequence[Row]]:
        return self.rows


def _unchanged(item: Any) -> Any:
    return item


_KNOWS_SENDERS = hasattr(signal, "sigwaitinfo")  # not on macOS and Windows: there a group's signals end workers


@contextmanager
def _signals_blocked() -> Iterator[None]:
    if not _KNOWS_SENDERS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_by_parent_alone(worker_id: int) -> None:
    """In a worker: lets a SIGTERM by its parent end it. SIGTERM and SIGINT stay blocked."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # A forkserver that started elsewhere has not inherited the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    folder_of_parent = config.get("tempdir")

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            pass
        # Sockets, over which tensors go; os._exit, which a main thread that hangs does not stop, would leave it.
        folder = config.get("tempdir")
        if folder is not None and folder != folder_of_parent:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
