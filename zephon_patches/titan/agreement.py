"""All ranks have opened their stores, and count in the same order, before they train.

Caches may lie on each machine's own disk, so one machine may have to build its store while the others are ready,
or may hold other texts. The ranks meet in the key-value store of the process group: waiting there runs into no
timeout of a collective, however long a build takes, and costs a few small messages a second.
"""

import itertools
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from zephon_patches.errors import StoreError

__all__ = ["agree_on_order", "others_learn_of_failure", "told_by_first_rank"]

logger = logging.getLogger(__name__)

_POLL_SECONDS, _REPORT_SECONDS = 0.2, 10.0

# Every rank builds its loaders in the same sequence, so the count tells them apart.
_meetings = itertools.count()
_FAILED = "zephon/failed"


def agree_on_order(description: str) -> None:
    """Waits until every rank is here and compares the order's description with rank 0's.

    Args:
        description: The ``order`` entry of the loader's state.

    Raises:
        StoreError: This rank's differs; the message says on which machines and in what. Or another rank failed.
    """
    store = _key_value_store()
    if store is None:
        return
    key = f"zephon/order/{next(_meetings)}"
    if dist.get_rank() == 0:
        store.set(f"{key}/first", json.dumps([socket.gethostname(), description]))
    arrived = store.add(f"{key}/arrived", 1)
    reported = time.monotonic()
    while arrived < (size := dist.get_world_size()):
        if time.monotonic() - reported >= _REPORT_SECONDS:
            logger.info("data: waiting for the stores of %d of %d ranks", size - arrived, size)
            reported = time.monotonic()
        time.sleep(_POLL_SECONDS)
        if store.check([_FAILED]):
            raise StoreError(f"another rank could not open its data: {store.get(_FAILED).decode()}")
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
    """Lets ranks that wait for this one end, with its error, if the block raises one."""
    try:
        yield
    except Exception as error:
        store = _key_value_store()
        if store is not None:
            store.set(_FAILED, f"rank {dist.get_rank()} on {socket.gethostname()}: {type(error).__name__}: {error}")
        raise


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
