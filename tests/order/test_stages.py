"""Stages: mixtures one after the other, each source going on where it was."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.strategies import cursors, stages
from zephon_patches.order.stages import Stage, Stages

several = st.integers(1, 6).flatmap(stages)


def staged(of) -> Stages:
    return Stages([Stage(at, tuple(weights)) for at, weights in of])


def drawn(order: Stages, start: int, stop: int) -> list[tuple[int, int]]:
    sources, counts = order.draw(np.arange(start, stop, dtype=np.int64))
    assert sources.dtype == counts.dtype == np.int64
    return list(zip(sources.tolist(), counts.tolist(), strict=True))


def test_the_worked_case_of_the_module():
    found = drawn(staged([(0, [1, 1]), (3, [0, 1])]), 0, 6)
    assert found == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (1, 3)]


@given(several)
@settings(max_examples=100)
def test_draws_are_those_of_the_reference(of):
    assert drawn(staged(of), 0, 500) == reference.sources_of(of, 500)


@given(several)
def test_each_source_goes_on_where_the_stage_before_left_it(of):
    found = drawn(staged(of), 0, 600)
    for source in range(len(of[0][1])):
        counts = [count for s, count in found if s == source]
        assert counts == list(range(len(counts)))


@given(several, st.integers(0, 400))
def test_a_stage_appended_beyond_a_number_changes_nothing_before_it(of, more):
    at = of[-1][0] + 1 + more
    weights = [1, *[0] * (len(of[0][1]) - 1)]
    longer = [*of, (at, weights)]
    assert drawn(staged(longer), 0, at) == drawn(staged(of), 0, at)
    assert {source for source, _ in drawn(staged(longer), at, at + 20)} == {0}


@given(several, st.integers(0, 500))
def test_counts_are_those_of_the_draws(of, number):
    counts = [0] * len(of[0][1])
    for source, _ in drawn(staged(of), 0, number):
        counts[source] += 1
    assert staged(of).counts(number) == counts


@given(several)
def test_the_way_back_is_that_of_the_draw_and_what_is_never_drawn_has_none(of):
    order = staged(of)
    found = {place: n for n, place in enumerate(drawn(order, 0, 700))}
    for (source, count), n in found.items():
        assert order.number(source, count) == n
    for source, weight in enumerate(of[-1][1]):
        total = order.counts(700)[source]
        if weight:
            assert order.number(source, total) >= 700
        else:
            assert order.number(source, total) is None
            assert order.number(source, total + 5) is None


@given(several, cursors)
def test_far_numbers_have_their_place_and_the_way_back(of, cursor):
    order = staged(of)
    for n, (source, count) in enumerate(drawn(order, cursor, cursor + 30), start=cursor):
        assert order.number(source, count) == n


@given(several, st.lists(st.integers(0, 400), min_size=1, max_size=30))
def test_numbers_may_be_asked_for_in_any_order(of, numbers):
    sources, counts = staged(of).draw(np.array(numbers, dtype=np.int64))
    all_of_them = drawn(staged(of), 0, 401)
    assert list(zip(sources.tolist(), counts.tolist(), strict=True)) == [all_of_them[n] for n in numbers]


@pytest.mark.parametrize("starts", [[1], [0, 5, 5], [0, 7, 3]])
def test_stages_that_do_not_follow_each_other_are_a_fault_of_the_caller(starts):
    with pytest.raises(AssertionError):
        Stages([Stage(at, (1,)) for at in starts])


def test_golden_stages():
    # Other values here mean that a run with stages would go on with other samples.
    order = staged([(0, [3, 1, 0]), (10, [1, 1, 2]), (10**15, [0, 0, 1])])
    assert drawn(order, 6, 16) == [(1, 1), (0, 5), (0, 6), (0, 7), (2, 0), (0, 8), (2, 1), (1, 2), (2, 2), (0, 9)]
    assert drawn(order, 10**15 - 2, 10**15 + 2) == [
        (2, 499999999999994),
        (0, 250000000000005),
        (2, 499999999999995),
        (2, 499999999999996),
    ]
