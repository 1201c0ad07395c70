"""What a sample's row holds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from zephon_patches.samples.chunking import num_samples
from zephon_patches.samples.sequence import IGNORE_INDEX, PAD_ID, fill_row

JUNK = -7


@given(st.lists(st.integers(1, 60_000), min_size=2, max_size=60), st.integers(1, 12))
def test_rows_are_the_reference_s(tokens, seq_len):
    expected = reference.samples_of_shard(tokens, seq_len)
    for dtype in (np.uint16, np.int32):
        shard = np.array(tokens, dtype=dtype)
        assert int(num_samples(np.array(len(shard)), seq_len)) == len(expected)
        for number, sample in enumerate(expected):
            row = np.full(seq_len + 1, JUNK, dtype=np.int64)
            labels = fill_row(row, shard, number)
            assert tuple(row[:-1].tolist()) == sample.inputs
            assert tuple(row[1 : labels + 1].tolist()) == sample.labels[:labels]
            assert sample.labels[labels:] == (IGNORE_INDEX,) * (seq_len - labels)
            assert 1 <= labels <= seq_len
            assert JUNK not in row


@pytest.mark.parametrize("tokens, expected, labels", [(9, [0, 1, 2, 3, 4], 4), (3, [0, 1, 2, PAD_ID, PAD_ID], 2)])
def test_a_full_and_a_short_row(tokens, expected, labels):
    row = np.full(5, JUNK, dtype=np.int64)
    assert fill_row(row, np.arange(tokens), 0) == labels
    assert row.tolist() == expected


def test_the_last_label_is_the_first_input_of_the_next_sample():
    rows = np.empty((4, 9), dtype=np.int64)
    for number in range(4):
        fill_row(rows[number], np.arange(100, 133), number)
    assert rows[:-1, -1].tolist() == rows[1:, 0].tolist()


def test_the_largest_ids_of_both_types_are_kept():
    for dtype, largest in ((np.uint16, 65_535), (np.int32, 2**31 - 1)):
        row = np.empty(3, dtype=np.int64)
        fill_row(row, np.array([0, largest, 1], dtype=dtype), 0)
        assert row.tolist() == [0, largest, 1]
