"""Packing, labels, positions: what a sample holds."""

from itertools import pairwise

import numpy as np
import pytest

from tests.corpora import make_corpus
from tests.resume import Place, builder
from tests.samples.plans import numbered
from tests.samples.test_packed import junk, read_concat
from zephon_patches.samples.best_fit import plan_best_fit
from zephon_patches.samples.packed import fill_positions, fill_rows, packed_shard, piece_starts
from zephon_patches.samples.pieces import Plan, plan_documents
from zephon_patches.samples.sequence import IGNORE_INDEX


def read_packed(plan: Plan, documents: list[list[int]], seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All samples of a shard: inputs, labels and positions, each of shape ``(samples, seq_len)``."""
    tokens = np.array([token for ids in documents for token in ids], dtype=np.uint16)
    inputs, labels, positions = (junk(plan.num_samples, seq_len) for _ in range(3))
    shard = packed_shard(tokens, plan)
    fill_rows(inputs, labels, [(shard, number) for number in range(plan.num_samples)])
    for number in range(plan.num_samples):
        fill_positions(positions[number], piece_starts(plan.sample(number)))
    return inputs, labels, positions


@pytest.mark.parametrize("planner", [plan_best_fit, plan_documents])
def test_f01_every_label_is_the_next_token_of_its_input_s_document(planner):
    """F01: lengths 3 4 2 6, seq_len 5; each (input, label) pair is looked up."""
    lengths = [3, 4, 2, 6]
    documents = numbered(lengths)
    pairs = {pair for ids in documents for pair in pairwise(ids)}
    inputs, labels, _ = read_packed(planner(np.array(lengths), 5), documents, 5)
    valid = labels != IGNORE_INDEX
    found = list(zip(inputs[valid].tolist(), labels[valid].tolist(), strict=True))
    assert len(found) == len(set(found)) == 2 + 3 + 1 + 5
    assert set(found) == pairs


def test_f05_positions_restart_at_each_document_and_where_one_goes_on_in_the_next_sample():
    """F05: lengths 3 4 2 6 with EOS, seq_len 5: token 3 is EOS of the first, and so on."""
    lengths = [4, 5, 3, 7]
    assert read_concat(lengths, 5, 0)[2].tolist() == [0, 1, 2, 3, 0]
    assert read_concat(lengths, 5, 1)[2].tolist() == [0, 1, 2, 3, 0]  # the second document goes on, from 0
    assert read_concat(lengths, 5, 2)[2].tolist() == [0, 1, 0, 1, 2]
    assert read_concat(lengths, 5, 3)[2].tolist() == [0, 1, 2, 3, 0]  # the last place is padding
    # Packed, the last one is cut into a full piece and a remainder, which starts at 0 as well.
    _, labels, positions = read_packed(plan_best_fit(np.array(lengths), 5), numbered(lengths), 5)
    assert positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]
    assert labels.tolist() == [[14, 15, 16, 17, 18], [6, 7, 8, 9, 19], [2, 3, 4, 11, 12]]


@pytest.mark.parametrize("lengths", [[3, 3, 3], [4, 1, 0, 9, 2, 2, 20]])
def test_f08_positions_give_a_mask_in_which_no_document_sees_another(lengths):
    """F08: the block-causal mask from the batch alone, seq_len 8."""
    documents = numbered(lengths)
    document_of = {token: number for number, ids in enumerate(documents) for token in ids}
    inputs, labels, positions = read_packed(plan_best_fit(np.array(lengths), 8), documents, 8)
    for row in range(len(inputs)):
        blocks = np.cumsum(positions[row] == 0)
        for query in np.flatnonzero(labels[row] != IGNORE_INDEX):
            seen = inputs[row, : query + 1][blocks[: query + 1] == blocks[query]].tolist()
            # Of its own document, from the piece's first token on, and nothing else.
            assert {document_of[token] for token in seen} == {document_of[inputs[row, query]]}
            assert seen == list(range(seen[0], inputs[row, query] + 1))


@pytest.mark.parametrize("planner", [plan_best_fit, plan_documents])
def test_f11_no_token_is_lost_and_what_is_left_out_is_counted(planner):
    """F11: [1..5], [6, 7], [8..10], [11] at seq_len 4; the document of one token has no label."""
    lengths = [5, 2, 3, 1]
    plan = planner(np.array(lengths), 4)
    _, labels, _ = read_packed(plan, numbered(lengths), 4)
    assert sorted(labels[labels != IGNORE_INDEX].tolist()) == [2, 3, 4, 5, 7, 9, 10]
    assert plan.left_out == 1


def test_f03_rows_are_exactly_seq_len_and_the_last_label_is_the_next_sample_s_first_input(tmp_path):
    """F03: seq_len 8; 20 documents of 10 tokens make 199 labels."""
    corpus = make_corpus(tmp_path, [9] * 20)
    loader = builder(corpus, shuffle_shards=0, infinite=False)(Place(1, 1, 1), 0)
    items = [(inputs["input"], labels) for inputs, labels in loader]
    assert len(items) == 25
    assert {(inputs.shape, labels.shape) for inputs, labels in items} == {((1, 8), (1, 8))}
    for (inputs, labels), (following, _) in pairwise(items):
        assert labels[0, :-1].tolist() == inputs[0, 1:].tolist()
        assert labels[0, -1] == following[0, 0]
