"""The order of one source: shards, groups of shards, and samples inside a group."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.strategies import samples_per_shard, seeds, shuffle_shards
from zephon_patches.order.shuffle import SourceOrder


def order_of(source: SourceOrder, epoch: int = 0) -> list[tuple[int, int]]:
    positions = np.arange(source.num_samples, dtype=np.int64)
    shards, samples = source.locate(np.full_like(positions, epoch), positions)
    assert shards.dtype == samples.dtype == np.int64
    return list(zip(shards.tolist(), samples.tolist(), strict=True))


def all_samples(sizes: list[int]) -> list[tuple[int, int]]:
    return [(shard, sample) for shard, size in enumerate(sizes) for sample in range(size)]


@given(samples_per_shard, seeds, shuffle_shards, st.integers(0, 2**40))
def test_each_sample_comes_once_in_any_epoch(sizes, seed, group, epoch):
    source = SourceOrder("web", np.array(sizes), seed, group)
    assert sorted(order_of(source, epoch)) == all_samples(sizes)


@given(samples_per_shard, seeds, shuffle_shards, st.integers(0, 2**40))
def test_the_order_is_the_reference_s(sizes, seed, group, epoch):
    source = SourceOrder("web", np.array(sizes), seed, group)
    assert order_of(source, epoch) == reference.epoch_order("web", sizes, seed, group, epoch)


@pytest.mark.parametrize("sizes", [[5000], [4095], [4096], [1500, 0, 2600, 3], [2] * 3000])
def test_the_order_is_the_reference_s_where_the_permutation_changes_its_kind(sizes):
    for group in (1, 2, 256):
        source = SourceOrder("web", np.array(sizes), 5, group)
        assert order_of(source, 3) == reference.epoch_order("web", sizes, 5, group, 3)


@given(samples_per_shard, st.integers(0, 2**40))
def test_without_shuffling_every_epoch_has_the_order_of_the_store(sizes, epoch):
    assert order_of(SourceOrder("web", np.array(sizes), 0, 0), epoch) == all_samples(sizes)


def test_a_group_spans_exactly_its_shards():
    sizes = [3] * 20
    for epoch in range(5):
        order = order_of(SourceOrder("web", np.array(sizes), 1, 4), epoch)
        groups = [{shard for shard, _ in order[start : start + 12]} for start in range(0, 60, 12)]
        assert [len(group) for group in groups] == [4] * 5
        assert set.union(*groups) == set(range(20))


def test_samples_inside_a_group_are_mixed():
    order = order_of(SourceOrder("web", np.array([50, 50, 50, 50]), 0, 256))
    changes = sum(a != b for (a, _), (b, _) in itertools.pairwise(order))
    assert changes > 100  # of 199; three quarters change if shards are mixed, three do if not


def test_the_shards_themselves_are_permuted():
    sizes = np.ones(50, dtype=np.int64)
    orders = {tuple(order_of(SourceOrder("web", sizes, 0, 1), epoch)) for epoch in range(10)}
    assert len(orders) == 10
    assert tuple(all_samples([1] * 50)) not in orders


@given(st.lists(st.integers(1, 9), min_size=4, max_size=12), seeds, st.integers(1, 3), st.integers(0, 5))
def test_a_group_does_not_depend_on_the_sizes_of_shards_behind_it(sizes, seed, group, epoch):
    before = order_of(SourceOrder("web", np.array(sizes), seed, group), epoch)
    permuted = reference.permuted(len(sizes), reference.key_of(seed, "web", epoch, "shards"))
    first = permuted[:group]
    changed = [size if shard in first else size + 5 for shard, size in enumerate(sizes)]
    after = order_of(SourceOrder("web", np.array(changed), seed, group), epoch)
    samples = sum(sizes[shard] for shard in first)
    assert before[:samples] == after[:samples]


def test_seed_name_and_epoch_each_change_the_order():
    sizes = np.array([30, 30])
    base = order_of(SourceOrder("web", sizes, 0, 256))
    assert order_of(SourceOrder("web", sizes, 1, 256)) != base
    assert order_of(SourceOrder("code", sizes, 0, 256)) != base
    assert order_of(SourceOrder("web", sizes, 0, 256), epoch=1) != base
    # Epoch 1 of one seed is not epoch 0 of the next.
    assert order_of(SourceOrder("web", sizes, 0, 256), epoch=1) != order_of(SourceOrder("web", sizes, 1, 256))


@given(samples_per_shard, shuffle_shards, st.data())
def test_places_of_many_epochs_can_be_asked_for_together(sizes, group, data):
    source = SourceOrder("web", np.array(sizes), 0, group)
    asked = data.draw(
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, source.num_samples - 1)), min_size=1, max_size=30)
    )
    epochs = np.array([epoch for epoch, _ in asked])
    positions = np.array([position for _, position in asked])
    shards, samples = source.locate(epochs, positions)
    orders = {epoch: reference.epoch_order("web", sizes, 0, group, epoch) for epoch in range(13)}
    assert list(zip(shards.tolist(), samples.tolist(), strict=True)) == [orders[e][p] for e, p in asked]
    assert positions.tolist() == [position for _, position in asked]


def test_small_integer_types_of_sizes_do_not_overflow():
    sizes = np.full(1000, 2**31 - 1, dtype=np.int32)
    source = SourceOrder("web", sizes, 0, 256)
    assert source.num_samples == 1000 * (2**31 - 1)
    positions = np.array([0, 2**31, 2**32 + 1, source.num_samples - 1])
    shards, samples = source.locate(np.zeros(4, dtype=np.int64), positions)
    assert ((shards >= 0) & (shards < 1000)).all()
    assert ((samples >= 0) & (samples < 2**31 - 1)).all()
    assert len(set(zip(shards.tolist(), samples.tolist(), strict=True))) == 4


@given(samples_per_shard, seeds, shuffle_shards, st.integers(0, 5))
def test_the_place_of_each_sample_is_the_one_where_it_is_found(sizes, seed, group, epoch):
    order = SourceOrder("web", np.array(sizes, dtype=np.int64), seed, group)
    positions = np.arange(order.num_samples, dtype=np.int64)
    shards, samples = order.locate(np.full_like(positions, epoch), positions)
    found = [order.position(epoch, *place) for place in zip(shards.tolist(), samples.tolist(), strict=True)]
    assert found == positions.tolist()
