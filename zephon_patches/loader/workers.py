"""From planned rows to items: read in this process, or in worker processes that read ahead.

With workers it is torch's DataLoader over a map-style data set and a sampler of our own. The order is evaluated
in the main process; workers get the places of a micro-batch's rows and send back its tensors. So nothing in the
data can depend on how many there are, how they start or how far they read ahead. Without workers there is no
DataLoader in the path.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from zephon_patches.errors import ConfigError
from zephon_patches.loader.collate import Item, MicroBatchReader, Row

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
        self._workers = (
            DataLoader(
                _MicroBatches(reader),
                batch_size=None,
                sampler=self._plan,
                num_workers=delivery.num_workers,
                collate_fn=_unchanged,
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
            return map(self._read, plan)
        self._plan.rows = plan
        return iter(self._workers)

    def _read(self, rows: Sequence[Row]) -> Item:
        inputs, labels = self._reader.read(rows)
        if self._pins:
            return {key: value.pin_memory() for key, value in inputs.items()}, labels.pin_memory()
        return inputs, labels


class _MicroBatches(Dataset):  # type: ignore[type-arg]
    def __init__(self, reader: MicroBatchReader) -> None:
        self._reader = reader

    def __getitem__(self, rows: Sequence[Row]) -> Item:
        return self._reader.read(rows)


class _Plan(Sampler):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.rows: Iterator[Sequence[Row]] = iter(())

    def __iter__(self) -> Iterator[Sequence[Row]]:
        return self.rows


def _unchanged(item: Any) -> Any:
    return item
