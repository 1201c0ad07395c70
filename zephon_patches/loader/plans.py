"""Finds the plans of a store, or makes them: by the training run at first use, or by ``zephon-data prepare``.

Whoever comes while plans are missing makes them along, as with the shards of a store: each plan under a lock of its
own, by any number of processes on any machines; of a training start by one process of each machine, while the others
wait. They come to work as builders do, so nothing is tidied up under them. Who finds all plans there writes the list
that closes them. All of that gives the same bytes whoever does it.

A plan is made from 4 bytes of index a document, so this takes about a second for some million documents.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from zephon_patches.errors import StoreError
from zephon_patches.prepare.unfinished import Unfinished, held, taken
from zephon_patches.samples.plan_list import PlanEntry, PlanList, entry_of, list_path, read_list, write_list
from zephon_patches.store.reader import TokenStore

__all__ = ["open_plans"]

logger = logging.getLogger(__name__)

_POLL_SECONDS, _REPORT_SECONDS = 0.1, 10.0


def open_plans(store: TokenStore, name: str, packing: str, seq_len: int, one_per_machine: bool = False) -> PlanList:
    """Opens the plans of a store; makes those that are missing, along with others that do.

    Args:
        store: A finished one.
        name: Of its source, for messages.
        packing: One of ``PLANNERS``.
        seq_len: Places of a sample.
        one_per_machine: Whether to leave the work to another process of this machine where one is at it, and wait.

    Raises:
        StoreError: An index is damaged, or the plans cannot be made here.
    """
    try:
        return read_list(store, packing, seq_len)
    except StoreError:
        pass  # none, or of other data: it is made again
    try:
        _make(store, name, packing, seq_len, one_per_machine)
    except OSError as error:
        raise StoreError(
            f"{store.folder}: the plans for data.packing = {packing!r} at seq_len {seq_len:,} are missing, and cannot "
            f"be made here ({error}); make them where the folder can be written to: zephon-data prepare with --packing "
            f"{packing} --seq-len {seq_len}, or with the training config"
        ) from error
    return read_list(store, packing, seq_len)


def _make(store: TokenStore, name: str, packing: str, seq_len: int, one_per_machine: bool) -> None:
    place = Unfinished(store.folder)
    started = time.monotonic()
    with _at_work(place):
        seat = place.seat()
        if one_per_machine:
            while not taken(seat):
                if _is_listed(store, packing, seq_len):
                    return
                time.sleep(_POLL_SECONDS)
        try:
            if _is_listed(store, packing, seq_len):
                return
            entries = _entries(store, name, place, packing, seq_len)
            write_list(store.folder, store.data_fingerprint, packing, seq_len, entries)
        finally:
            seat.release()
    samples, labels = sum(entry.samples for entry in entries), sum(entry.labels for entry in entries)
    logger.info(
        "source %r: planned %s samples of %s places in %.1f s, %.2f %% of the places filled, %s documents without a "
        "label left out: %s",
        name,
        f"{samples:,}",
        f"{seq_len:,}",
        time.monotonic() - started,
        100 * labels / max(samples * seq_len, 1),
        f"{sum(entry.left_out for entry in entries):,}",
        list_path(store.folder, packing, seq_len),
    )


def _entries(store: TokenStore, name: str, place: Unfinished, packing: str, seq_len: int) -> list[PlanEntry]:
    entries: dict[int, PlanEntry] = {}
    shards = len(store.tokens_per_shard)
    reported = time.monotonic()
    while len(entries) < shards:
        before = len(entries)
        for shard in range(shards):
            if shard in entries:
                continue
            with held(place.unit_lock(shard)) as locked:
                if locked:
                    entries[shard] = entry_of(store.folder, store, shard, packing, seq_len)
            if time.monotonic() - reported >= _REPORT_SECONDS:
                reported = time.monotonic()
                logger.info("source %r: %s of %s shards are planned", name, f"{len(entries):,}", f"{shards:,}")
        if len(entries) == before:  # the others are held
            time.sleep(_POLL_SECONDS)
    return [entries[shard] for shard in range(shards)]


def _is_listed(store: TokenStore, packing: str, seq_len: int) -> bool:
    try:
        read_list(store, packing, seq_len)
    except StoreError:
        return False
    return True


@contextmanager
def _at_work(place: Unfinished) -> Iterator[None]:
    """Comes to work in a store and goes when the block ends, as builders do."""
    while True:
        with held(place.plan_lock()) as locked:
            if locked:
                presence = place.join()
                break
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        place.leave(presence)
