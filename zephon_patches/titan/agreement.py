"""All ranks have opened their stores, and count in the same order, before they train.

Caches may lie on each machine's own disk, so one machine may have to build its store while the others are ready,
or may hold other texts. The ranks meet in the key-value store of the process group: waiting there runs into no
timeout of a collective, however long a build takes, and costs a few small messages a second.

Nothing else would notice that a machine dies meanwhile: torchrun looks at the ranks of its own machine only. So each
rank gives signs of life from a thread while it builds and waits, and rank 0, when it waits, looks for them.
"""

import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from zephon_patches.errors import StoreError

__all__ = ["agree_on_order", "others_learn_of_failure", "told_by_first_rank"]

logger = logging.getLogger(__name__)

_POLL_SECONDS, _REPORT_SECONDS = 0.2, 10.0

# Between two signs of life, and without one until a rank is given up.
_SIGN_SECONDS, _DEAD_SECONDS = 5.0, 120.0

# Every rank builds its loaders in the same sequence, so the counts tell them apart.
_meetings, _builds = itertools.count(), itertools.count()
_FAILED = "zephon/failed"


def agree_on_order(description: str) -> None:
    """Waits until every rank is here and compares the order's description with rank 0's.

    Args:
        description: The ``order`` entry of the loader's state.

    Raises:
        StoreError: This rank's differs; the message says on which machines and in what. Or another rank failed or died.
    """
    store = _key_value_store()
    if store is None:
        return
    key = f"zephon/order/{next(_meetings)}"
    if dist.get_rank() == 0:
        store.set(f"{key}/first", json.dumps([socket.gethostname(), description]))
    arrived = store.add(f"{key}/arrived", 1)
    reported = time.monotonic()
    signs = _Signs(store) if dist.get_rank() == 0 else None
    while arrived < (size := dist.get_world_size()):
        if time.monotonic() - reported >= _REPORT_SECONDS:
            logger.info("data: waiting for the stores of %d of %d ranks", size - arrived, size)
            reported = time.monotonic()
        time.sleep(_POLL_SECONDS)
        if store.check([_FAILED]):
            raise StoreError(f"another rank could not open its data: {store.get(_FAILED).decode()}")
        if signs is not None:
            signs.check()
        arrived = store.add(f"{key}/arrived", 0)
    host, first = json.loads(store.get(f"{key}/first"))
    if first != description:
        here = f"rank {dist.get_rank()} on {socket.gethostname()}"
        differences = "\n  ".join(_differences(json.loads(first), json.loads(description), f"rank 0 on {host}", here))
        raise StoreError(
            f"the ranks have different data, so they would train on different orders:\n  {differences}\nGive every "
            "machine the same texts, or copy one machine's store (data.cache_dir) to the others"
        )


def told_by_first_rank(what: str, value: str) -> str:
    """Rank 0's value, on every rank; all of them ask in the same sequence. Where there are no others, its own."""
    store = _key_value_store()
    if store is None:
        return value
    key = f"zephon/{what}/{next(_meetings)}"
    if dist.get_rank() == 0:
        store.set(key, value)
    return str(store.get(key).decode())  # waits for it


@contextmanager
def others_learn_of_failure() -> Iterator[None]:
    """Lets ranks that wait for this one end if the block raises an error, with it, or if this process dies."""
    try:
        with _signs_of_life():
            yield
    except Exception as error:
        store = _key_value_store()
        if store is not None:
            store.set(_FAILED, f"rank {dist.get_rank()} on {socket.gethostname()}: {type(error).__name__}: {error}")
        raise


_signs_key: str | None = None


@contextmanager
def _signs_of_life() -> Iterator[None]:
    """Counts up in the key-value store, every few seconds, for as long as the block runs."""
    global _signs_key
    store = _key_value_store()
    if store is None:
        yield
        return
    _signs_key, ended = f"zephon/alive/{next(_builds)}", threading.Event()
    own = f"{_signs_key}/{dist.get_rank()}"

    def give() -> None:
        while not ended.is_set():
            try:
                store.add(own, 1)
            except RuntimeError:  # the store's process is gone, which the rank itself will find
                return
            ended.wait(_SIGN_SECONDS)

    thread = threading.Thread(target=give, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _signs_key = None
        ended.set()
        thread.join()


class _Signs:
    """What is seen of the other ranks' signs of life."""

    def __init__(self, store: Any) -> None:
        self._store, self._looked = store, time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}  # by rank: its count, and since when

    def check(self) -> None:
        """Looks at them, if it is time to.

        Raises:
            StoreError: A rank that gave some gives none any more.
        """
        now = time.monotonic()
        if _signs_key is None or now - self._looked < _SIGN_SECONDS:
            return
        self._looked = now
        for rank in range(1, dist.get_world_size()):
            count = self._store.add(f"{_signs_key}/{rank}", 0)
            before, since = self._seen.get(rank, (0, now))
            if count != before:
                self._seen[rank] = (count, now)
            elif count and now - since > _DEAD_SECONDS:
                raise StoreError(
                    f"rank {rank} has given no sign of life for {now - since:.0f} s while the stores are opened: its "
                    "machine or process died or hangs; see its log, and start again (torchrun does with --max-restarts)"
                )


def _key_value_store() -> Any:
    """The process group's, or None where there are no other ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    return dist.distributed_c10d._get_default_store()


def _differences(first: dict[str, Any], own: dict[str, Any], there: str, here: str) -> list[str]:
    first, own = _flat(first), _flat(own)
    return [
        f"{name}: {first.get(name)} on {there}, {own.get(name)} on {here}"
        for name in sorted(first.keys() | own.keys())
        if first.get(name) != own.get(name) and name != "fingerprint"
    ]


def _flat(order: dict[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in order.items() if key != "sources"}
    for source in order["sources"]:
        flat |= {f"source {source['name']}: {key}": value for key, value in source.items() if key != "name"}
    return flat
