"""The loader's public face, in one process and without workers."""

import random
import tracemalloc

import numpy as np
import pytest
import torch

from tests.corpora import D60, D240, make_corpus
from tests.reference import IGNORE
from tests.resume import Place, Run, builder, check_steps, expected_stream, rows_of
from zephon_patches import DataConfig, SourceConfig, build_loader
from zephon_patches.config import MAX_NUMBER
from zephon_patches.errors import ConfigError, InputError, LoaderError, MappingError, StateError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d240"), D240)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d60"), D60)


ALONE = Place(1, 4)


def a_loader(corpus, place=ALONE, rank=0, **settings):
    return builder(corpus, **settings)(place, rank)


# --- items ---


def test_the_readme_s_loop_works_as_written(corpus):
    loader = build_loader(
        DataConfig(
            sources=[SourceConfig(name="web", path=str(corpus.texts / "*.jsonl"))],
            seed=1,
            cache_dir=str(corpus.folder / "cache"),
        ),
        tokenizer=str(corpus.tokenizer),
        seq_len=16,
        global_batch_size=24,
        local_batch_size=4,
        dp_rank=0,
        dp_size=2,
        num_workers=0,
        infinite=True,
    )
    for number, (inputs, labels) in enumerate(loader, start=1):
        assert set(inputs) == {"input"}
        assert inputs["input"].shape == labels.shape == (4, 16)
        assert inputs["input"].dtype == labels.dtype == torch.int64
        assert loader.cursor == number // 3 * 24  # ceil(24 / (2 * 4)) items make a step
        if number == 7:
            break
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert loader.cursor == 48


@pytest.mark.parametrize("place", [Place(1, 4), Place(5, 2), Place(3, 5), Place(7, 1, 24), Place(2, 30)])
def test_every_item_has_exactly_the_local_batch_of_rows(corpus, place):
    for rank in range(place.dp):
        loader = a_loader(corpus, place, rank, infinite=False)
        items = list(loader)
        assert {tuple(inputs["input"].shape) for inputs, _ in items} == {(place.local, 8)}
        assert {tuple(labels.shape) for _, labels in items} == {(place.local, 8)}
        assert len(items) == -(-330 // place.batch) * loader.micro_batches_per_step


def test_every_item_is_freshly_allocated(corpus):
    items = [item for item, _ in zip(a_loader(corpus), range(20), strict=False)]
    kept = [rows_of(item) for item in items]
    storages = {inputs["input"].untyped_storage().data_ptr() for inputs, _ in items}
    assert len(storages) == 20
    for inputs, labels in items[::2]:  # writing to some changes no other
        inputs["input"].fill_(-1)
        labels.fill_(-1)
    assert [rows_of(item) for item in items[1::2]] == kept[1::2]
    assert [rows_of(item) for item, _ in zip(a_loader(corpus), range(20), strict=False)] == kept


def test_labels_are_a_view_of_the_inputs_only_where_none_is_masked(corpus):
    views = copies = 0
    for inputs, labels in a_loader(corpus, Place(5, 2), rank=2, infinite=False):
        shared = inputs["input"].data_ptr() + inputs["input"].itemsize == labels.data_ptr()
        masked = bool((labels == IGNORE).any())
        assert shared != masked
        assert not (inputs["input"] == IGNORE).any()
        views, copies = views + shared, copies + masked
    # 3 of 12 rows for this rank, so every second item has a padding row.
    assert views and copies


def test_inputs_and_labels_are_shifted_by_one_token(corpus):
    for inputs, labels in a_loader(corpus, Place(1, 12), infinite=False):
        assert inputs["input"].is_contiguous() or inputs["input"].stride(1) == 1
        same = labels[:, :-1] == inputs["input"][:, 1:]
        assert (same | (labels[:, :-1] == IGNORE)).all()


@pytest.mark.parametrize("shard_bytes", [0, 3000, 1])
@pytest.mark.parametrize("shuffle_shards", [0, 1, 2, 256])
def test_a_run_over_two_epochs_is_the_reference_s(small, shard_bytes, shuffle_shards):
    order = {"seed": 3, "shuffle_shards": shuffle_shards}
    expected = expected_stream(small, shard_bytes=shard_bytes, **order)
    run = Run(builder(small, shard_bytes=shard_bytes, **order), Place(4, 2))
    check_steps(run, expected, 2 * expected.epoch_samples // 12 + 1)


def test_golden_first_step(small):
    # The whole path from files to rows. Another value here means that runs cannot be resumed any more.
    rows = expected_stream(small).rows(0, 12)
    assert Run(builder(small), Place(1, 12)).step() == rows
    assert [row.inputs[0] for row in rows] == [44, 342, 364, 554, 547, 320, 357, 219, 601, 473, 480, 291]


def test_the_small_corpora_have_the_samples_they_are_known_for(corpus, small):
    assert expected_stream(corpus).epoch_samples == 330
    assert expected_stream(small).epoch_samples == 83


# --- padding rows ---


def test_padding_rows_add_no_label(corpus):
    place = Place(5, 2)  # 2 or 3 rows each, so 4 with padding
    loaders = [a_loader(corpus, place, rank) for rank in range(5)]
    iterators = [iter(loader) for loader in loaders]
    valid = 0
    for _ in range(loaders[0].micro_batches_per_step):
        for iterator in iterators:
            valid += int((next(iterator)[1] != IGNORE).sum())
    expected = expected_stream(corpus)
    assert valid == sum(label != IGNORE for n in range(12) for label in expected[n].labels)


def test_a_local_batch_above_the_rank_s_share_is_filled_with_padding(corpus):
    run = Run(builder(corpus), Place(4, 10))
    assert run.loaders[0].micro_batches_per_step == 1
    for rank, rows in enumerate(run.step_by_rank()):
        assert rows == expected_stream(corpus).rows(3 * rank, 3 * rank + 3)


# --- the finite end ---


@pytest.mark.parametrize("place", [Place(1, 12), Place(4, 2), Place(5, 3), Place(12, 1), Place(11, 1)])
def test_finite_data_ends_once_with_a_short_step_for_all_ranks(corpus, place):
    run = Run(builder(corpus, infinite=False), place)
    expected = expected_stream(corpus).rows(0, 330)
    delivered = []
    while rows := run.step():
        delivered.append(rows)
    assert [len(rows) for rows in delivered] == [12] * 27 + [6]
    assert [row for rows in delivered for row in rows] == expected
    assert run.cursor == 330
    assert run.step() == []


def test_a_rank_without_a_row_in_the_last_step_gets_padding_of_a_real_row(corpus):
    place = Place(12, 1)  # 6 rows are left for 12 ranks
    expected = {row.inputs for row in expected_stream(corpus).rows(324, 330)}
    empty = 0
    for rank in range(12):
        *_, (inputs, labels) = a_loader(corpus, place, rank, infinite=False)
        assert rows_of((inputs, labels))[0].inputs in expected
        empty += bool((labels == IGNORE).all())
    assert empty == 6


def test_a_finished_loader_starts_no_second_epoch_but_can_be_moved_back(corpus):
    loader = a_loader(corpus, infinite=False)
    list(loader)
    state = loader.state_dict()
    assert list(loader) == []
    assert loader.state_dict() == state
    loader.load_state_dict({**state, "cursor": 318})
    assert len(list(loader)) == 3
    assert loader.cursor == 330


def test_a_state_beyond_the_end_of_finite_data_is_refused(corpus):
    loader = a_loader(corpus, infinite=False)
    with pytest.raises(StateError, match=r"cursor is 400, .* ends at sample 330"):
        loader.load_state_dict({**loader.state_dict(), "cursor": 400})
    with pytest.raises(LoaderError, match="cursor = 331: expected 0 to 330"):
        loader.seek(331)
    loader.seek(330)
    assert list(loader) == []


def test_an_order_ends_before_its_numbers_become_too_large_for_a_state(corpus):
    loader = a_loader(corpus, Place(1, 4, 4))
    loader.seek(MAX_NUMBER - 4)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict())
    assert loader.cursor == MAX_NUMBER
    with pytest.raises(LoaderError, match="to end a run, set training.steps or data.epochs"):
        next(iterator)
    # As one would write it who wants all that follows to be left out.
    loader = a_loader(corpus, Place(1, 4, 4), skip=[(6, MAX_NUMBER)])
    with pytest.raises(LoaderError, match="the step at sample 4 goes beyond .* data.skip leaves too few"):
        list(loader)
    assert loader.cursor == 4


@pytest.mark.parametrize("size", [4.0, True, "4", None])
def test_a_size_that_is_no_integer_is_refused_by_name(corpus, size):
    with pytest.raises(ConfigError, match=r"global_batch_size = .*: expected an integer"):
        a_loader(corpus, Place(1, 4, size))


def test_sizes_from_numpy_are_sizes(corpus):
    states = [a_loader(corpus, Place(1, 4, size)).state_dict() for size in (12, np.int64(12))]
    assert states[0] == states[1]


# --- iterators and loads ---


def test_iter_twice_goes_on_from_the_last_completed_step(corpus):
    loader = a_loader(corpus)  # 3 items a step
    first = iter(loader)
    items = [rows_of(next(first)) for _ in range(4)]
    again = iter(loader)
    assert rows_of(next(again)) == items[3]
    assert loader.cursor == 12


def test_a_replaced_iterator_says_so(corpus):
    loader = a_loader(corpus)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(LoaderError, match="replaced by a later iter"):
        next(first)
    assert rows_of(next(second)) == expected_stream(corpus).rows(0, 4)


def test_a_replaced_iterator_says_so_also_if_it_had_not_begun(corpus):
    loader = a_loader(corpus, Place(1, 12))
    first = iter(loader)
    second = iter(loader)
    next(second)
    with pytest.raises(LoaderError, match="replaced by a later iter"):
        next(first)
    assert loader.cursor == 12
    assert rows_of(next(second)) == expected_stream(corpus).rows(12, 24)


def test_replacing_an_iterator_between_two_of_its_items_changes_no_count(corpus):
    loader = a_loader(corpus, Place(1, 6))
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(LoaderError):
        next(first)
    assert loader.delivered_in_step == 0
    assert [rows_of(next(second)) for _ in range(2)] == [
        expected_stream(corpus).rows(0, 6),
        expected_stream(corpus).rows(6, 12),
    ]
    assert loader.cursor == 12


@pytest.mark.parametrize("target", [0, 12, 36, 84, 10**6])
def test_a_load_takes_effect_at_the_next_item_of_a_running_iterator(corpus, target):
    expected = expected_stream(corpus)
    for taken in (0, 1, 2, 3, 7):  # of 3 items a step
        loader = a_loader(corpus)
        iterator = iter(loader)
        for _ in range(taken):
            next(iterator)
        loader.load_state_dict({**loader.state_dict(), "cursor": target})
        assert loader.cursor == target
        for item in range(6):
            start = target + 4 * item
            assert rows_of(next(iterator)) == expected.rows(start, start + 4)
            assert loader.cursor == target + (item + 1) // 3 * 12


def test_two_loads_in_a_row_leave_the_last_one(corpus):
    loader = a_loader(corpus)
    iterator = iter(loader)
    next(iterator)
    for cursor in (84, 36):
        loader.load_state_dict({**loader.state_dict(), "cursor": cursor})
    assert rows_of(next(iterator)) == expected_stream(corpus).rows(36, 40)


def test_a_load_right_behind_the_last_item_of_finite_data_goes_on(corpus):
    loader = a_loader(corpus, Place(1, 12), infinite=False)
    iterator = iter(loader)
    for _ in range(28):
        next(iterator)
    loader.load_state_dict({**loader.state_dict(), "cursor": 0})
    assert rows_of(next(iterator)) == expected_stream(corpus).rows(0, 12)


def test_a_cursor_that_no_step_has_ended_at_is_as_good_as_any(corpus):
    loader = a_loader(corpus, Place(1, 12))
    loader.load_state_dict({**loader.state_dict(), "cursor": 7})
    assert rows_of(next(iter(loader))) == expected_stream(corpus).rows(7, 19)


# --- side effects ---


def random_states():
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()


def test_no_global_random_state_is_touched_or_read(tmp_path):
    corpus = make_corpus(tmp_path, D60)
    delivered = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = random_states()
        loader = a_loader(corpus, seed=5)  # builds the store at first
        iterator = iter(loader)
        delivered.append([rows_of(next(iterator)) for _ in range(40)])
        loader.load_state_dict(loader.state_dict())
        next(iterator)
        assert random_states() == before
    assert delivered[0] == delivered[1]


def test_memory_does_not_grow_with_the_number_of_items(small, small_blocks):
    iterator = iter(a_loader(small))
    for _ in range(3000):  # over 100 epochs, so all caches are full
        next(iterator)
    tracemalloc.start()
    try:
        for _ in range(1000):
            next(iterator)
        first, _ = tracemalloc.get_traced_memory()
        for _ in range(3000):
            next(iterator)
        last, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert last < first + 100_000


# --- what cannot be built ---


def build(corpus, **changes):
    arguments = {"seq_len": 8, "global_batch_size": 12, "local_batch_size": 3} | changes
    return build_loader(corpus.config(), corpus.tokenizer, **arguments)


def test_more_ranks_than_the_global_batch_are_refused_with_both_numbers(corpus):
    with pytest.raises(MappingError) as error:
        build(corpus, dp_size=13, dp_rank=12)
    assert "dp_size = 13 is above global_batch_size = 12" in str(error.value)
    assert "train on at most 12 data-parallel ranks" in str(error.value)


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"seq_len": 0}, ConfigError, "seq_len = 0: expected at least 1"),
        ({"global_batch_size": 0}, MappingError, "global_batch_size = 0: expected at least 1"),
        ({"num_workers": -1}, ConfigError, "num_workers = -1: expected at least 0"),
        ({"local_batch_size": 0}, MappingError, "local_batch_size = 0: expected at least 1"),
        ({"dp_rank": 2, "dp_size": 2}, MappingError, "dp_rank = 2 of dp_size = 2"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(corpus, changes, error, text):
    with pytest.raises(error, match=text):
        build(corpus, **changes)


def test_a_topology_that_cannot_work_is_refused_before_anything_is_read(tmp_path):
    config = DataConfig(sources=[SourceConfig("web", str(tmp_path / "absent"))], cache_dir=str(tmp_path / "cache"))
    with pytest.raises(MappingError):
        build_loader(config, tmp_path / "absent", seq_len=8, global_batch_size=2, local_batch_size=1, dp_size=3)
    assert list(tmp_path.iterdir()) == []


def test_no_source_is_refused(corpus):
    config = corpus.config()
    config.sources = []
    with pytest.raises(ConfigError, match=r"data.sources: no source; give a \[\[data.sources\]\] table"):
        build_loader(config, corpus.tokenizer, seq_len=8, global_batch_size=12, local_batch_size=3)


def test_input_that_is_not_there_is_named(corpus, tmp_path):
    config = DataConfig(sources=[SourceConfig("web", str(tmp_path / "*.jsonl"))], cache_dir=str(tmp_path / "cache"))
    with pytest.raises(InputError, match=r"\*\.jsonl matches no file"):
        build_loader(config, corpus.tokenizer, seq_len=8, global_batch_size=12, local_batch_size=3)
    assert not (tmp_path / "cache").exists()
