"""The arithmetic of mixtures: bounds for every weight, against the reference, far out, and back."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.strategies import cursors, weights
from zephon_patches.order.mixture import Mixture, _floors, _paths, exact_weights


def drawn(mixture: Mixture, start: int, stop: int) -> list[tuple[int, int]]:
    sources, counts = mixture.draw(np.arange(start, stop, dtype=np.int64))
    assert sources.dtype == counts.dtype == np.int64
    return list(zip(sources.tolist(), counts.tolist(), strict=True))


def deviations(of: list[int], count: int, start: int = 0) -> np.ndarray:
    """How far each source is from its share before each number, from ``start`` on; shape (count + 1, sources)."""
    mixture = Mixture(of)
    sources, _ = mixture.draw(np.arange(start, start + count, dtype=np.int64))
    shares = np.array([float(Fraction(w, sum(of))) for w in of])
    first = [float(n - Fraction(start * w, sum(of))) for n, w in zip(mixture.counts(start), of, strict=True)]
    taken = np.zeros((count + 1, len(of)))
    taken[np.arange(1, count + 1), sources] = 1
    return np.array(first) + taken.cumsum(axis=0) - np.outer(np.arange(count + 1), shares)


# --- weights ---


@pytest.mark.parametrize(
    "given, whole",
    [
        ([0.7, 0.3], [7, 3]),
        ([0.1, 0.2, 0.7], [1, 2, 7]),
        ([3, 1], [3, 1]),
        ([6, 4, 0], [3, 2, 0]),
        ([1, 0.5], [2, 1]),
        ([0.001, 0.999], [1, 999]),
        ([1e-7, 1], [1, 10**7]),
        ([1e22, 1], [10**22, 1]),
        ([0.333, 0.333, 0.334], [333, 333, 334]),
        ([np.float64(0.1), 0.3], [1, 3]),
        ([1e-300, 1e300], [1, 10**600]),
        ([5], [1]),
    ],
)
def test_weights_are_the_decimals_as_written(given, whole):
    assert exact_weights(given) == whole


# --- bounds ---


def test_the_worked_case_of_the_module():
    assert drawn(Mixture([5, 3, 2]), 0, 10) == list(
        zip([0, 1, 0, 2, 0, 1, 0, 2, 0, 1], [0, 0, 1, 0, 2, 1, 3, 1, 4, 2], strict=True)
    )


@given(weights)
@settings(max_examples=150)
def test_the_sum_that_bounds_all_deviations_is_below_3_for_each_source(of):
    """The proof in the module, in exact numbers: a node adds at most 1/2, scaled by the source's part of it."""
    mixture = Mixture(of)
    weight_of = dict(enumerate(mixture.weights))
    for source, path in _paths(mixture._root):
        ratio, total = Fraction(1), Fraction(0)  # of the source's weight to that of the child
        for node, is_left in path:
            total += ratio
            ratio *= Fraction(node.left_weight if is_left else node.weight - node.left_weight, node.weight)
        assert total < 3, (of, source)
        assert ratio == Fraction(weight_of[source], mixture.period), "the way up ends at the source's share"


@given(weights, cursors)
@settings(max_examples=150)
def test_every_prefix_is_within_one_and_a_half_of_each_share_and_every_window_within_3(of, start):
    found = deviations(of, 700, start)
    assert abs(found).max() < 1.5
    for window in (1, 7, 100, 350):
        assert abs(found[window:] - found[:-window]).max() < 3


@pytest.mark.parametrize("of", [[1, 1000], [1, 10**9], [1] * 500 + [250], [1, 10**30], [10**6, 1, 1, 1, 1, 1]])
def test_the_bounds_hold_from_the_first_number_on_for_tiny_and_for_many_sources(of):
    found = deviations(of, 5000)
    assert abs(found).max() < 1.5
    assert abs(found[100:] - found[:-100]).max() < 3


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 10**13))
def test_after_each_block_all_counts_are_exact(of, block):
    mixture = Mixture(of)
    assert mixture.counts(block * mixture.period) == [block * w for w in mixture.weights]


def test_a_third_does_not_drift():
    """A table over one rounded period is off by 81 here."""
    counts = Mixture([1, 2]).counts(10**6)
    assert counts == [333333, 666667]
    assert Mixture(exact_weights([0.3333333333333333, 0.6666666666666667])).counts(10**18) == [
        333333333333333300,
        666666666666666700,
    ]


def test_counts_by_stacked_floors_would_fall():
    """Why there is a tree: a source would have to give samples back, also from block to block of 1,024 numbers."""

    def stacked(of, source, n):
        return n * sum(of[: source + 1]) // sum(of) - n * sum(of[:source]) // sum(of)

    assert [stacked([4, 1, 4], 1, n) for n in (1, 2, 3)] == [0, 1, 0]
    of = [33_333, 30, 66_637]
    blocks = [stacked(of, 1, 1024 * block) for block in range(60)]
    assert any(a > b for a, b in itertools.pairwise(blocks))
    counts = [Mixture(of).counts(1024 * block)[1] for block in range(60)]
    assert counts == sorted(counts)


# --- draws ---


@given(weights)
@settings(max_examples=60)
def test_draws_are_those_of_the_reference(of):
    assert drawn(Mixture(of), 0, 400) == reference.sources_of([(0, of)], 400)


@given(weights, cursors, st.integers(1, 80))
def test_counts_and_draws_agree_anywhere(of, start, length):
    mixture = Mixture(of)
    counts = mixture.counts(start)
    assert sum(counts) == start
    for source, before in drawn(mixture, start, start + length):
        assert before == counts[source]
        counts[source] += 1
    assert counts == mixture.counts(start + length)


@given(
    st.integers(1, 2**90),
    st.sampled_from([Fraction(1, 2), Fraction(1, 3), Fraction(1), Fraction(7, 9)]) | st.fractions(0, 1),
    st.integers(-2, 2),
    st.integers(0, 2**60),
    st.data(),
)
def test_quotients_of_numbers_of_any_size_are_exact(whole, part, more, draw, data):
    """Also next to whole numbers, where floats alone would be off by one."""
    step = min(max(int(whole * part) + more, 0), whole)
    draws = [draw, draw // 2**20, draw // 2**40, draw % 1000, 0]
    # A rest with which a quotient is a whole number, or just not.
    hit = -step * draws[data.draw(st.integers(0, 4))] % whole
    for rest in {hit, max(hit - 1, 0), hit + whole - 1, data.draw(st.integers(0, 2 * whole - 1))}:
        found = _floors(rest, step, whole, np.array(draws, dtype=np.int64))
        assert found.tolist() == [(rest + step * d) // whole for d in draws]


def test_weights_of_17_digits_take_few_steps_of_python(monkeypatch):
    """As a program computes them: numpy's integers are too small, and every draw in Python's would cost tenfold."""
    of = exact_weights([(1 + source) ** 0.7 for source in range(100)])
    mixture, numbers = Mixture(of), np.arange(10**12, 10**12 + 5000)
    assert mixture.period > 2**60
    places = []
    upstream = np.flatnonzero
    monkeypatch.setattr(np, "flatnonzero", lambda mask: places.append(len(upstream(mask))) or upstream(mask))
    mixture.draw(numbers)
    assert places, "numpy's integers were large enough"
    assert sum(places) < 100


@given(weights, st.lists(cursors, min_size=1, max_size=20))
def test_a_draw_does_not_depend_on_those_asked_with_it(of, numbers):
    mixture = Mixture(of)
    together = mixture.draw(np.array(numbers, dtype=np.int64))
    alone = [mixture.draw(np.array([n], dtype=np.int64)) for n in numbers]
    assert [part.tolist() for part in together] == [[one[i].item() for one in alone] for i in (0, 1)]


@given(weights, cursors)
def test_the_way_back_is_that_of_the_draw(of, start):
    mixture = Mixture(of)
    for n, (source, count) in enumerate(drawn(mixture, start, start + 60), start=start):
        assert mixture.number(source, count) == n


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any), st.data())
def test_sources_of_weight_0_are_never_drawn_and_change_nothing(of, data):
    on = [source for source, w in enumerate(of) if w]
    without = drawn(Mixture([of[source] for source in on]), 0, 100)
    assert drawn(Mixture(of), 0, 100) == [(on[source], count) for source, count in without]
    for source in set(range(len(of))) - set(on):
        assert Mixture(of).number(source, 0) is None


def test_a_common_factor_changes_nothing():
    assert drawn(Mixture([4, 6]), 0, 50) == drawn(Mixture([2, 3]), 0, 50)


def test_no_numbers_give_no_draws():
    assert drawn(Mixture([1, 2]), 7, 7) == []


def test_golden_draws():
    # Other values here mean that the same weights give another order: no run with a mixture could be resumed.
    def sources(of, start, count):
        return "".join(str(source) for source, _ in drawn(Mixture(of), start, start + count))

    assert sources([7, 2, 1], 0, 30) == "010002001001000200100100020010"
    assert sources([1, 1, 1, 1], 0, 8) == "01230123"
    assert sources([9, 8, 7, 6, 5], 0, 35) == "31024103201420310241302410230142013"
    assert sources([1, 10**9], 5 * 10**8 - 5, 10) == "1111101111"
    assert sources([3, 10**20, 7 * 10**19], 10**17, 12) == "211212112121"
