"""Law 2: which numbers a step takes, and which of them a rank gets."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.resume import Place
from tests.strategies import cursors, places, skips
from zephon_patches.errors import MappingError
from zephon_patches.mapping import (
    NO_SKIPS,
    Skips,
    Topology,
    best_local_batch_size,
    check,
    micro_batches_per_step,
    numbers_of_rank,
    padded_batch_size,
    step_at,
    steps_from,
    steps_left,
)


def dealt(cursor: int, place: Place, end: int | None = None, skips: Skips = NO_SKIPS) -> list[list[list[int | None]]]:
    """Numbers by rank, micro-batch and row, None for padding rows."""
    step = next(steps_from(cursor, place.batch, end, skips))
    ranks = [
        numbers_of_rank(step, place.batch, place.local, Topology(rank, place.dp), skips) for rank in range(place.dp)
    ]
    assert all(numbers.dtype == np.int64 for numbers in ranks)
    return [[[None if n < 0 else n for n in rows] for rows in numbers.tolist()] for numbers in ranks]


def flat(ranks: list[list[list[int | None]]]) -> list[int]:
    return [n for micro_batches in ranks for rows in micro_batches for n in rows if n is not None]


def test_the_worked_case_of_the_module():
    skips = Skips([(72, 75)])
    assert dealt(70, Place(2, 2, 7), skips=skips) == [[[70, 71], [75, None]], [[76, 77], [78, 79]]]
    assert step_at(70, 7, skips=skips) == (7, 80)
    assert (skips.kept(70), skips.kept(77)) == (70, 74)


@pytest.mark.parametrize("dp", range(1, 25))
def test_law_2_for_a_batch_of_24_on_up_to_24_ranks(dp):
    for local in range(1, 26):
        ranks = dealt(240, Place(dp, local, 24))
        assert flat(ranks) == list(range(240, 264))
        for rank, micro_batches in enumerate(ranks):
            assert flat([micro_batches]) == list(range(240 + rank * 24 // dp, 240 + (rank + 1) * 24 // dp))
            assert {len(rows) for rows in micro_batches} == {local}
            assert len(micro_batches) == -(-24 // (dp * local))
        assert (ranks, step_at(240, 24)[1]) == reference.deal(240, 24, local, dp)


@given(cursors, places())
def test_the_ranks_take_the_step_in_order_and_share_it_evenly(cursor, place):
    ranks = dealt(cursor, place)
    assert flat(ranks) == list(range(cursor, cursor + place.batch))
    shares = [len(flat([micro_batches])) for micro_batches in ranks]
    assert max(shares) - min(shares) <= 1
    assert min(shares) >= 1
    assert (ranks, step_at(cursor, place.batch)[1]) == reference.deal(cursor, place.batch, place.local, place.dp)


@given(cursors, places(), st.integers(1, 60))
def test_the_last_step_of_finite_data_takes_what_is_left_and_ends_at_the_end(cursor, place, left):
    end = cursor + left
    ranks = dealt(cursor, place, end)
    taken = min(left, place.batch)
    assert flat(ranks) == list(range(cursor, cursor + taken))
    assert step_at(cursor, place.batch, end) == (taken, cursor + taken)
    # Every rank makes as many micro-batches as in a full step, with or without rows of its own.
    assert {len(micro_batches) for micro_batches in ranks} == {
        micro_batches_per_step(place.batch, place.local, place.dp)
    }
    assert (ranks, cursor + taken) == reference.deal(cursor, place.batch, place.local, place.dp, end)


@given(cursors, places())
def test_padding_rows_stand_behind_all_others_of_a_rank(cursor, place):
    for micro_batches in dealt(cursor, place):
        rows = [n for micro_batch in micro_batches for n in micro_batch]
        share = sum(n is not None for n in rows)
        assert None not in rows[:share]


@given(cursors, places())
def test_the_numbers_of_a_step_do_not_depend_on_the_topology(cursor, place):
    assert flat(dealt(cursor, place)) == flat(dealt(cursor, Place(1, place.batch, place.batch)))


@given(places())
def test_the_padded_batch_is_the_least_that_holds_every_rank(place):
    padded = padded_batch_size(place.batch, place.local, place.dp)
    assert padded >= place.batch
    assert padded % (place.local * place.dp) == 0
    assert padded - place.local * place.dp < -(-place.batch // place.dp) * place.dp
    assert padded == sum(len(rows) for ranks in dealt(0, place) for rows in ranks)


@given(places())
def test_the_best_local_batch_is_no_larger_and_pads_least(place):
    best = best_local_batch_size(place.batch, place.local, place.dp)
    padding = {size: padded_batch_size(place.batch, size, place.dp) for size in range(1, place.local + 1)}
    assert padding[best] == min(padding.values())
    assert best == max(size for size in padding if padding[size] == padding[best])


def test_nothing_is_padded_where_everything_divides():
    assert padded_batch_size(24, 3, 4) == 24
    assert padded_batch_size(24, 4, 4) == 32
    assert best_local_batch_size(24, 4, 4) == 3


def test_more_ranks_than_samples_are_refused_with_a_way_out():
    with pytest.raises(MappingError) as error:
        check(12, 1, Topology(0, 13))
    assert "dp_size = 13 is above global_batch_size = 12" in str(error.value)
    assert "at most 12 data-parallel ranks, or raise the global batch size" in str(error.value)
    check(12, 1, Topology(11, 12))


@pytest.mark.parametrize(
    "batch, local, topology, text",
    [
        (12, 1, Topology(2, 2), "dp_rank = 2 of dp_size = 2"),
        (12, 1, Topology(-1, 2), "dp_rank = -1"),
        (12, 1, Topology(0, 0), "dp_size = 0"),
        (12, 0, Topology(0, 1), "local_batch_size = 0"),
        (0, 1, Topology(0, 1), "global_batch_size = 0"),
    ],
)
def test_what_cannot_be_dealt_is_refused_by_name(batch, local, topology, text):
    with pytest.raises(MappingError, match=text):
        numbers_of_rank((0, 1), batch, local, topology)


# --- skips ---


@given(skips)
def test_skips_are_kept_as_the_fewest_intervals_that_cover_the_same_numbers(given_skips):
    intervals = Skips(given_skips).intervals
    covered = {n for start, stop in given_skips for n in range(start, stop)}
    assert {n for start, stop in intervals for n in range(start, stop)} == covered
    assert all(a[1] < b[0] for a, b in itertools.pairwise(intervals))
    assert all(start < stop for start, stop in intervals)


@given(skips)
def test_kept_numbers_are_those_that_no_skip_covers(given_skips):
    kept = [n for n in range(400) if not any(start <= n < stop for start, stop in given_skips)]
    of = Skips(given_skips)
    assert of.numbers(np.arange(len(kept))).tolist() == kept
    for n in range(400):
        assert of.kept(n) == sum(k < n for k in kept)


@given(skips, st.integers(0, 400))
def test_the_part_of_skips_below_a_number(given_skips, number):
    covered = {n for start, stop in given_skips for n in range(start, stop)}
    below = Skips(given_skips).below(number)
    assert {n for start, stop in below for n in range(start, stop)} == {n for n in covered if n < number}


@given(skips, st.integers(0, 250), places(), st.none() | st.integers(0, 300))
def test_a_step_takes_the_first_numbers_that_no_skip_covers(given_skips, cursor, place, left):
    of, end = Skips(given_skips), None if left is None else cursor + left
    for _ in range(3):
        kept = range(cursor, cursor + 10**4 if end is None else end)
        if not any(of.kept(n + 1) > of.kept(n) for n in kept[:1000]):
            assert list(steps_from(cursor, place.batch, end, of)) == []
            assert steps_left(cursor, place.batch, end, of) == 0
            return
        expected = reference.deal(cursor, place.batch, place.local, place.dp, end, given_skips)
        behind = step_at(cursor, place.batch, end, of)[1]
        assert (dealt(cursor, place, end, of), behind) == expected
        cursor = behind


@given(skips, st.integers(0, 250), st.integers(1, 50), st.integers(0, 300))
def test_steps_left_are_the_steps_until_the_end(given_skips, cursor, batch, left):
    of, end, steps = Skips(given_skips), cursor + left, 0
    expected = steps_left(cursor, batch, end, of)
    assert len(list(steps_from(cursor, batch, end, of))) == expected
    while steps_left(cursor, batch, end, of):
        cursor, steps = step_at(cursor, batch, end, of)[1], steps + 1
        assert cursor <= end
    assert steps == expected


def test_far_skips_cost_no_more():
    of = Skips([(10**15 + 3 * i, 10**15 + 3 * i + 1) for i in range(10**4)])
    assert step_at(10**15, 4, skips=of)[1] == 10**15 + 6
    assert of.numbers(np.array([10**15 - 1, 10**15, 10**17])).tolist() == [10**15 - 1, 10**15 + 1, 10**17 + 10**4]
