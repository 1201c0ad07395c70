"""Law 5 on a source of 10^5 shards and 10^12 samples: work is counted, not timed, and there is no data."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zephon_patches.loader.collate import MicroBatchReader, Row
from zephon_patches.loader.loader import Loader
from zephon_patches.loader.state import describe_order
from zephon_patches.mapping import Topology
from zephon_patches.order import permutation
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.order.shuffle import SourceOrder

SHARDS, SAMPLES = 10**5, 10**12
PLACES = [0, 10**6, 10**12 - 1, 10**12, 10**15, 2**60 - 10**6]
MIB = 1 << 20


def big_order() -> GlobalOrder:
    # Uneven sizes, some empty, that add up to 10^12.
    sizes = np.full(SHARDS, SAMPLES // SHARDS, dtype=np.int64)
    sizes[::10] = 0
    sizes[1::10] *= 2
    assert sizes.sum() == SAMPLES
    return GlobalOrder([SourceOrder("big", sizes, 0, 256)])


class PlacesOnly(MicroBatchReader):
    """A reader without stores that gives the rows themselves."""

    def __init__(self) -> None:
        super().__init__([], seq_len=2048)

    def read(self, rows: list[Row]) -> Any:
        return {}, list(rows)


def big_loader() -> Loader:
    description = describe_order(
        {"packing": "concat", "seed": 0, "seq_len": 2048, "sources": [{"name": "big"}], "tokenizer": "none"}, 1024
    )
    return Loader(
        big_order(),
        PlacesOnly(),
        description,
        global_batch_size=1024,
        local_batch_size=4,
        topology=Topology(5, 64),
        end=None,
    )


def state_at(loader: Loader, cursor: int) -> dict[str, Any]:
    return {**loader.state_dict(), "cursor": cursor}


@pytest.fixture
def hashed(monkeypatch) -> list[int]:
    """The number of values in each call of the hash."""
    counts: list[int] = []
    real = permutation.hash64

    def counting(key: int, values: np.ndarray) -> np.ndarray:
        counts.append(values.size)
        return real(key, values)

    monkeypatch.setattr(permutation, "hash64", counting)
    permutation._table.cache_clear()
    return counts


def peak_of(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_opening_hashes_nothing(hashed):
    big_loader()
    assert hashed == []


def test_seeking_hashes_nothing_until_an_item_is_asked_for(hashed):
    loader = big_loader()
    loader.load_state_dict(state_at(loader, 10**15))
    iter(loader)
    assert hashed == []


def test_the_first_item_costs_the_same_anywhere(hashed):
    costs = {}
    for cursor in PLACES:
        hashed.clear()
        loader = big_loader()
        loader.load_state_dict(state_at(loader, cursor))
        next(iter(loader))
        assert loader.state_dict()["cursor"] == cursor  # a quarter of the step is handed out
        costs[cursor] = sum(hashed)
    # One epoch's shards and one block of rows; a value outside the range is sent through again, fewer than
    # 4 times on average. Two epochs at 10^12 - 1.
    once = permutation.ROUNDS * (SHARDS + 4096)
    for cursor, cost in costs.items():
        epochs = 2 if cursor == 10**12 - 1 else 1
        assert once < cost < 4 * epochs * once, (cursor, cost)
    assert costs[10**15] < 1.2 * costs[0]


def test_going_on_inside_an_epoch_hashes_only_the_rows(hashed):
    loader = big_loader()
    loader.load_state_dict(state_at(loader, 10**15))
    iterator = iter(loader)
    next(iterator)
    hashed.clear()
    for _ in range(2000):  # items of 4 rows
        next(iterator)
    assert max(hashed) <= 2048
    assert sum(hashed) < 5 * permutation.ROUNDS * (2000 * 4 + 2048)


def test_memory_is_the_same_at_the_start_and_far_on():
    def at(cursor: int) -> int:
        loader = big_loader()
        return peak_of(lambda: (loader.load_state_dict(state_at(loader, cursor)), next(iter(loader))))

    at(0)  # imports and caches
    peaks = {cursor: at(cursor) for cursor in (0, 10**6, 10**15)}
    assert max(peaks.values()) < 24 * MIB  # a few arrays of 10^5 numbers
    assert max(peaks.values()) < 1.1 * min(peaks.values())


def test_memory_stays_flat_over_many_seeks():
    order = big_order()

    def seek(places: range) -> None:
        for place in places:
            order.locate(np.arange(place * 10**12 + 17, place * 10**12 + 2017, dtype=np.int64))

    def twice() -> tuple[int, int]:
        seek(range(12))
        tracemalloc.reset_peak()
        first, _ = tracemalloc.get_traced_memory()
        seek(range(100, 124))
        last, _ = tracemalloc.get_traced_memory()
        assert last < first + MIB
        return first, last

    assert peak_of(twice) < 64 * MIB


def test_a_small_index_hashes_no_more_far_on_than_at_the_start(hashed):
    order = GlobalOrder([SourceOrder("small", np.array([1000, 2000]), 0, 256)])
    costs = []
    for cursor in (0, 3000 * 10**12):
        hashed.clear()
        order.locate(np.arange(cursor, cursor + 100, dtype=np.int64))
        costs.append(sum(hashed))
    assert costs[0] == costs[1] == 2 + 3000
