"""Tracing, skipping, seeds: group K of the known faults of data loaders."""

import numpy as np
import pytest

from tests.corpora import D60, D240, make_corpus, make_sources
from tests.reference import PAD
from tests.resume import Place, Run, builder, expected_mix, expected_stream
from zephon_patches.config import DataConfig
from zephon_patches.errors import ConfigError, StateError
from zephon_patches.samples.chunking import samples_with, span

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d240"), D240)


def test_the_numbers_of_a_document_are_those_of_the_samples_that_hold_it(tmp_path):
    """K01, the arithmetic of it: from a document of a shard to its numbers, in any epoch and stage."""
    made = make_sources(tmp_path, web=D60, code=[9] * 20)
    settings = {"weights": {"web": 0.7, "code": 0.3}, "stages": [(150, {"web": 1})]}
    run = Run(builder(made, **settings, shard_bytes=600), Place(2, 6))
    delivered = [row for _ in range(40) for row in run.step()]
    order, stores = run.loaders[0]._order, run.loaders[0]._reader._stores
    for source, name in enumerate(sorted(made.lengths)):
        documents = iter(made.documents(name))
        for shard, record in enumerate(stores[source].manifest.shards):
            start = 0
            for _ in range(record.documents):
                document = next(documents)
                stop = start + len(document)
                samples = samples_with(start, stop, 8, record.tokens)
                found = {order.number(source, epoch, shard, sample) for epoch in range(9) for sample in samples}
                words = set(document[:-1]) - {PAD}  # without EOS, which others have too
                held = {n for n, row in enumerate(delivered) if words & {*row.inputs, *row.labels}}
                of_its_end = {n for n in found if n is not None and n < len(delivered)} - held
                assert held <= found
                assert all(row_has_end(delivered[n], document) for n in of_its_end)
                start = stop
        assert next(documents, None) is None


def row_has_end(row, document) -> bool:
    """Whether a row begins with a document's EOS: it holds the document's last token, and no word of it."""
    return row.inputs[0] == document[-1]


def test_the_way_from_numbers_to_tokens_needs_no_rank(tmp_path):
    """K01: step 13 of a mixture, for any number of ranks."""
    made = make_sources(tmp_path, web=D60, code=[9] * 20)
    settings = {"weights": {"web": 0.7, "code": 0.3}, "stages": [(150, {"web": 1})]}
    expected = expected_mix(made, **settings).rows(144, 156)
    for place in (Place(1, 12), Place(5, 2)):
        run = Run(builder(made, **settings), place)
        order, stores = run.loaders[0]._order, run.loaders[0]._reader._stores
        found = order.locate(np.arange(144, 156))
        for row, source, shard, sample in zip(expected, found.source, found.shard, found.sample, strict=True):
            tokens = stores[source].tokens(int(shard))
            start, stop = span(int(sample), 8, len(tokens))
            assert tokens[start:stop].tolist() == [row.inputs[0], *(label for label in row.labels if label >= 0)]


def test_steps_that_are_skipped_stay_skipped_after_resumes_on_other_ranks(corpus):
    """K02: steps 5 to 7 are left out; saved before, at 4, and after, at 9."""
    skip = {"skip": [(48, 84)]}
    expected = expected_stream(corpus)
    before = Run(builder(corpus), Place(2, 3))
    for step in range(4):
        assert before.step() == expected.rows(12 * step, 12 * step + 12)
    run = Run(builder(corpus, **skip), Place(3, 2))  # added when going back to this checkpoint
    run.load(before.state())
    for step in range(7, 12):
        assert run.step() == expected.rows(12 * step, 12 * step + 12)
    assert run.cursor == 144
    assert run.loaders[0].samples_delivered == 60, "what is skipped is not delivered"
    for dp in (1, 5, 12):
        again = Run(builder(corpus, **skip), Place(dp, 1))
        again.load(run.state())
        assert again.step() == expected.rows(144, 156)
        with pytest.raises(StateError, match=r"data.skip below the cursor: \[48, 84\) in the checkpoint, nothing now"):
            Run(builder(corpus), Place(dp, 1)).load(run.state())


@pytest.mark.parametrize("skip", [[(320, 345)], [(329, 331)], [(330, 340)], [(300, 331), (331, 340), (650, 700)]])
def test_a_skip_may_span_the_end_of_an_epoch(corpus, skip):
    """K02: the epoch ends at 330."""
    expected = expected_stream(corpus)
    kept = [n for n in range(900) if not any(a <= n < b for a, b in skip)]
    run = Run(builder(corpus, skip=skip), Place(5, 2))
    for step in range(60):
        numbers = kept[12 * step : 12 * step + 12]
        assert run.step() == [expected[n] for n in numbers]
        assert run.cursor == numbers[-1] + 1
        if step % 9 == 8:
            state = run.state()
            run = Run(builder(corpus, skip=skip), Place(1 + step % 4, 3))
            run.load(state)


def test_a_skip_at_the_very_start_and_one_of_a_single_sample(corpus):
    run = Run(builder(corpus, skip=[(0, 100), (105, 106)]), Place(2, 6))
    expected = expected_stream(corpus)
    assert run.cursor == 0
    assert run.step() == expected.rows(100, 105) + expected.rows(106, 113)
    assert run.cursor == 113


def test_a_cursor_may_stand_in_a_skip(corpus):
    """As when a skip is moved, or the run was begun there."""
    run = Run(builder(corpus, skip=[(40, 100)]), Place(2, 6))
    for loader in run.loaders:
        loader.seek(60)
    assert run.step() == expected_stream(corpus).rows(100, 112)


@pytest.mark.parametrize("skip, left", [([(320, 340)], 320), ([(0, 330)], 0), ([(0, 10**15)], 0), ([(325, 330)], 325)])
@pytest.mark.parametrize("place", [Place(1, 12), Place(5, 2), Place(12, 1)])
def test_a_skip_over_the_end_of_finite_data_ends_it_earlier(corpus, skip, left, place):
    run = Run(builder(corpus, skip=skip, infinite=False), place)
    expected = [row for n, row in enumerate(expected_stream(corpus).rows(0, 330)) if n < left]
    rows = []
    while step := run.step():
        rows += step
    assert rows == expected
    assert run.loaders[0].steps_left(run.cursor) == 0


def test_skips_of_a_mixture_change_no_other_sample_s_number(tmp_path):
    made = make_sources(tmp_path, web=D60, code=[9] * 20)
    settings = {"weights": {"web": 0.7, "code": 0.3}, "stages": [(50, {"code": 1})]}
    expected = expected_mix(made, **settings)
    run = Run(builder(made, **settings, skip=[(40, 60)]), Place(3, 2))
    rows = [row for _ in range(5) for row in run.step()]
    assert rows == expected.rows(0, 40) + expected.rows(60, 80)


@pytest.mark.parametrize("skip", [[[5]], [[5, 5]], [[9, 5]], [[-1, 5]], [["1", 5]], [[1, 2, 3]], [5], 5, [[0.0, 5]]])
def test_what_is_no_interval_is_refused(skip):
    with pytest.raises(ConfigError, match=r"data\.skip"):
        DataConfig(skip=skip)


def test_the_data_s_seed_alone_makes_the_order(corpus):
    """K04; that the model's seed changes nothing is tested where it is known."""
    orders = [Run(builder(corpus, seed=seed), Place(1, 12)).step() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
