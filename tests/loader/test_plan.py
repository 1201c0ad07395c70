"""The rows that a rank reads: those of its numbers, however many of them are located at a time."""

from itertools import islice
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import cursors, places, skips
from zephon_patches import mapping
from zephon_patches.loader import plan
from zephon_patches.loader.plan import plan_rows
from zephon_patches.mapping import Skips, Topology
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.order.shuffle import SourceOrder
from zephon_patches.order.stages import Stage

SINGLE = GlobalOrder([SourceOrder("a", np.array([3, 0, 4]), seed=1, shuffle_shards=2)])
MIXED = GlobalOrder(
    [SourceOrder(name, np.array([size, 5]), seed=1, shuffle_shards=2) for name, size in (("a", 30), ("b", 4))],
    [Stage(0, (3, 1)), Stage(50, (1, 2))],
)


@given(
    cursors,
    places(),
    st.integers(0, 60),
    skips,
    st.sampled_from([SINGLE, MIXED]),
    st.integers(1, 40),
    st.integers(1, 9),
)
def test_rows_are_those_of_the_numbers_whatever_the_blocks(cursor, place, left, left_out, order, block, made):
    of, end = Skips(left_out), cursor + left
    steps = list(mapping.steps_from(cursor, place.batch, end, of))
    for rank in range(place.dp):
        topology = Topology(rank, place.dp)
        with mock.patch.multiple(plan, _BLOCK_ROWS=block, _FIRST_ROWS=5, _MADE_ROWS=made):
            found = list(plan_rows(order, iter(steps), place.batch, place.local, topology, of))
        expected = []
        for step in steps:
            first_of_step = of.number(step[0])
            numbers = mapping.numbers_of_rank(step, place.batch, place.local, topology, of)
            first_of_rank = numbers[0, 0] if numbers[0, 0] >= 0 else first_of_step
            for micro_batch in numbers:
                located = order.locate(np.where(micro_batch < 0, first_of_rank, micro_batch))
                places_of = zip(located.source.tolist(), located.shard.tolist(), located.sample.tolist(), strict=True)
                expected.append([(*at, number < 0) for at, number in zip(places_of, micro_batch.tolist(), strict=True)])
        assert found == expected


def sizes_of_blocks(samples: int, rows: int, local_batch_size: int = 4) -> list[int]:
    """How many numbers are located at a time until so many rows are there."""
    order, sizes = GlobalOrder([SourceOrder("a", np.array([samples]), seed=1, shuffle_shards=1)]), []
    locate = order.locate

    def recorded(numbers):
        sizes.append(len(numbers))
        return locate(numbers)

    order.locate = recorded
    steps = mapping.steps_from(0, local_batch_size)
    for _ in islice(
        plan_rows(order, steps, local_batch_size, local_batch_size, Topology(0, 1)), rows // local_batch_size
    ):
        pass
    return sizes


def test_blocks_grow_so_that_the_first_batch_comes_soon():
    assert sizes_of_blocks(10**9, 60_000) == [128, 2048, *[8192] * 8]


@pytest.mark.parametrize("samples", [1, 10])
def test_blocks_of_little_data_reach_into_few_epochs(samples):
    # Each epoch is permuted anew, which takes longer than to locate its few samples.
    assert max(sizes_of_blocks(samples, 5000)) <= max(128, 64 * samples)


def test_a_step_is_located_as_a_whole_however_large():
    assert sizes_of_blocks(10**9, 100_000, local_batch_size=50_000) == [50_000, 50_000]
