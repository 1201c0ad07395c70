"""A running loader moved to another topology gives the same global batches: the reference's."""

import multiprocessing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import D240, make_corpus
from tests.reference import deal
from tests.resume import Place, Run, builder, check_steps, expected_stream, rows_of
from tests.strategies import places
from zephon_patches.errors import ConfigError, LoaderError, MappingError
from zephon_patches.loader.collate import MicroBatchReader


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d240"), D240)


@pytest.fixture(scope="module")
def expected(corpus):
    return expected_stream(corpus)


class Elastic(Run):
    """A run whose ranks come and go, each of them where its own iterator is."""

    def __init__(self, build, place: Place) -> None:
        super().__init__(build, place)
        self.build = build
        self.start()

    def remap(self, place: Place) -> None:
        state = self.state()
        for rank, loader in enumerate(self.loaders[: place.dp]):
            loader.remap(rank, place.dp, local_batch_size=place.local)
        del self.loaders[place.dp :], self.iterators[place.dp :]
        for rank in range(len(self.loaders), place.dp):
            loader = self.build(place, rank)
            loader.load_state_dict(state)
            self.loaders.append(loader)
            self.iterators.append(iter(loader))
        self.place = place
        assert self.state() == state
        assert {loader.topology.dp_size for loader in self.loaders} == {place.dp}


@settings(max_examples=12, deadline=None)
@given(
    links=st.sampled_from([12, 17])
    .flatmap(lambda batch: st.lists(st.tuples(places(batch, max_dp=12), st.integers(0, 3)), min_size=3, max_size=6))
    .filter(lambda links: len({place.dp for place, _ in links}) > 1),
    cursor=st.sampled_from([0, 7, 320, 10**15]),
    skip=st.sampled_from([[], [(3, 9), (30, 31), (10**15 + 5, 10**15 + 40)]]),
)
def test_any_chain_of_remaps_between_steps_gives_the_reference_s_steps(corpus, expected, links, cursor, skip):
    run = Elastic(builder(corpus, skip=skip), links[0][0])
    for loader in run.loaders:
        loader.seek(cursor)
    for place, steps in links:
        run.remap(place)
        for _ in range(steps):
            dealt, behind = deal(run.cursor, place.batch, place.local, place.dp, skip=skip)
            numbers = [[n for rows in rank for n in rows if n is not None] for rank in dealt]
            assert run.step_by_rank() == [[expected[n] for n in rank] for rank in numbers]
            assert run.cursor == behind


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_have_read_ahead_give_the_rows_of_the_new_place(corpus, expected, persistent):
    ahead = {"persistent_workers": persistent, "prefetch_factor": 8}
    run = Elastic(builder(corpus, loader=ahead), Place(1, 4, 12, 1))
    for place in (Place(1, 4, 12, 1), Place(2, 3, 12, 1), Place(2, 12, 12, 1), Place(1, 1, 12, 1)):
        run.remap(place)
        check_steps(run, expected, 2)
    assert len(multiprocessing.active_children()) == 1


def test_what_was_read_ahead_is_dropped_and_no_store_is_opened_anew(corpus, expected, monkeypatch):
    read = []
    real = MicroBatchReader.read
    monkeypatch.setattr(
        MicroBatchReader, "read", lambda self, rows, *empty: read.append(len(rows)) or real(self, rows, *empty)
    )
    loader = builder(corpus)(Place(1, 4), 0)
    reader, order, iterator = loader._reader, loader.order, iter(loader)
    for _ in range(3):
        next(iterator)
    monkeypatch.setattr("zephon_patches.store.reader.TokenStore.__init__", lambda *given: pytest.fail("opened anew"))
    loader.remap(1, 2, local_batch_size=6)
    assert rows_of(next(iterator)) == expected.rows(18, 24)
    assert read == [4, 4, 4, 6]
    assert loader._reader is reader and loader.order is order


def test_before_the_first_item_and_twice_in_a_row_the_last_remap_counts(corpus, expected):
    loader = builder(corpus)(Place(1, 4), 0)
    loader.remap(2, 3)
    assert (loader.topology, loader.local_batch_size, loader.micro_batches_per_step) == ((2, 3), 4, 1)
    iterator = iter(loader)
    assert rows_of(next(iterator)) == expected.rows(8, 12)
    loader.remap(0, 12)
    loader.remap(1, 2, local_batch_size=6)
    assert rows_of(next(iterator)) == expected.rows(18, 24)
    assert loader.cursor == 24


def test_the_counts_of_steps_and_samples_go_on(corpus):
    loader = builder(corpus)(Place(1, 12), 0)
    iterator = iter(loader)
    next(iterator)
    loader.remap(1, 2)
    next(iterator)
    assert (loader.steps_delivered, loader.samples_delivered, loader.cursor) == (2, 24, 24)


@pytest.mark.parametrize("place", [Place(3, 4), Place(12, 1), Place(5, 2)])
def test_the_short_last_step_is_dealt_to_the_new_place(corpus, expected, place):
    run = Elastic(builder(corpus, infinite=False), Place(2, 6))
    for loader in run.loaders:
        loader.seek(324)
    run.remap(place)
    assert run.step() == expected.rows(324, 330)
    run.remap(Place(1, 12))
    assert run.step() == []


@pytest.mark.parametrize("taken", [1, 2])
def test_in_mid_step_it_is_refused_and_changes_nothing(corpus, expected, taken):
    loader = builder(corpus)(Place(1, 4), 0)
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    text = rf"remap to rank 0 of 2: {taken} of 3 items of the step at sample 0 are handed out.*take its other items"
    with pytest.raises(LoaderError, match=text):
        loader.remap(0, 2)
    assert loader.topology == (0, 1)
    assert rows_of(next(iterator)) == expected.rows(4 * taken, 4 * taken + 4)
    loader.seek(loader.cursor)  # as the message says
    loader.remap(0, 2)
    assert rows_of(next(iterator)) == expected.rows(loader.cursor, loader.cursor + 4)


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ((0, 13), MappingError, "dp_size = 13 is above global_batch_size = 12"),
        ((-1, 2), MappingError, "dp_rank = -1 of dp_size = 2"),
        ((2, 2), MappingError, "dp_rank = 2 of dp_size = 2"),
        ((0, 0), MappingError, "dp_rank = 0 of dp_size = 0"),
        ((0, 2, 0), MappingError, "local_batch_size = 0: expected at least 1"),
        ((0, 2.0), ConfigError, "dp_size = 2.0: expected an integer"),
        ((False, 2), ConfigError, "dp_rank = False: expected an integer"),
        ((0, 2, 1.5), ConfigError, "local_batch_size = 1.5: expected an integer"),
    ],
)
def test_a_place_that_cannot_be_is_refused_and_changes_nothing(corpus, expected, arguments, error, text):
    loader = builder(corpus)(Place(1, 6), 0)
    iterator = iter(loader)
    rank, size, *local = arguments
    with pytest.raises(error, match=text):
        loader.remap(rank, size, local_batch_size=local[0] if local else None)
    assert (loader.topology, loader.local_batch_size, loader.micro_batches_per_step) == ((0, 1), 6, 2)
    assert rows_of(next(iterator)) == expected.rows(0, 6)


def test_sizes_from_numpy_are_sizes(corpus):
    loader = builder(corpus)(Place(1, 6), 0)
    loader.remap(np.int32(1), np.int64(2), local_batch_size=np.uint8(3))
    assert {type(value) for value in (*loader.topology, loader.local_batch_size)} == {int}


def test_a_run_that_forgets_to_remap_one_rank_is_seen(corpus, expected):
    # The check itself can fail.
    class Forgetful(Elastic):
        def remap(self, place: Place) -> None:
            self.loaders[0].remap(0, place.dp, local_batch_size=place.local)
            self.place = place

    run = Forgetful(builder(corpus), Place(2, 6))
    check_steps(run, expected, 1)
    run.remap(Place(2, 3))
    with pytest.raises(AssertionError):
        check_steps(run, expected, 1)
