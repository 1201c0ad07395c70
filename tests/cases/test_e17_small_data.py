"""Data smaller than a sample or a batch: row E17 of the known faults of data loaders, and its like."""

import pytest

from tests.corpora import E48, make_corpus
from tests.resume import Place, Run, builder, check_every_stop, check_steps, expected_stream
from zephon_patches.errors import InputError

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("lengths, tokens", [([0], 0), ([0, 0, 0], 0), ([1], 1), ([0, 1, 0], 1)])
def test_data_without_a_pair_of_tokens_is_refused_with_its_counts(tmp_path, lengths, tokens):
    """E17: 0 tokens and 1 token."""
    corpus = make_corpus(tmp_path, lengths, eos=False)
    with pytest.raises(InputError) as error:
        builder(corpus)(Place(1, 1, 1), 0)
    assert f"{tokens} tokens in {len(lengths)} documents" in str(error.value)
    assert "a sample needs two tokens in a row" in str(error.value)


def test_an_empty_file_is_refused(tmp_path):
    corpus = make_corpus(tmp_path, [], eos=False)
    with pytest.raises(InputError, match="0 tokens in 0 documents"):
        builder(corpus)(Place(1, 1, 1), 0)


def test_documents_of_one_token_in_shards_of_their_own_give_no_sample(tmp_path):
    corpus = make_corpus(tmp_path, [1] * 5, eos=False)
    with pytest.raises(InputError, match="5 tokens in 5 documents .* give no sample"):
        builder(corpus, shard_bytes=1)(Place(1, 1, 1), 0)


@pytest.mark.parametrize("tokens, samples", [(2, 1), (8, 1), (9, 1), (10, 2), (17, 2), (18, 3)])
@pytest.mark.parametrize("place", [Place(1, 1, 1), Place(2, 2, 3), Place(5, 1, 5)])
def test_a_few_tokens_wrap_as_stated(tmp_path, tokens, samples, place):
    """E17: 8, 9, 10 and 17 tokens at seq_len 8, with batches below and above the epoch."""
    corpus = make_corpus(tmp_path, [1] * (tokens - 2) + [2], eos=False)
    expected = expected_stream(corpus)
    assert expected.epoch_samples == samples
    check_steps(Run(builder(corpus), place), expected, 7)
    finite = Run(builder(corpus, infinite=False), place)
    rows = []
    while step := finite.step():
        rows += step
    assert rows == expected.rows(0, samples)
    assert finite.cursor == samples


@pytest.mark.parametrize("batch", [50, 100, 480])
def test_a_batch_above_the_epoch_goes_on_into_the_next(tmp_path, batch):
    """E17: 48 samples, steps of 50, 100 and 480."""
    corpus = make_corpus(tmp_path, E48)
    expected = expected_stream(corpus)
    for place in (Place(1, batch, batch), Place(7, 4, batch)):
        check_steps(Run(builder(corpus), place), expected, 3)
    build = builder(corpus)
    check_every_stop(build, Place(2, 10, batch), [Place(3, 10, batch), Place(24, 3, batch)], 3)


@pytest.mark.parametrize("batch", [50, 100])
def test_a_batch_above_finite_data_is_one_short_step(tmp_path, batch):
    corpus = make_corpus(tmp_path, E48)
    run = Run(builder(corpus, infinite=False), Place(25, 1, batch))
    assert run.step() == expected_stream(corpus).rows(0, 48)
    assert run.cursor == 48
    assert run.step() == []


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("shard_bytes", [0, 1, 50])
def test_sequences_of_one_token(tmp_path, eos, shard_bytes):
    corpus = make_corpus(tmp_path, [3, 1, 2, 0, 4], eos)
    order = {"seq_len": 1, "shard_bytes": shard_bytes}
    expected = expected_stream(corpus, **order)
    check_steps(Run(builder(corpus, **order), Place(2, 1, 3)), expected, 12)
    check_every_stop(builder(corpus, **order), Place(1, 3, 3), [Place(3, 1, 3)], 6)


@pytest.mark.parametrize("eos", [True, False])
def test_documents_of_one_token(tmp_path, eos):
    corpus = make_corpus(tmp_path, [1] * 40, eos)
    expected = expected_stream(corpus, seq_len=3)
    assert expected.epoch_samples == (79 if eos else 39) // 3 + (1 if eos else 0)
    check_steps(Run(builder(corpus, seq_len=3), Place(3, 2, 7)), expected, 9)


def test_a_sequence_longer_than_all_data(tmp_path):
    corpus = make_corpus(tmp_path, [3, 2])
    expected = expected_stream(corpus, seq_len=100)
    assert expected.epoch_samples == 1
    check_steps(Run(builder(corpus, seq_len=100), Place(2, 1, 2)), expected, 3)
