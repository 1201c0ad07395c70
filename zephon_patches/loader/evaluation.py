"""A loader for validation: every pass reads the same samples, from number 0; it holds no state.

Either a number of batches, or every sample of one epoch once. In the second case the samples are dealt evenly:
101 samples on 4 ranks with batches of 2 make ceil(101 / 8) = 13 batches of 7 or 8 samples, the same number on
every rank, so no rank waits for one that has run out; missing rows are padding. Even batches also keep a mean of
batch means close to the mean over all samples, whatever the number of ranks.
"""

from collections.abc import Iterator

from zephon_patches.errors import LoaderError
from zephon_patches.loader.collate import Item, MicroBatchReader
from zephon_patches.loader.failure import Items, ReadFailure, named
from zephon_patches.loader.plan import plan_rows
from zephon_patches.loader.workers import Delivery, ItemReader
from zephon_patches.mapping import Topology, even_steps, steps_from
from zephon_patches.order.global_order import GlobalOrder

__all__ = ["EvaluationLoader"]


class EvaluationLoader:
    """An iterable of batches; each ``iter()`` starts at sample 0.

    Args:
        order: The global order.
        reader: Reads the rows.
        description: The order's, as in ``Loader``'s state; kept for comparing ranks.
        local_batch_size: Rows of a batch on one rank.
        topology: This rank's place.
        num_batches: Batches of a pass, over as many epochs as they need; None for one whole epoch.
        delivery: Read here, or by worker processes.
    """

    def __init__(
        self,
        order: GlobalOrder,
        reader: MicroBatchReader,
        description: str,
        *,
        local_batch_size: int,
        topology: Topology,
        num_batches: int | None,
        delivery: Delivery = Delivery(),  # noqa: B008  (frozen)
    ) -> None:
        self.description = description
        self._order = order
        self._batch_size = local_batch_size * topology.dp_size
        self._local_batch_size = local_batch_size
        self._topology = topology
        self._samples = order.end(epochs=1)
        self._num_batches = num_batches
        self._reader = reader
        self._items = ItemReader(reader, delivery)
        self._iterator: object | None = None  # marks the last pass

    def __len__(self) -> int:
        return -(-self._samples // self._batch_size) if self._num_batches is None else self._num_batches

    def __iter__(self) -> Iterator[Item]:
        if self._num_batches is None:
            steps = even_steps(self._samples, self._batch_size)
        else:
            steps = steps_from(0, self._batch_size, self._num_batches * self._batch_size)
        plan = plan_rows(self._order, steps, self._batch_size, self._local_batch_size, self._topology)
        self._iterator = marker = object()
        return Items(self._pass(self._items.items(plan), marker), lambda: "at sample 0")

    def _pass(self, items: Iterator[Item], marker: object) -> Iterator[Item]:
        batches = 0
        try:
            self._check_last_pass(marker)
            for item in items:
                batches += 1
                yield item
                del item  # as in the loader
                self._check_last_pass(marker)
        except ReadFailure as failure:
            rank, size = self._topology
            which = f"batch {batches + 1:,} of {len(self):,} of a validation pass, on dp_rank {rank:,} of {size:,}"
            raise named(failure, self._reader, which, None) from failure.__cause__

    def _check_last_pass(self, marker: object) -> None:
        """Before an item is asked for: persistent workers serve one pass at a time."""
        if self._iterator is not marker:
            raise LoaderError("this pass was replaced by a later iter(loader); only the last one counts")
