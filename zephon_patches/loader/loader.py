"""The loader: a cursor and a topology give batches.

An iterable of micro-batches whose whole state is the cursor. It works with any PyTorch training loop;
``zephon_patches.build_loader`` makes one.
"""

import json
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from zephon_patches import mapping
from zephon_patches.config import MAX_NUMBER, whole
from zephon_patches.errors import LoaderError, StateError, ZephonError
from zephon_patches.loader.collate import Item, MicroBatchReader, Row
from zephon_patches.loader.failure import Items, ReadFailure, named
from zephon_patches.loader.plan import plan_rows
from zephon_patches.loader.state import CURSOR, ORDER, accepted_change, check_order, read_state, with_changes
from zephon_patches.loader.workers import Delivery, ItemReader
from zephon_patches.mapping import NO_SKIPS, Skips, Topology
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.samples.sequence import IGNORE_INDEX

__all__ = ["Loader"]

logger = logging.getLogger(__name__)

# Sources that a log line names.
_LISTED = 8


class Loader:
    """An iterable of micro-batches with a cursor.

    Each item is ``({"input": int64 (local_batch_size, seq_len)}, labels)``, labels int64 of the same shape with
    -100 where none counts; with ``data.positions`` the dict has ``positions`` too, of that shape and type.
    ``micro_batches_per_step`` items make a step. Make it with ``build_loader``.

    ``iter(loader)`` starts at the cursor and replaces the iterator before it. ``load_state_dict`` and ``remap`` take
    effect at the next item, also on a running iterator. Where an item cannot be had (``ReadError``, ``StoreError``)
    nothing was counted, and ``iter(loader)`` begins the step anew.

    Args:
        order: The global order.
        reader: Reads the rows.
        description: The ``order`` entry of the state.
        global_batch_size: Samples of a step, over all ranks.
        local_batch_size: Rows of a micro-batch.
        topology: This rank's place.
        end: Number at which the data ends; None if it does not.
        skips: Numbers that are left out.
        mixtures: For each stage its first number and its weights in words, for the log.
        accept_change: Fingerprint of the order with which a state of another one may be loaded.
        delivery: Read here, or by worker processes.

    Attributes:
        end: As given.
        restored: Whether a state was loaded.
        steps_delivered: Steps completed by this loader; starts at 0 when the cursor is set, as does the next one.
        samples_delivered: Samples of the global order in the steps completed by this loader, all ranks together
            and without padding rows.
        seconds_waited: For items, since the loader was made.
        on_item: Called with each item before it is handed out, and before it is counted.
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
        skips: Skips = NO_SKIPS,
        mixtures: Sequence[tuple[int, str]] = (),
        accept_change: str = "",
        delivery: Delivery = Delivery(),  # noqa: B008  (frozen)
    ) -> None:
        self.seq_len = reader.seq_len
        self.global_batch_size = global_batch_size
        self._place(topology, local_batch_size)
        self._order = order
        self._reader = reader
        self._description = description
        self._state_order = description  # with what was accepted on the way
        self._skips = skips
        self._mixtures = mixtures
        self._accept_change = accept_change
        self.end = end
        self._cursor = 0
        self._delivered = 0  # micro-batches of the step that starts at the cursor
        self._has_labels = False
        self._found_labels = False  # in the step that starts at the cursor
        self._iterator: object | None = None  # marks the iterator that counts
        self._moves = 0  # how often the cursor or the topology was set from outside
        self.restored = False
        self.steps_delivered = self.samples_delivered = 0
        self.seconds_waited = 0.0
        self.on_item: Callable[[Item], None] | None = None
        self._items = ItemReader(reader, delivery)

    @property
    def sources(self) -> list[str]:
        """Names of the sources, in the order's numbering."""
        return [source["name"] for source in json.loads(self._description)["sources"]]

    @property
    def documents(self) -> list[int]:
        """Of each source, those without a token too."""
        return self._reader.documents

    @property
    def tokens(self) -> list[int]:
        """Of each source."""
        return [source["tokens"] for source in json.loads(self._description)["sources"]]

    def numbers_from(self, cursor: int) -> np.ndarray:
        """This rank's numbers in the step that starts at a cursor: int64, without padding rows."""
        step = next(mapping.steps_from(cursor, self.global_batch_size, self.end, self._skips))
        numbers = mapping.numbers_of_rank(
            step, self.global_batch_size, self.local_batch_size, self.topology, self._skips
        ).ravel()
        return numbers[numbers >= 0]

    @property
    def order(self) -> GlobalOrder:
        return self._order

    @property
    def cursor(self) -> int:
        """The number behind the last completed step. A step is complete when its last item is handed out."""
        return self._cursor

    @property
    def delivered_in_step(self) -> int:
        """Items handed out of the step that starts at the cursor; 0 between steps."""
        return self._delivered

    @property
    def samples_may_be_without_labels(self) -> bool:
        """Whether there may be samples none of whose labels counts, and so steps of all ranks."""
        return self._reader.may_mask_all

    @property
    def may_be_without_labels(self) -> bool:
        """Whether this rank may have a step in which none of its labels counts: there is a short one at an end."""
        return self.end is not None or self.samples_may_be_without_labels

    @property
    def has_labels_in_last_step(self) -> bool:
        """Whether a label of this rank counted in the last completed step."""
        return self._has_labels

    def steps_left(self, cursor: int) -> int | None:
        """Steps from a cursor to the end of the data, at the present global batch; None if it has no end."""
        if self.end is None:
            return None
        return mapping.steps_left(cursor, self.global_batch_size, self.end, self._skips)

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
        self._found_labels = False
        self.steps_delivered = self.samples_delivered = 0
        self._moves += 1

    def remap(self, dp_rank: int, dp_size: int, *, local_batch_size: int | None = None) -> None:
        """Goes on from the cursor in another place of the batch mesh; takes effect at the next item, as a load does.

        All ranks do so behind the same step. Nothing is opened or planned anew, and items fetched ahead are dropped. A
        rank that comes in builds its loader and loads the state of one that was there.

        Args:
            dp_rank, dp_size: The place from now on.
            local_batch_size: Rows of a micro-batch from now on; None leaves it.

        Raises:
            ConfigError: A size is no integer.
            LoaderError: A step is under way.
            MappingError: The global batch cannot be dealt to that topology. In either case nothing has changed.
        """
        topology = Topology(whole("dp_rank", dp_rank), whole("dp_size", dp_size))
        local = self.local_batch_size if local_batch_size is None else whole("local_batch_size", local_batch_size)
        if self._delivered:
            raise LoaderError(
                f"remap to rank {topology.dp_rank} of {topology.dp_size}: {self._delivered} of "
                f"{self.micro_batches_per_step} items of the step at sample {self._cursor:,} are handed out, and a "
                "step is dealt as a whole; take its other items first, or begin it anew: loader.seek(loader.cursor)"
            )
        self._place(topology, local)
        self._moves += 1
        logger.info(
            "data: rank %s of %s from sample %s on; a step is %s items of %s rows",
            f"{topology.dp_rank:,}",
            f"{topology.dp_size:,}",
            f"{self._cursor:,}",
            f"{self.micro_batches_per_step:,}",
            f"{local:,}",
        )

    def _place(self, topology: Topology, local_batch_size: int) -> None:
        mapping.check(self.global_batch_size, local_batch_size, topology)
        self.topology = topology
        self.local_batch_size = local_batch_size
        self.micro_batches_per_step = mapping.micro_batches_per_step(
            self.global_batch_size, local_batch_size, topology.dp_size
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of the last completed step: plain, immutable values, the same on every rank."""
        return {CURSOR: self._cursor, ORDER: self._state_order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Moves the cursor, forwards or backwards; items fetched ahead are dropped.

        Raises:
            StateError: It is no whole state, or it counts in another order of data.
        """
        cursor, saved, lines = self._compare(state_dict)
        self.seek(cursor)
        self.restored = True
        changes = saved.get("changes", [])
        if lines:
            changes = [*changes, accepted_change(saved, cursor, lines)]
            logger.warning(
                "data: data.accept_change: from sample %s on the order is another one, so samples may repeat or be "
                "missed. What has changed: %s",
                f"{cursor:,}",
                "; ".join(lines),
            )
        elif self._accept_change:
            logger.info("data: data.accept_change has nothing to accept any more, and can be removed")
        self._state_order = with_changes(self._description, changes)
        logger.info("data: resume at sample %s (%s)", f"{cursor:,}", self._in_words(cursor))
        self.log_mixture()
        before = saved["global_batch_size"]
        if before != self.global_batch_size:
            logger.info(
                "data: the global batch was %s samples and is %s now; the order goes on from sample %s",
                f"{before:,}",
                f"{self.global_batch_size:,}",
                f"{cursor:,}",
            )

    def log_mixture(self) -> None:
        """Says which stage is in force at the cursor, and which comes next."""
        if not self._mixtures:
            return
        number = bisect_right([at for at, _ in self._mixtures], self._cursor) - 1
        at, weights = self._mixtures[number]
        if len(self._mixtures) == 1:
            logger.info("data: mixture: %s", weights)
            return
        later = self._mixtures[number + 1 :]
        following = f"next from sample {later[0][0]:,} on: {later[0][1]}" if later else "the last stage"
        logger.info("data: mixture from sample %s on: %s; %s", f"{at:,}", weights, following)

    def check_state(self, state_dict: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Checks that a state could be loaded, and loads nothing: (cursor, order).

        Raises:
            StateError: As ``load_state_dict``.
        """
        cursor, saved, _ = self._compare(state_dict)
        return cursor, saved

    def _compare(self, state_dict: dict[str, Any]) -> tuple[int, dict[str, Any], list[str]]:
        """A state's cursor and order, and in what an accepted order differs from it."""
        cursor, saved = read_state(state_dict)
        lines = check_order(
            saved, json.loads(self._description), cursor, self._reader.data_changes, self._accept_change
        )
        if self.end is not None and cursor > self.end:
            raise StateError(
                f"loader state: cursor is {cursor:,}, but this loader ends at sample {self.end:,}; raise the number of "
                "epochs (data.epochs) to go on"
            )
        return cursor, saved, lines

    def _in_words(self, cursor: int) -> str:
        """Where the sources stand, in words."""
        names = [source["name"] for source in json.loads(self._description)["sources"]]
        places = [
            f"epoch {epoch:,}, sample {position:,} of {size:,} of source {name!r}"
            for name, (epoch, position, size) in zip(names, self._order.epochs_at(cursor), strict=True)
        ]
        more = f"; and {len(places) - _LISTED} more sources" if len(places) > _LISTED else ""
        return "; ".join(places[:_LISTED]) + more

    def __iter__(self) -> Iterator[Item]:
        self._iterator = marker = object()
        self._delivered = 0
        self._found_labels = False
        return Items(self._iterate(marker), lambda: f"at sample {self._cursor:,}, where the step starts")

    def _iterate(self, marker: object) -> Iterator[Item]:
        while True:
            self._check_last_iterator(marker)
            moves = self._moves
            items = self._items.items(self._plan())
            while True:
                asked = time.perf_counter()
                try:
                    item = next(items, None)
                except ReadFailure as failure:
                    raise self._named(failure) from failure.__cause__
                self.seconds_waited += time.perf_counter() - asked
                if item is None:
                    return
                if self.on_item is not None:
                    self.on_item(item)
                self._delivered += 1
                if self._reader.may_mask_all and not self._found_labels:
                    self._found_labels = bool((item[1] != IGNORE_INDEX).any())
                if self._delivered == self.micro_batches_per_step:
                    self._complete_step()
                yield item
                del item  # from here on its memory is the caller's alone
                self._check_last_iterator(marker)
                if self._moves != moves:
                    break
            del items  # stops its workers and drops what they fetched ahead

    def _check_last_iterator(self, marker: object) -> None:
        if self._iterator is not marker:
            raise LoaderError(
                "this iterator was replaced by a later iter(loader); only the last one counts, since the loader has "
                "one cursor"
            )

    def _complete_step(self) -> None:
        size, cursor = mapping.step_at(self._cursor, self.global_batch_size, self.end, self._skips)
        if cursor > MAX_NUMBER:
            raise LoaderError(
                f"the step at sample {self._cursor:,} goes beyond sample {MAX_NUMBER:,}, behind which no order has "
                "samples: data.skip leaves too few; to end a run, set training.steps or data.epochs"
            )
        self._cursor = cursor
        self._delivered = 0
        self.steps_delivered += 1
        self.samples_delivered += size
        first, last = mapping.part_of_rank(size, self.topology)
        self._has_labels = self._found_labels if self._reader.may_mask_all else last > first
        self._found_labels = False

    def _plan(self) -> Iterator[Sequence[Row]]:
        """The rows of each micro-batch of this rank, from the cursor on; holds no reference to the loader."""
        steps = mapping.steps_from(self._cursor, self.global_batch_size, self.end, self._skips)
        return plan_rows(self._order, steps, self.global_batch_size, self.local_batch_size, self.topology, self._skips)

    def _named(self, failure: ReadFailure) -> ZephonError:
        """The error that says which item it is that cannot be had: the next one."""
        step = next(mapping.steps_from(self._cursor, self.global_batch_size, self.end, self._skips))
        numbers = mapping.numbers_of_rank(
            step, self.global_batch_size, self.local_batch_size, self.topology, self._skips
        )
        item = (
            f"item {self._delivered + 1:,} of {self.micro_batches_per_step:,} of the step at sample {self._cursor:,}, "
            f"on dp_rank {self.topology.dp_rank:,} of {self.topology.dp_size:,}"
        )
        return named(failure, self._reader, item, numbers[self._delivered].tolist())
