"""Pieces of documents: whole where they fit, else cut with an overlap of one token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.samples.plans import as_reference, lengths_lists, numbered
from zephon_patches.samples.pieces import cut_pieces, plan_documents


def test_the_worked_case():
    pieces, left_out = cut_pieces(np.array([3, 10, 1, 5]), 4)
    assert pieces.tolist() == [[0, 3], [3, 5], [7, 5], [11, 2], [14, 5]]
    assert [piece.document for piece in as_reference(pieces, [3, 10, 1, 5])] == [0, 1, 1, 1, 3]
    assert (left_out, pieces.dtype) == (1, np.int64)


@given(lengths_lists, st.integers(1, 12), st.sampled_from([np.int32, np.int64]))
def test_pieces_are_the_reference_s(lengths, seq_len, dtype):
    pieces, left_out = cut_pieces(np.array(lengths, dtype=dtype), seq_len)
    assert as_reference(pieces, lengths) == reference.cut(numbered(lengths), seq_len)
    assert left_out == sum(length < 2 for length in lengths)


@given(lengths_lists, st.integers(1, 12))
def test_a_document_in_each_sample(lengths, seq_len):
    plan = plan_documents(np.array(lengths, dtype=np.int32), seq_len)
    samples = [as_reference(plan.sample(number), lengths) for number in range(plan.num_samples)]
    assert samples == [[piece] for piece in reference.cut(numbered(lengths), seq_len)]
    assert plan.num_labels == sum(max(0, length - 1) for length in lengths)


def test_a_document_as_long_as_the_index_allows_and_offsets_beyond_2_32():
    lengths = np.array([2**31 - 1, 2**31 - 1, 2**31 - 1, 5], dtype=np.int32)
    pieces, _ = cut_pieces(lengths, 2**30)
    assert pieces[-1].tolist() == [3 * (2**31 - 1), 5]
    assert pieces[:, 1].tolist() == [2**30 + 1, 2**30 - 1] * 3 + [5]


@pytest.mark.parametrize(
    ("lengths", "seq_len", "text"),
    [
        ([3, -1], 4, "document 1 has -1 tokens"),
        ([2**31], 4, "document 0 has 2,147,483,648 tokens: expected 0 to 2,147,483,647"),
        ([3], 0, "seq_len = 0: expected 1 to"),
        ([3], 2**31 - 1, "seq_len = 2,147,483,647: expected 1 to 2,147,483,646"),
    ],
)
def test_what_does_not_fit_is_refused(lengths, seq_len, text):
    with pytest.raises(ValueError, match=text):
        cut_pieces(np.array(lengths, dtype=np.int64), seq_len)
