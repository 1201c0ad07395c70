"""The laws of the design as properties, and a proof that the harness they are checked with sees faults."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.corpora import D60, D240, make_corpus, make_sources
from tests.reference import IGNORE
from tests.resume import (
    Place,
    Run,
    builder,
    check_chain,
    check_every_stop,
    check_steps,
    expected_mix,
    expected_stream,
    is_padding,
    uninterrupted,
)
from tests.strategies import chains, cursors, document_lengths, places, seeds, shuffle_shards, skips
from zephon_patches.errors import StateError
from zephon_patches.store.reader import TokenStore

pytestmark = pytest.mark.usefixtures("small_blocks")

# Three kinds of order over the same 60 documents; several shards where shard_bytes is small.
ORDERS = [
    {"shard_bytes": 0, "shuffle_shards": 256, "seed": 0},
    {"shard_bytes": 700, "shuffle_shards": 2, "seed": 1},
    {"shard_bytes": 150, "shuffle_shards": 0, "seed": 2},
]
orders = st.sampled_from(ORDERS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d60"), D60, files=3)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A new folder for each example of a property."""
    numbers = itertools.count()
    parent = tmp_path_factory.mktemp("fresh")
    return lambda: parent / str(next(numbers))


# --- law 1: pure order ---


@given(orders, cursors, places(), places())
@settings(max_examples=60)
def test_law_1_a_sample_depends_on_its_number_alone(corpus, order, cursor, one, other):
    run_one, run_other = Run(builder(corpus, **order), one), Run(builder(corpus, **order), other)
    for run in (run_one, run_other):
        run.load({**run.state(), "cursor": cursor})
    shared = min(one.batch, other.batch)
    assert run_one.step()[:shared] == run_other.step()[:shared]


@given(document_lengths, st.booleans(), st.integers(1, 12), seeds, shuffle_shards, st.sampled_from([0, 1, 60, 200]))
@settings(max_examples=60)
def test_law_1_the_order_is_the_reference_s_for_any_documents(fresh, lengths, eos, seq_len, seed, shuffle, shard_bytes):
    corpus = make_corpus(fresh(), lengths, eos)
    order = {"seed": seed, "shuffle_shards": shuffle, "shard_bytes": shard_bytes}
    expected = expected_stream(corpus, seq_len=seq_len, **order)
    if expected.epoch_samples:
        run = Run(builder(corpus, seq_len=seq_len, **order), Place(2, 2, 5))
        check_steps(run, expected, min(2 * expected.epoch_samples // 5 + 1, 40))


# --- law 2: steps ---


@given(orders, st.integers(0, 10**12), places())
@settings(max_examples=60)
def test_law_2_each_rank_takes_its_part_of_the_step(corpus, order, cursor, place):
    run = Run(builder(corpus, **order), place)
    run.load({**run.state(), "cursor": cursor})
    expected = expected_stream(corpus, **order)
    for _ in range(2):
        dealt, behind = reference.deal(run.cursor, place.batch, place.local, place.dp)
        ranks = run.step_by_rank()
        for rank, micro_batches in zip(ranks, dealt, strict=True):
            assert rank == [expected[n] for rows in micro_batches for n in rows if n is not None]
        assert run.cursor == behind


@given(orders, places(), st.integers(0, 90))
@settings(max_examples=40)
def test_law_2_a_finite_end_is_a_short_step_that_all_ranks_take(corpus, order, place, start):
    run = Run(builder(corpus, infinite=False, **order), place)
    expected = expected_stream(corpus, **order)
    end = expected.epoch_samples
    start = min(start, end)
    run.load({**run.state(), "cursor": start})
    rows = []
    while run.cursor < end:
        dealt, behind = reference.deal(run.cursor, place.batch, place.local, place.dp, end)
        ranks = run.step_by_rank()
        assert [len(rank) for rank in ranks] == [sum(n is not None for m in rank for n in m) for rank in dealt]
        rows += [row for rank in ranks for row in rank]
        assert run.cursor == behind
    assert run.step() == []
    assert rows == expected.rows(start, end)


# --- laws 1 and 2 for mixtures, stages, skips and epochs ---


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    # 43, 25 and 3 samples: the last two wrap early, the smallest within a step.
    return make_sources(tmp_path_factory.mktemp("made"), web=D60[:31], code=[9] * 20, a=[5, 5, 9])


def weighted(draw: st.DrawFn, names: list[str]) -> dict[str, float]:
    weight = st.sampled_from([0, 1, 2, 3, 0.1, 0.7, 1e-6, 12.5])
    return draw(st.fixed_dictionaries(dict.fromkeys(names, weight)).filter(lambda of: any(of.values())))


@st.composite
def mixtures(draw: st.DrawFn) -> dict:
    """Settings of several sources: weights or none, stages, shuffling."""
    names = ["web", "code", "a"]
    starts = sorted(draw(st.sets(st.integers(1, 250), max_size=3)))
    return {
        "weights": weighted(draw, names) if draw(st.booleans()) else None,
        "stages": [(at, weighted(draw, names)) for at in starts],
        **draw(orders),
    }


@given(mixtures(), skips, chains(), st.integers(0, 120))
@settings(max_examples=60)
def test_any_mixture_with_stages_and_skips_is_the_reference_s_over_any_chain_of_resumes(
    made, mixture, skip, links, start
):
    expected = expected_mix(made, **mixture)
    build = builder(made, **mixture, skip=skip)
    state = None
    for place, steps in links:
        run = Run(build, place)
        run.load({**run.state(), "cursor": start} if state is None else state)
        for _ in range(steps):
            dealt, behind = reference.deal(run.cursor, place.batch, place.local, place.dp, skip=skip)
            for rank, micro_batches in zip(run.step_by_rank(), dealt, strict=True):
                assert rank == [expected[n] for rows in micro_batches for n in rows if n is not None]
            assert run.cursor == behind
        state = run.state()


@given(orders, skips, st.integers(1, 4), places(), places(), st.integers(0, 8))
@settings(max_examples=40)
def test_epochs_of_several_sources_end_with_each_sample_as_often_as_it_should(
    made, order, skip, epochs, place, other, stop
):
    expected = expected_mix(made, **order)
    end = epochs * expected.epoch_samples
    build = builder(made, **order, skip=skip, epochs=epochs)
    run = Run(build, place)
    rows: list = []
    for _ in range(stop):
        rows += run.step()
    resumed = Run(build, other)
    resumed.load(run.state())
    left = resumed.loaders[0].steps_left(resumed.cursor)
    steps = 0
    while step := resumed.step():
        rows += step
        steps += 1
    assert steps == left
    assert rows == [expected[n] for n in range(end) if not any(a <= n < b for a, b in skip)]
    if not skip:
        assert Counter(Counter(rows).values()).keys() == {epochs}


# --- law 3: once ---


@given(
    document_lengths, st.booleans(), st.integers(1, 12), shuffle_shards, st.sampled_from([0, 1, 60]), st.integers(0, 3)
)
@settings(max_examples=60)
def test_law_3_each_token_of_a_shard_but_its_first_is_a_label_once_an_epoch(
    fresh, lengths, eos, seq_len, shuffle, shard_bytes, epoch
):
    corpus = make_corpus(fresh(), lengths, eos)
    order = {"shuffle_shards": shuffle, "shard_bytes": shard_bytes}
    shards = [
        [token for document in shard for token in corpus.documents[document]]
        for shard in reference.cut_documents(corpus.line_bytes, shard_bytes or 2**24)
    ]
    labels = Counter(token for shard in shards for token in shard[1:])
    size = expected_stream(corpus, seq_len=seq_len, **order).epoch_samples
    if not size:
        return
    run = Run(builder(corpus, seq_len=seq_len, **order), Place(1, size, size))
    run.load({**run.state(), "cursor": epoch * size})
    rows = run.step()
    assert len(rows) == size
    assert Counter(label for row in rows for label in row.labels if label != IGNORE) == labels


@given(orders, places(), st.integers(0, 5))
@settings(max_examples=30)
def test_law_3_each_sample_comes_once_an_epoch_for_any_topology(corpus, order, place, epoch):
    expected = expected_stream(corpus, **order)
    size = expected.epoch_samples
    run = Run(builder(corpus, **order), place)
    run.load({**run.state(), "cursor": epoch * size})
    rows: list = []
    while len(rows) < size:
        rows += run.step()
    assert sorted(rows[:size]) == sorted(expected.rows(0, size))


# --- law 4: one number ---


@given(orders, cursors, places(batch=24), st.integers(0, 3))
@settings(max_examples=40)
def test_law_4_the_state_is_the_same_small_text_anywhere(corpus, order, cursor, place, steps):
    run, alone = Run(builder(corpus, **order), place), Run(builder(corpus, **order), Place(1, 24, 24))
    state = {**run.state(), "cursor": cursor}
    for each in (run, alone):
        each.load(state)
        for _ in range(steps):
            each.step()
    assert run.state() == alone.state() == {**state, "cursor": cursor + 24 * steps}
    assert len(json.dumps(run.state())) < 1024
    assert set(state) == {"cursor", "order"}


@given(orders, places(), st.integers(0, 40))
@settings(max_examples=40)
def test_law_4_in_mid_step_the_state_is_the_step_s_start(corpus, order, place, items):
    run = Run(builder(corpus, **order), place)
    for taken in range(1, items + 1):
        run.micro_step()
        assert run.state()["cursor"] == taken // run.loaders[0].micro_batches_per_step * place.batch


# --- laws 1, 2 and 4 together: chains of resumes ---


@given(orders, st.integers(1, 24).flatmap(lambda batch: chains(batch)))
@settings(max_examples=50)
def test_a_chain_of_resumes_gives_the_steps_of_one_run(corpus, order, links):
    steps = sum(steps for _, steps in links)
    build = builder(corpus, **order)
    expected = uninterrupted(build, steps, links[0][0].batch)
    assert check_chain(build, links, expected) == len(expected)
    assert expected == expected_stream(corpus, **order).rows(0, len(expected))


@given(orders, chains(), cursors)
@settings(max_examples=50)
def test_a_chain_with_other_batch_sizes_goes_on_in_the_same_order(corpus, order, links, cursor):
    check_chain(builder(corpus, **order), links, expected_stream(corpus, **order), cursor)


@given(orders, st.lists(st.tuples(places(batch=12, max_dp=3, workers=2), st.integers(0, 2)), min_size=4, max_size=4))
@settings(max_examples=10)
def test_a_chain_with_other_numbers_of_workers_is_the_same(corpus, order, links):
    check_chain(builder(corpus, **order), links, expected_stream(corpus, **order))


@given(orders, places(batch=12), st.lists(places(batch=12), min_size=2, max_size=4))
@settings(max_examples=8)
def test_a_stop_at_every_step_goes_on_exactly_elsewhere(corpus, order, first, others):
    check_every_stop(builder(corpus, **order), first, others, 9)


def test_a_stop_at_every_step_of_an_epoch_and_a_half(tmp_path):
    corpus = make_corpus(tmp_path, D240, files=4)
    build = builder(corpus, shard_bytes=5000, shuffle_shards=2)
    check_every_stop(build, Place(2, 3), [Place(3, 4), Place(1, 12), Place(5, 2), Place(12, 1), Place(4, 1)], 42)


# --- law 5: no search (see also order/test_scale.py) ---


@contextmanager
def recorded_reads() -> Iterator[list[int]]:
    """The shard of each read of a row."""
    reads: list[int] = []
    real = TokenStore.tokens

    def recording(store: TokenStore, shard: int):
        reads.append(shard)
        return real(store, shard)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenStore, "tokens", recording)
        yield reads


@given(orders, st.integers(0, 80), places(max_dp=4))
@settings(max_examples=30)
def test_law_5_a_seek_reads_nothing_and_the_first_item_its_own_rows(corpus, order, position, place):
    for epoch in (0, 10**13):
        run = Run(builder(corpus, **order), place)
        cursor = epoch * expected_stream(corpus, **order).epoch_samples + position
        with recorded_reads() as reads:
            run.load({**run.state(), "cursor": cursor})
            run.start()
            assert reads == []
            run.micro_step()
        assert len(reads) == place.dp * place.local


# --- law 6: no silence ---

SETTINGS = {"seed": [0, 1], "shuffle_shards": [256, 3], "shard_bytes": [0, 500], "seq_len": [8, 9]}


some_settings = st.fixed_dictionaries({key: st.sampled_from(values) for key, values in SETTINGS.items()})


@given(some_settings, some_settings, st.integers(0, 1000))
@settings(max_examples=60)
def test_law_6_a_state_loads_where_nothing_changed_and_is_refused_by_name_elsewhere(corpus, before, after, cursor):
    saved = {**builder(corpus, **before)(Place(1, 12), 0).state_dict(), "cursor": cursor}
    loader = builder(corpus, **after)(Place(2, 3), 1)
    changed = [key for key in SETTINGS if before[key] != after[key]]
    if not changed:
        loader.load_state_dict(saved)
        assert loader.cursor == cursor
        return
    with pytest.raises(StateError) as error:
        loader.load_state_dict(saved)
    assert loader.cursor == 0
    for key in SETTINGS:
        line = f".{key}: {before[key]} in the checkpoint, {after[key]} now"
        assert (line in str(error.value)) == (key in changed)


# --- the harness sees faults ---


class SwappedBetweenSteps(Run):
    """Two samples of neighbouring steps change places."""

    def step(self):
        rows = super().step()
        if self.cursor == 36:
            self._kept, rows[5] = rows[5], self._peek(36)
        elif self.cursor == 48:
            rows[0] = getattr(self, "_kept", rows[0])
        return rows

    def _peek(self, n):
        other = Run(lambda place, rank: self.build_again(place, rank), Place(1, 12))
        other.load({**other.state(), "cursor": n})
        return other.step()[0]


class SwappedInsideAStep(Run):
    def step(self):
        rows = super().step()
        rows[3], rows[4] = rows[4], rows[3]
        return rows


class CursorOneTooFar(Run):
    def load(self, state):
        super().load({**state, "cursor": state["cursor"] + 1})


class CursorOneBatchBehind(Run):
    def load(self, state):
        super().load({**state, "cursor": max(0, state["cursor"] - 12)})


class StartsOver(Run):
    def load(self, state):
        pass


class RanksSwapped(Run):
    def __init__(self, build, place):
        super().__init__(lambda place, rank: build(place, (rank + 1) % place.dp), place)


class RanksSeeTheSame(Run):
    def __init__(self, build, place):
        super().__init__(lambda place, rank: build(place, 0), place)


class OneLabelWrong(Run):
    def step(self):
        rows = super().step()
        if self.cursor == 24:
            rows[-1] = rows[-1]._replace(labels=(*rows[-1].labels[:-1], 1 + rows[-1].labels[-1]))
        return rows


class ARowLost(Run):
    def step(self):
        return super().step()[:-1] if self.cursor == 24 else super().step()


class OneRankBehind(Run):
    def load(self, state):
        super().load(state)
        if state["cursor"]:
            self.loaders[-1].load_state_dict({**state, "cursor": state["cursor"] - 12})


@pytest.mark.parametrize(
    "fault",
    [
        SwappedBetweenSteps,
        SwappedInsideAStep,
        CursorOneTooFar,
        CursorOneBatchBehind,
        StartsOver,
        RanksSwapped,
        RanksSeeTheSame,
        OneLabelWrong,
        ARowLost,
        OneRankBehind,
    ],
)
def test_the_harness_finds_a_planted_fault(corpus, fault):
    build = builder(corpus)
    fault.build_again = staticmethod(build)
    places = Place(2, 3), [Place(3, 2), Place(4, 3)]
    check_every_stop(build, *places, 5)
    with pytest.raises(AssertionError):
        check_every_stop(build, *places, 5, run_class=fault)
    links, expected = [(Place(2, 3), 2), (Place(3, 4), 2), (Place(4, 1), 1)], uninterrupted(build, 5)
    check_chain(build, links, expected)
    with pytest.raises(AssertionError):
        check_chain(build, links, expected, run_class=fault)


def test_the_harness_finds_padding_that_counts(corpus):
    class PaddingCounts(Run):
        def micro_step(self):
            return [
                [row._replace(labels=(1, *row.labels[1:])) if is_padding(row) else row for row in rows]
                for rows in super().micro_step()
            ]

    with pytest.raises(AssertionError):
        check_every_stop(builder(corpus), Place(5, 2), [Place(5, 2)], 3, run_class=PaddingCounts)


def test_the_reference_is_apart_from_the_product():
    source = Path(reference.__file__).read_text()
    assert "zephon_patches" not in source
    assert "numpy" not in source
