"""Law 5 on a source of 10^5 shards and 10^12 samples: work is counted, not timed, and there is no data."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zephon_patches import mapping
from zephon_patches.loader.collate import MicroBatchReader
from zephon_patches.loader.loader import Loader
from zephon_patches.loader.plan import _BLOCK_ROWS
from zephon_patches.loader.state import describe_order
from zephon_patches.mapping import Topology
from zephon_patches.order import mixture, permutation
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.order.shuffle import SourceOrder
from zephon_patches.order.stages import Stage

SHARDS, SAMPLES = 10**5, 10**12
PLACES = [0, 10**6, 10**12 - 1, 10**12, 10**15, 2**60 - 10**6]
SOURCE = {"name": "big", "recipe": "none", "data": "none", "tokens": 2048 * SAMPLES, "samples": SAMPLES}
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

    def read(self, rows: list[Any]) -> Any:
        return {}, list(rows)


def big_loader() -> Loader:
    description = describe_order(
        {"packing": "concat", "seed": 0, "seq_len": 2048, "sources": [SOURCE], "tokenizer": "none"}, 1024
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

    def counting(key: int, values: np.ndarray, *more: np.ndarray) -> np.ndarray:
        counts.append(values.size)
        return real(key, values, *more)

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
    assert max(hashed) <= _BLOCK_ROWS
    assert sum(hashed) < 5 * permutation.ROUNDS * (2000 * 4 + _BLOCK_ROWS)


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


# --- 100 sources and 10 stages ---


def mixed_order() -> GlobalOrder:
    sources = [SourceOrder(f"{i}", np.full(1000, 10**6 + i, dtype=np.int64), 0, 256) for i in range(100)]
    # From equal weights to ones of very different sizes, the last stage at 10^14.
    stages = [
        Stage(stage and 10 ** (5 + stage), tuple(1 + (7 * i + stage) ** stage for i in range(100)))
        for stage in range(10)
    ]
    return GlobalOrder(sources, stages)


MIXED_PLACES = [0, 10**5, 10**9 + 7, 10**14 - 500, 10**15, 2**60 - 10**6]


@pytest.fixture
def split(monkeypatch) -> list[int]:
    """The number of draws in each call that sends draws of a node left or right."""
    counts: list[int] = []
    real = mixture._split

    def counting(node: Any, first: int, draws: np.ndarray) -> Any:
        counts.append(draws.size)
        return real(node, first, draws)

    monkeypatch.setattr(mixture, "_split", counting)
    return counts


def test_a_mixture_costs_the_same_anywhere(hashed, split):
    order = mixed_order()
    costs = {}
    for place in MIXED_PLACES:
        hashed.clear(), split.clear()
        order.locate(np.arange(place, place + 1000, dtype=np.int64))
        costs[place] = (len(split), sum(split), sum(hashed))
    for nodes, draws, values in costs.values():
        assert nodes <= 2 * 99  # each node once in a stage, and at most two stages
        assert draws <= 1000 * 20  # a tree of 100 sources is about 7 high; uneven weights make it uneven
        # A table of the shards for each source, and for each number its rounds, fewer than 4 times on average.
        assert values <= 100 * 1000 * 2 + 4 * permutation.ROUNDS * 1000 + 100 * 2 * permutation.ROUNDS


def test_asking_a_mixture_for_counts_and_for_the_way_back_hashes_one_epoch_at_most(hashed, split):
    order = mixed_order()
    for place in MIXED_PLACES:
        hashed.clear()
        order.epochs_at(place)
        assert hashed == []
        (source,), (epoch,), (shard,), (sample,) = order.locate(np.array([place], dtype=np.int64))
        hashed.clear()
        assert order.number(int(source), int(epoch), int(shard), int(sample)) == place
        assert sum(hashed) < 1000 + 100 * permutation.ROUNDS


def test_memory_of_a_mixture_is_the_same_at_the_start_and_far_on():
    def at(place: int) -> int:
        order = mixed_order()
        return peak_of(lambda: order.locate(np.arange(place, place + 2048, dtype=np.int64)))

    at(0)
    peaks = [at(place) for place in (10**5, 10**9, 10**13, 10**15)]
    assert max(peaks) < 8 * MIB
    assert max(peaks) < 1.5 * min(peaks)


def test_skips_and_steps_cost_the_same_anywhere():
    skips = mapping.Skips([(10**k, 10**k + 5) for k in range(3, 17)])
    for place in MIXED_PLACES:
        assert peak_of(lambda place=place: mapping.step_at(place, 1024, skips=skips)) < MIB
        assert peak_of(lambda place=place: mapping.steps_left(place, 1024, 2**60, skips)) < MIB


# --- up to 16,384 ranks ---


def test_a_rank_pays_for_its_own_rows_alone_whatever_the_number_of_ranks(hashed):
    order = big_order()

    def first_item(dp: int) -> list[Any]:
        topology, batch = Topology(dp // 2, dp), 4 * dp
        loader = Loader(
            order, PlacesOnly(), "{}", global_batch_size=batch, local_batch_size=4, topology=topology, end=None
        )
        loader.seek(10**15 - 10**15 % batch)
        _, rows = next(iter(loader))
        return rows

    first_item(1)  # the epoch's shards
    costs, peaks = [], []
    for dp in (1, 16, 1024, 16_384):
        hashed.clear()
        assert len(first_item(dp)) == 4
        costs.append(sum(hashed))
        peaks.append(peak_of(lambda dp=dp: first_item(dp)))
    assert 0 < max(costs) < 1.2 * min(costs), costs
    assert max(peaks) < 1.2 * min(peaks), peaks
