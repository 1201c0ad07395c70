"""The loader: a cursor and a topology give batches.

An iterable of micro-batches whose whole state is the cursor. It works with any PyTorch training loop;
``zephon_patches.build_loader`` makes one.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from zephon_patches import mapping
from zephon_patches.config import MAX_NUMBER
from zephon_patches.errors import LoaderError, StateError
from zephon_patches.loader.collate import Item, MicroBatchReader, Row
from zephon_patches.loader.plan import plan_rows
from zephon_patches.loader.state import CURSOR, ORDER, check_order, read_state
from zephon_patches.loader.workers import Delivery, ItemReader
from zephon_patches.mapping import Topology
from zephon_patches.order.global_order import GlobalOrder

__all__ = ["Loader"]

logger = logging.getLogger(__name__)


class Loader:
    """An iterable of micro-batches with a cursor.

    Each item is ``({"input": int64 (local_batch_size, seq_len)}, labels)``, labels int64 of the same shape with
    -100 where none counts. ``micro_batches_per_step`` items make a step. Make it with ``build_loader``.

    ``iter(loader)`` starts at the cursor and replaces the iterator before it. ``load_state_dict`` takes effect
    at the next item, also on a running iterator.

    Args:
        order: The global order.
        reader: Reads the rows.
        description: The ``order`` entry of the state.
        global_batch_size: Samples of a step, over all ranks.
        local_batch_size: Rows of a micro-batch.
        topology: This rank's place.
        end: Number at which the data ends; None if it does not.
        delivery: Read here, or by worker processes.

    Attributes:
        end: As given.
        restored: Whether a state was loaded.
        steps_delivered: Steps completed by this loader; starts at 0 when the cursor is set, as does the next one.
        samples_delivered: Samples of the global order in the steps completed by this loader, all ranks together
            and without padding rows.
    """

    def __init__(
        self,
        order: GlobalOrder,
        reader: MicroBatchReader,
        description: str,
        *,
        global_batch_size: int,
        local_batch_size: int,
        topology: Topology,
        end: int | None,
        delivery: Delivery = Delivery(),  # noqa: B008  (frozen)
    ) -> None:
        mapping.check(global_batch_size, local_batch_size, topology)
        self.seq_len = reader.seq_len
        self.global_batch_size = global_batch_size
        self.local_batch_size = local_batch_size
        self.topology = topology
        self.micro_batches_per_step = mapping.micro_batches_per_step(
            global_batch_size, local_batch_size, topology.dp_size
        )
        self._order = order
        self._reader = reader
        self._description = description
        self.end = end
        self._cursor = 0
        self._delivered = 0  # micro-batches of the step that starts at the cursor
        self._rows_in_last_step = 0
        self._iterator: object | None = None  # marks the iterator that counts
        self._moves = 0  # how often the cursor was set from outside
        self.restored = False
        self.steps_delivered = self.samples_delivered = 0
        self._items = ItemReader(reader, delivery)

    @property
    def cursor(self) -> int:
        """The number behind the last completed step. A step is complete when its last item is handed out."""
        return self._cursor

    @property
    def delivered_in_step(self) -> int:
        """Items handed out of the step that starts at the cursor; 0 between steps."""
        return self._delivered

    @property
    def rows_in_last_step(self) -> int:
        """Rows of this rank in the last completed step, without padding rows; 0 only in a short last step."""
        return self._rows_in_last_step

    def seek(self, cursor: int) -> None:
        """Starts at a sequence number; takes effect at the next item, as a load does.

        Raises:
            LoaderError: The number is negative or above any order's.
        """
        last = MAX_NUMBER if self.end is None else self.end
        if not 0 <= cursor <= last:
            raise LoaderError(f"cursor = {cursor:,}: expected 0 to {last:,}")
        self._cursor = cursor
        self._delivered = 0
        self.steps_delivered = self.samples_delivered = 0
        self._moves += 1

    def state_dict(self) -> dict[str, Any]:
        """The state of the last completed step: plain, immutable values, the same on every rank."""
        return {CURSOR: self._cursor, ORDER: self._description}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Moves the cursor, forwards or backwards; items fetched ahead are dropped.

        Raises:
            StateError: It is no whole state, or it counts in another order of data.
        """
        cursor, saved = self.check_state(state_dict)
        present = json.loads(self._description)
        self.seek(cursor)
        self.restored = True
        places = ", ".join(
            f"epoch {epoch:,}, sample {position:,} of {size:,} of source {source['name']!r}"
            for source, (epoch, position, size) in zip(present["sources"], self._order.epochs_at(cursor), strict=True)
        )
        logger.info("data: resume at sample %s (%s)", f"{cursor:,}", places)
        before = saved["global_batch_size"]
        if before != self.global_batch_size:
            logger.info(
                "data: the global batch was %s samples and is %s now; the order goes on from sample %s",
                f"{before:,}",
                f"{self.global_batch_size:,}",
                f"{cursor:,}",
            )

    def check_state(self, state_dict: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Checks that a state could be loaded, and loads nothing: (cursor, order).

        Raises:
            StateError: As ``load_state_dict``.
        """
        cursor, saved = read_state(state_dict)
        check_order(saved, json.loads(self._description), cursor, self._reader.data_changes)
        if self.end is not None and cursor > self.end:
            raise StateError(
                f"loader state: cursor is {cursor:,}, but this loader reads one epoch and ends at sample {self.end:,}"
            )
        return cursor, saved

    def __iter__(self) -> Iterator[Item]:
        self._iterator = marker = object()
        self._delivered = 0
        return self._iterate(marker)

    def _iterate(self, marker: object) -> Iterator[Item]:
        while True:
            self._check_last_iterator(marker)
            moves = self._moves
            items = self._items.items(self._plan())
            for item in items:
                self._delivered += 1
                if self._delivered == self.micro_batches_per_step:
                    self._complete_step()
                yield item
                self._check_last_iterator(marker)
                if self._moves != moves:
                    break
            else:
                return
            del items  # stops its workers and drops what they fetched ahead

    def _check_last_iterator(self, marker: object) -> None:
        if self._iterator is not marker:
            raise LoaderError(
                "this iterator was replaced by a later iter(loader); only the last one counts, since the loader has "
                "one cursor"
            )

    def _complete_step(self) -> None:
        start, self._cursor = self._cursor, mapping.next_cursor(self._cursor, self.global_batch_size, self.end)
        self._delivered = 0
        self.steps_delivered += 1
        self.samples_delivered += self._cursor - start
        first, last = mapping.part_of_rank(self._cursor - start, self.topology)
        self._rows_in_last_step = last - first

    def _plan(self) -> Iterator[Sequence[Row]]:
        """The rows of each micro-batch of this rank, from the cursor on; holds no reference to the loader."""
        steps = mapping.steps_from(self._cursor, self.global_batch_size, self.end)
        return plan_rows(self._order, steps, self.global_batch_size, self.local_batch_size, self.topology)
