"""The keyed permutation: one to one, with an inverse, as good as random, and the same for ever."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from zephon_patches.keys import derive_key
from zephon_patches.order.permutation import MAX_SIZE, SMALL, Permutation

AROUND_THE_SWITCH = [SMALL - 2, SMALL - 1, SMALL, SMALL + 1, SMALL + 2]
AROUND_POWERS_OF_4 = [4**k + d for k in (6, 7, 8, 9) for d in (-1, 0, 1)]

keys = st.integers(0, 2**64 - 1)
sizes = st.one_of(st.integers(1, 70), st.sampled_from(AROUND_THE_SWITCH), st.integers(1, MAX_SIZE), st.just(MAX_SIZE))


def whole(size: int, key: int) -> list[int]:
    return Permutation(size, key)(np.arange(size, dtype=np.int64)).tolist()


def chi_square(counts: list[int], cells: int) -> float:
    """Standard deviations above what equal chances give."""
    expected = sum(counts) / cells
    value = sum((count - expected) ** 2 for count in counts) / expected + (cells - len(counts)) * expected
    return (value - (cells - 1)) / (2 * (cells - 1)) ** 0.5


@pytest.mark.parametrize("size", [*range(70), *AROUND_THE_SWITCH, *AROUND_POWERS_OF_4, 100_000])
def test_every_element_comes_once_and_the_inverse_leads_back(size):
    permutation = Permutation(size, key=derive_key("test", size))
    positions = np.arange(size, dtype=np.int64)
    elements = permutation(positions)
    assert elements.dtype == np.int64
    assert np.array_equal(np.sort(elements), positions)
    assert np.array_equal(permutation.inverse(elements), positions)
    assert np.array_equal(permutation(permutation.inverse(positions)), positions)


@given(sizes, keys, st.data())
def test_points_of_any_range_map_into_it_and_back(size, key, data):
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)), dtype=np.int64)
    permutation = Permutation(size, key)
    elements = permutation(positions)
    assert ((elements >= 0) & (elements < size)).all()
    assert np.array_equal(permutation.inverse(elements), positions)
    assert len(np.unique(elements)) == len(np.unique(positions))


@given(sizes, keys, st.data())
def test_a_point_does_not_depend_on_those_asked_for_with_it(size, key, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    permutation = Permutation(size, key)
    together = permutation(np.array(positions, dtype=np.int64)).tolist()
    assert together == [permutation(np.array([position], dtype=np.int64)).item() for position in positions]


@given(st.integers(SMALL, 10**6), keys, st.integers(1, 60), st.data())
def test_many_points_are_those_of_the_reference_each(size, key, count, data):
    # Many go through the network together, the last few one by one; just above a power of 4 most go through it often.
    size = data.draw(st.sampled_from([size, 4**6 + 1, 4**8 + 1]))
    first = data.draw(st.integers(0, size - count))
    positions = np.arange(first, first + count, dtype=np.int64)
    elements = Permutation(size, key)(positions)
    assert elements.tolist() == [reference.feistel(size, key, position) for position in positions.tolist()]
    assert np.array_equal(Permutation(size, key).inverse(elements), positions)


@given(st.integers(1, 300), keys)
def test_small_ranges_are_sorted_by_their_hashes(size, key):
    assert whole(size, key) == reference.permuted(size, key)


@given(st.integers(SMALL, MAX_SIZE), keys, st.integers(0, MAX_SIZE))
def test_large_ranges_are_the_feistel_network_of_the_reference(size, key, place):
    position = place % size
    element = Permutation(size, key)(np.array([position], dtype=np.int64)).item()
    assert element == reference.feistel(size, key, position)


def test_golden_permutations():
    # Another value here gives every source another order: runs could not be resumed.
    assert whole(10, 0) == [2, 4, 6, 8, 5, 1, 7, 0, 9, 3]
    places = np.array([0, 1, 2, 4095], dtype=np.int64)
    assert Permutation(4095, 7)(places[:3]).tolist() == [1109, 763, 1296]
    assert Permutation(4096, 7)(places).tolist() == [432, 1999, 3777, 1197]
    assert Permutation(4097, 7)(places).tolist() == [1998, 3323, 2559, 3306]
    assert Permutation(10**12, 7)(places).tolist() == [100967522435, 391226211427, 936347585103, 542630499203]


@pytest.mark.parametrize("size, permutations", [(2, 2), (3, 6), (4, 24), (5, 120)])
def test_all_permutations_of_a_few_elements_are_equally_frequent(size, permutations):
    counts = Counter(tuple(whole(size, derive_key("uniform", i))) for i in range(12_000))
    assert abs(chi_square(list(counts.values()), permutations)) < 5


@pytest.mark.parametrize("size", [SMALL - 1, SMALL, SMALL + 1, 4**7 + 1])
def test_neighbours_land_anywhere_with_equal_chances(size):
    neighbours = np.array([0, 1], dtype=np.int64)
    counts: Counter[tuple[int, ...]] = Counter()
    for i in range(1500):
        elements = Permutation(size, derive_key("neighbours", i))(neighbours)
        counts[tuple((elements * 4 // size).tolist())] += 1  # a quarter of the range for each
    assert chi_square(list(counts.values()), 16) < 5


@pytest.mark.parametrize("size", [*AROUND_THE_SWITCH, 4**7 + 1])
def test_a_shuffled_range_keeps_no_trace_of_its_order(size):
    elements = np.array(whole(size, 3))
    rank_correlation = np.corrcoef(elements, np.arange(size))[0, 1]
    assert abs(rank_correlation) < 5 / size**0.5
    ascents = int((np.diff(elements) > 0).sum())  # half of the steps, with a variance of a twelfth of the size
    assert abs(ascents - (size - 1) / 2) < 5 * (size / 12) ** 0.5
    fixed = int((elements == np.arange(size)).sum())  # one on average
    assert fixed < 10


def test_other_keys_give_other_permutations():
    assert len({tuple(whole(12, key)) for key in range(200)}) == 200
    assert len({tuple(whole(5000, key)[:5]) for key in range(50)}) == 50


def test_the_shape_is_kept_and_the_argument_left_alone():
    for size in (100, 5000):
        permutation = Permutation(size, 0)
        positions = np.arange(60, dtype=np.int64).reshape(3, 4, 5)
        before = positions.copy()
        assert permutation(positions).shape == (3, 4, 5)
        assert permutation.inverse(positions).shape == (3, 4, 5)
        assert permutation(np.empty(0, dtype=np.int64)).shape == (0,)
        assert np.array_equal(positions, before)


def test_a_result_may_be_written_to_without_changing_the_permutation():
    for size in (100, 5000):
        first = Permutation(size, 0)(np.arange(10))
        kept = first.tolist()
        first += 1
        assert Permutation(size, 0)(np.arange(10)).tolist() == kept


def test_the_largest_range_takes_no_memory_of_its_size():
    tracemalloc.start()
    try:
        Permutation(MAX_SIZE, 0)(np.arange(100, dtype=np.int64))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
