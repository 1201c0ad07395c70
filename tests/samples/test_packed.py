"""Rows of packed samples, positions, and boundaries of documents."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.samples.plans import as_reference, lengths_lists, numbered
from zephon_patches.samples.best_fit import plan_best_fit
from zephon_patches.samples.chunking import num_samples, span
from zephon_patches.samples.packed import (
    document_starts,
    fill_positions,
    fill_rows,
    mask_boundaries,
    packed_shard,
    piece_starts,
)
from zephon_patches.samples.pieces import Plan, plan_documents
from zephon_patches.samples.sequence import IGNORE_INDEX, fill_row

JUNK = -7


def junk(*shape: int) -> np.ndarray:
    return np.full(shape, JUNK, dtype=np.int64)


def plan_of(*pieces: tuple[int, int]) -> Plan:
    """Of one sample."""
    return Plan(np.array([0, len(pieces)]), np.array(pieces, dtype=np.int64), 0)


def test_the_worked_case():
    inputs, labels, positions = junk(1, 6), junk(1, 6), junk(6)
    plan = plan_of((0, 3), (4, 3))
    shard = packed_shard(np.array([1, 2, 3, 0, 7, 8, 9], dtype=np.uint16), plan)
    assert fill_rows(inputs, labels, [(shard, 0)]) == [4]
    fill_positions(positions, piece_starts(plan.sample(0)))
    assert inputs.tolist() == [[1, 2, 7, 8, 0, 0]]
    assert labels.tolist() == [[2, 3, 8, 9, IGNORE_INDEX, IGNORE_INDEX]]
    assert positions.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("planner", [plan_best_fit, plan_documents])
@given(lengths=lengths_lists, seq_len=st.integers(1, 12), dtype=st.sampled_from([np.uint16, np.int32]))
def test_rows_and_positions_are_the_reference_s(planner, lengths, seq_len, dtype):
    stream = [token for tokens in numbered(lengths) for token in tokens]
    tokens = np.array(stream, dtype=dtype)
    plan = planner(np.array(lengths, dtype=np.int32), seq_len)
    shard = packed_shard(tokens, plan)
    total = 0
    numbers = list(range(plan.num_samples))
    for batch in (numbers[start : start + 3] for start in numbers[::3]):
        inputs, labels = junk(len(batch), seq_len), junk(len(batch), seq_len)
        counts = fill_rows(inputs, labels, [(shard, number) for number in batch])
        for number, *row, count in zip(batch, inputs.tolist(), labels.tolist(), counts, strict=True):
            pieces = as_reference(plan.sample(number), lengths)
            expected = reference.sample_of_pieces(stream, pieces, seq_len)
            assert reference.Sample(*map(tuple, row)) == expected
            assert count == sum(label != IGNORE_INDEX for label in expected.labels)
            positions = junk(seq_len)
            fill_positions(positions, piece_starts(plan.sample(number)))
            runs = [*(piece.tokens - 1 for piece in pieces), seq_len - count]
            assert positions.tolist() == [place for run in runs for place in range(run)]
            total += count
    assert total == sum(max(0, length - 1) for length in lengths)


def test_rows_of_shards_of_both_types_in_one_batch_keep_the_largest_ids():
    inputs, labels = junk(2, 2), junk(2, 2)
    shards = [np.array([0, 65_535, 1], dtype=np.uint16), np.array([2**31 - 1, 0, 2**31 - 1], dtype=np.int32)]
    assert fill_rows(inputs, labels, [(packed_shard(tokens, plan_of((0, 3))), 0) for tokens in shards]) == [2, 2]
    assert inputs.tolist() == [[0, 65_535], [2**31 - 1, 0]]
    assert labels.tolist() == [[65_535, 1], [0, 2**31 - 1]]


@pytest.mark.parametrize("pieces", [[(3, 3)], [(0, 7)], [(0, 5), (0, 3)], [(2**62, 3)], [(0, 2**62)], [(-7, 3)]])
def test_a_piece_outside_the_shard_or_the_row_is_not_cut_in_silence(pieces):
    with pytest.raises(ValueError):
        fill_rows(junk(1, 4), junk(1, 4), [(packed_shard(np.arange(5, dtype=np.uint16), plan_of(*pieces)), 0)])


def read_concat(lengths, seq_len, sample):
    """One sample of a ``concat`` shard whose tokens are their places: inputs, masked labels, positions, starts."""
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    row, positions = junk(seq_len + 1), junk(seq_len)
    count = fill_row(row, tokens, sample)
    first, stop = span(sample, seq_len, len(tokens))
    pointers = 2 * (np.cumsum(lengths) - lengths).astype(np.int64)
    starts = document_starts(pointers, 2, first, stop)
    labels = row[1:].copy()
    labels[count:] = IGNORE_INDEX
    masked = mask_boundaries(labels, starts)
    fill_positions(positions, [*starts.tolist(), stop - first])
    return row[:-1], labels, positions, masked


@given(lengths_lists.filter(lambda lengths: sum(lengths) > 1), st.integers(1, 12))
def test_labels_of_masked_concat_are_each_token_of_a_document_but_its_first_once(lengths, seq_len):
    documents = [[token - 1 for token in tokens] for tokens in numbered(lengths)]
    document_of = {token: number for number, tokens in enumerate(documents) for token in tokens}
    seen = []
    for sample in range(int(num_samples(np.array(sum(lengths)), seq_len))):
        inputs, labels, positions, masked = read_concat(lengths, seq_len, sample)
        valid = labels != IGNORE_INDEX
        assert all(document_of[a] == document_of[b] for a, b in zip(inputs[valid], labels[valid], strict=True))
        assert np.array_equal(labels[valid], inputs[valid] + 1)
        seen += labels[valid].tolist()
        # Positions: from the document's first token in this sample.
        first, stop = span(sample, seq_len, sum(lengths))
        places = range(first, min(stop, first + seq_len))
        expected = []
        for _, run in itertools.groupby(places, key=document_of.__getitem__):
            expected += range(len(list(run)))
        expected += range(seq_len - len(expected))
        assert positions.tolist() == expected
        boundaries = [token for token in range(first + 1, stop) if documents[document_of[token]][0] == token]
        assert masked == len(boundaries)
    assert seen == [token for tokens in documents for token in tokens[1:]]


def test_boundaries_are_masked_inside_and_at_the_edge_of_a_sample():
    # Documents begin at 0, 3 and 6; with seq_len 3 the label before token 3 is the last of sample 0.
    assert read_concat([3, 3, 4], 3, 0)[1].tolist() == [1, 2, IGNORE_INDEX]
    assert read_concat([3, 3, 4], 3, 1)[1].tolist() == [4, 5, IGNORE_INDEX]
    assert read_concat([3, 3, 4], 3, 2)[1].tolist() == [7, 8, 9]
    assert read_concat([2, 0, 0, 2, 3], 4, 0)[1].tolist() == [1, IGNORE_INDEX, 3, IGNORE_INDEX]


def test_starts_are_found_without_reading_the_index():
    """A mapped index is only looked up: any other use of these would raise."""

    class Pointers:
        looks = 0

        def __len__(self):
            return 10**12

        def __getitem__(self, place):
            if isinstance(place, slice):
                return np.arange(place.start, place.stop, dtype=np.int64) * 100
            self.looks += 1
            return place * 100

    pointers = Pointers()
    assert document_starts(pointers, 2, 50 * 10**11 + 1, 50 * 10**11 + 120).tolist() == [49, 99]
    assert pointers.looks < 100


def test_starts_come_from_an_index_mapped_at_an_odd_place():
    data = b"x" * 5 + np.array([0, 6, 6, 10], dtype="<i8").tobytes()
    pointers = np.frombuffer(data, "<i8", 4, 5)
    assert document_starts(pointers, 2, 1, 6).tolist() == [2, 2, 4]
    assert document_starts(pointers, 2, 0, 3).tolist() == [0]
    assert document_starts(pointers, 2, 6, 9).tolist() == []


@given(st.lists(st.integers(-3, 20), max_size=6), st.integers(1, 15))
def test_positions_count_from_each_start(starts, seq_len):
    positions = junk(seq_len)
    fill_positions(positions, sorted(starts))
    expected, count = [], 0
    for place in range(seq_len):
        count = 0 if place in starts else count
        expected.append(count)
        count += 1
    assert positions.tolist() == expected
    assert positions.max() < seq_len
