"""Which tokens of a shard make which sample."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from zephon_patches.samples.chunking import num_samples, samples_with, span

seq_lens = st.integers(1, 20)


def spans(num_tokens: int, seq_len: int) -> list[tuple[int, int]]:
    return [span(k, seq_len, num_tokens) for k in range(int(num_samples(np.array(num_tokens), seq_len)))]


def test_the_worked_case_of_the_module():
    assert spans(10, 4) == [(0, 5), (4, 9), (8, 10)]


@given(st.integers(0, 200), seq_lens)
def test_each_token_but_the_first_is_a_label_once(num_tokens, seq_len):
    labels = [token for start, stop in spans(num_tokens, seq_len) for token in range(start + 1, stop)]
    assert labels == list(range(1, num_tokens))


@given(st.integers(0, 200), seq_lens)
def test_neighbours_overlap_by_one_token_and_only_the_last_is_short(num_tokens, seq_len):
    cut = spans(num_tokens, seq_len)
    for (_, stop), (start, _) in itertools.pairwise(cut):
        assert start == stop - 1
    for start, stop in cut[:-1]:
        assert stop - start == seq_len + 1
    for start, stop in cut[-1:]:
        assert 2 <= stop - start <= seq_len + 1


@given(st.lists(st.integers(0, 100), max_size=10), seq_lens)
def test_a_shard_has_as_many_samples_as_by_the_reference(sizes, seq_len):
    counts = num_samples(np.array(sizes, dtype=np.int64), seq_len)
    assert counts.dtype == np.int64
    assert counts.tolist() == [len(reference.samples_of_shard(range(size), seq_len)) for size in sizes]


def test_a_shard_of_one_token_or_none_has_no_sample():
    assert num_samples(np.array([0, 1, 2]), 8).tolist() == [0, 0, 1]


def test_offsets_beyond_32_bits_are_exact():
    tokens = np.array([3 * 1_500_000_000], dtype=np.int64)
    count = int(num_samples(tokens, 2048)[0])
    assert count == -(-(4_500_000_000 - 1) // 2048)
    for sample in (2**31 // 2048, 2**32 // 2048, count - 1):
        start, stop = span(sample, 2048, int(tokens[0]))
        assert start == sample * 2048
        assert stop == min(start + 2049, 4_500_000_000)


def test_32_bit_token_counts_do_not_overflow():
    assert num_samples(np.array([2**31 - 1], dtype=np.int32), 1).tolist() == [2**31 - 2]


@given(st.integers(0, 60), st.integers(1, 12), st.data())
def test_the_samples_of_a_document_are_those_that_hold_one_of_its_tokens(tokens, seq_len, data):
    start = data.draw(st.integers(0, tokens))
    stop = data.draw(st.integers(start, tokens))
    number = int(num_samples(np.int64(tokens), seq_len))
    held = [set(range(*span(sample, seq_len, tokens))) for sample in range(number)]
    expected = [sample for sample, inside in enumerate(held) if inside & set(range(start, stop))]
    assert list(samples_with(start, stop, seq_len, tokens)) == expected
