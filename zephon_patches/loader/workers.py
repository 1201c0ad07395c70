"""Reading in worker processes: torch's DataLoader over a map-style data set and a sampler of our own.

The order is evaluated in the main process; workers get the places of a micro-batch's rows and send back its
tensors. So nothing in the data can depend on how many there are, how they start or how far they read ahead.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from zephon_patches.loader.collate import Item, MicroBatchReader, Row

__all__ = ["WorkerPool"]


class WorkerPool:
    """A DataLoader that can be started at any place of the order, as often as needed.

    Args:
        reader: Reads a micro-batch.
        plan: Gives the rows of the micro-batches to come, from the loader's cursor on.
        num_workers: At least 1.
        prefetch_factor, persistent_workers, pin_memory, multiprocessing_context: As torch's DataLoader.
    """

    def __init__(
        self,
        reader: MicroBatchReader,
        plan: Callable[[], Iterator[Sequence[Row]]],
        num_workers: int,
        prefetch_factor: int | None,
        persistent_workers: bool,
        pin_memory: bool,
        multiprocessing_context: str | None,
    ) -> None:
        self._loader = DataLoader(
            _MicroBatches(reader),
            batch_size=None,
            sampler=_Plan(plan),
            num_workers=num_workers,
            collate_fn=_unchanged,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            multiprocessing_context=multiprocessing_context,
            # DataLoader draws its workers' seeds; from a generator of its own, the global one stays as it is.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[Item]:
        return iter(self._loader)


class _MicroBatches(Dataset):  # type: ignore[type-arg]
    def __init__(self, reader: MicroBatchReader) -> None:
        self._reader = reader

    def __getitem__(self, rows: Sequence[Row]) -> Item:
        return self._reader.read(rows)


class _Plan(Sampler):  # type: ignore[type-arg]
    def __init__(self, plan: Callable[[], Iterator[Sequence[Row]]]) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[Sequence[Row]]:
        return self._plan()


def _unchanged(item: Any) -> Any:
    return item
