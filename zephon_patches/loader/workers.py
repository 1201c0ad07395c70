"""From planned rows to items: read in this process, or in worker processes that read ahead (``pool.py``).

The order is evaluated in the main process; workers get the places of a micro-batch's rows and fill its tensors. So
nothing in the data can depend on how many there are, how they start or how far they read ahead.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch

from zephon_patches.errors import ConfigError
from zephon_patches.loader.ahead import Ahead
from zephon_patches.loader.collate import Item, MicroBatchReader, Row
from zephon_patches.loader.failure import ReadFailure, failed_by
from zephon_patches.loader.pool import WorkerPool

__all__ = ["Delivery", "ItemReader"]

# Items that are there before they are asked for, and those that each worker reads ahead where nobody says how many: so
# many words (int64) of them, which are 16 MiB, but 2 to 32.
_AHEAD_WORDS = 2**21
_LEAST_AHEAD, _MOST_AHEAD = 2, 32

# Seconds in which persistent workers give what they were asked for when the loader starts at another place.
_PATIENCE = 2.0


@dataclass(frozen=True)
class Delivery:
    """How items are read; changes nothing in them."""

    num_workers: int = 0
    """
    Worker processes; 0 reads in the calling process. Their items lie in memory that a fork of this process shares: what
    one of them writes into an item the other one sees
    """
    prefetch_factor: int | None = None
    """Items that each worker reads ahead; None for 2 to 32, the fewer the larger they are; counts only with workers"""
    persistent_workers: bool = False
    """Whether workers stay when the loader starts at another place; counts only with workers"""
    pin_memory: bool = False
    """Whether tensors lie in page-locked memory; counts only with an accelerator"""
    multiprocessing_context: str | None = None
    """
    How workers start: "fork", "spawn" or "forkserver", Python's default if None; counts only with workers. A fork is
    made for a parent with threads; but where one of them is in NumPy's OpenBLAS, os.fork() itself may not return: there
    take "forkserver"
    """
    timeout: float = 0.0
    """Seconds without a sign of a worker that is waited for, after which it is an error; 0 waits; only with workers"""

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ConfigError(f"num_workers = {self.num_workers}: expected at least 0")
        if not self.num_workers:
            return
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise ConfigError(f"prefetch_factor = {self.prefetch_factor}: expected at least 1")
        methods = [None, *multiprocessing.get_all_start_methods()]
        if self.multiprocessing_context not in methods:
            raise ConfigError(f"multiprocessing_context = {self.multiprocessing_context!r}: expected one of {methods}")


class ItemReader:
    """Reads planned rows into items, from any place of the order, as often as needed.

    Args:
        reader: Reads one micro-batch.
        delivery: With or without workers.
    """

    def __init__(self, reader: MicroBatchReader, delivery: Delivery) -> None:
        self._reader = reader
        self._delivery = delivery
        self._pins = delivery.pin_memory and torch.accelerator.is_available()
        self._pool: WorkerPool | None = None  # of persistent workers
        self._ahead: Ahead[Item] | None = None  # of the last iterator, while that is there

    def items(self, plan: Iterator[Sequence[Row]]) -> Iterator[Item]:
        """The items of a plan. With workers, asking anew drops what was read ahead for the plan before.

        Args:
            plan: Rows of each micro-batch. It must hold no reference to who owns this object, or persistent workers
                would outlive their owner.

        Raises:
            ReadFailure: By the iterator, where the next item cannot be had.
        """
        return self._items_of_workers(plan) if self._delivery.num_workers else map(self._read, plan)

    def _items_of_workers(self, plan: Iterator[Sequence[Row]]) -> Iterator[Item]:
        first = list(islice(plan, 1))
        if not first:
            return
        words = self._reader.row_words * len(first[0])
        few = min(max(_AHEAD_WORDS // words, _LEAST_AHEAD), _MOST_AHEAD)
        pool = self._open_pool()
        ahead = Ahead(pool.items(chain(first, plan), self._delivery.prefetch_factor or few, words), few)
        self._ahead = ahead
        try:
            yield from ahead
        finally:
            self._end(ahead, pool)
            if self._ahead is ahead:
                self._ahead = None  # it holds items, or an error with all its frames

    def _open_pool(self) -> WorkerPool:
        """The persistent workers, if they do not hang, or others."""
        delivery = self._delivery
        if self._pool is not None and self._ahead is not None:
            self._end(self._ahead, self._pool)  # of an iterator that may be there still
        if self._pool is not None and self._pool.is_open:
            if self._pool.drop(_PATIENCE):
                return self._pool
            self._pool.close()
        pool = WorkerPool(
            self._reader,
            delivery.num_workers,
            self._pins,
            delivery.multiprocessing_context,
            delivery.timeout,
        )
        if delivery.persistent_workers:
            self._pool = pool
        return pool

    def _end(self, ahead: Ahead[Item], pool: WorkerPool) -> None:
        if ahead.is_stopped and not pool.is_open:
            return  # also where the interpreter ends, which has ended both, and in which nothing else can be done
        if self._delivery.persistent_workers and ahead.stop(_PATIENCE):
            return
        pool.interrupt()
        ahead.stop(_PATIENCE)  # so that nobody reads from it when it is closed
        pool.close()

    def _read(self, rows: Sequence[Row]) -> Item:
        try:
            inputs, labels = self._reader.read(rows)
            if self._pins:
                return {key: value.pin_memory() for key, value in inputs.items()}, labels.pin_memory()
        except Exception as error:
            raise ReadFailure(*failed_by(error), rows) from error
        return inputs, labels
