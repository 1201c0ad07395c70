"""Resume at another size: group A of the known faults of data loaders."""

import json

import pytest

from tests.corpora import D240, make_corpus
from tests.resume import Place, Run, builder, check_chain, check_every_stop, check_steps, expected_stream

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d240"), D240)


@pytest.fixture(scope="module")
def build(corpus):
    return builder(corpus)


@pytest.fixture(scope="module")
def expected(corpus):
    return expected_stream(corpus)


def saved_at(build, place: Place, steps: int) -> dict:
    run = Run(build, place)
    for _ in range(steps):
        run.step()
    return run.state()


@pytest.mark.parametrize("dp", [3, 2, 1, 6, 12, 5])
def test_saved_on_4_ranks_goes_on_on_any_number(build, expected, dp):
    """A01: one global position."""
    state = saved_at(build, Place(4, 3), 7)
    assert state["cursor"] == 84
    run = Run(build, Place(dp, 2))
    run.load(state)
    check_steps(run, expected, 25)


def test_what_is_saved_does_not_depend_on_the_number_of_ranks(build):
    """A03: the same content whatever wrote it, with no rank in any key."""
    states = [json.dumps(saved_at(build, Place(dp, 1), 7)) for dp in (1, 2, 3, 4, 6)]
    assert len(set(states)) == 1
    assert "rank" not in states[0]


def test_a_chain_of_ups_and_downs(build, expected):
    """A04: 8 -> 4 -> 2 -> 6 -> 12 -> 8 -> 1 ranks, two steps each."""
    links = [(Place(dp, 3, 24), 2) for dp in (8, 4, 2, 6, 12, 8, 1)]
    assert check_chain(build, links, expected) == 14 * 24


def test_another_global_batch_goes_on_at_the_same_sample(build, expected):
    """A05: 5 steps of 12, then steps of 8 from sample 60."""
    run = Run(build, Place(2, 2, 8))
    run.load(saved_at(build, Place(3, 4), 5))
    assert run.cursor == 60
    assert run.step() == expected.rows(60, 68)
    assert run.state()["cursor"] == 68
    check_steps(run, expected, 40)


def test_a_larger_batch_than_before_allows_more_ranks_at_once(build, expected):
    """A07: as far as it goes without a schedule: 6 steps of 8, then 16 ranks with steps of 16."""
    run = Run(build, Place(16, 1, 16))
    run.load(saved_at(build, Place(4, 2, 8), 6))
    check_steps(run, expected, 5)


@pytest.mark.parametrize("before, after", [(0, 2), (3, 0), (2, 5)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_number_of_workers_is_free(build, expected, before, after):
    """A08: saved with some, loaded with others, none included."""
    run = Run(build, Place(1, 4, 12, after))
    run.load(saved_at(build, Place(1, 4, 12, before), 7))
    assert run.cursor == 84
    check_steps(run, expected, 22)


@pytest.mark.parametrize("dp, local, accumulated", [(4, 3, 1), (2, 3, 2), (1, 1, 12), (3, 2, 2), (12, 1, 1), (6, 1, 2)])
def test_micro_batch_and_accumulation_can_be_traded(build, expected, dp, local, accumulated):
    """A09: the same samples in each step for any dp * m * g = B."""
    run = Run(build, Place(dp, local))
    assert run.loaders[0].micro_batches_per_step == accumulated
    check_steps(run, expected, 28)


def test_any_number_of_ranks_that_divides_the_batch(tmp_path):
    """A12: 5 -> 7 -> 3 -> 2 -> 1 -> 210 ranks on 3,000 documents of one sample each."""
    corpus = make_corpus(tmp_path, [8] * 3000)  # 9 tokens with EOS; in one run of 27,000 they make 3,375 samples
    links = [(Place(dp, 1 if dp == 210 else 21, 210), 1) for dp in (5, 7, 3, 2, 1, 210)]
    assert check_chain(builder(corpus), links, expected_stream(corpus)) == 6 * 210


def test_a_number_of_ranks_that_does_not_divide_the_batch(build):
    """A12, wider: any number up to the batch, at every stop."""
    check_every_stop(build, Place(5, 2), [Place(7, 1), Place(11, 2), Place(9, 3), Place(8, 1), Place(10, 5)], 28)
