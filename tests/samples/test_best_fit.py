"""Best-fit-decreasing: the reference's rows, every label once, and the same plan for ever."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.samples.plans import as_reference, lengths_lists, numbered
from zephon_patches.keys import hash64
from zephon_patches.samples import best_fit
from zephon_patches.samples.best_fit import plan_best_fit

GOLDEN = (770, 3223, 59, "81e1e39929d4f29c")


def rows_of(plan, lengths) -> list[list[reference.Piece]]:
    return [as_reference(plan.sample(number), lengths) for number in range(plan.num_samples)]


def log_normal(count: int, seed: int = 0) -> np.ndarray:
    """Lengths as those of web pages: a mean of some 700 tokens, and a long tail. Not numpy's, which may change."""
    state, numbers = seed, []
    for _ in range(2 * count):
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        numbers.append(((state >> 11) + 1) / 2**53)
    first, second = np.array(numbers[::2]), np.array(numbers[1::2])
    normal = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
    return np.minimum(np.exp(6 + 1.1 * normal), 10**6).astype(np.int64) + 1


def test_the_worked_case():
    lengths = np.array([7, 6, 5, 5, 4, 3, 3, 3])
    plan = plan_best_fit(lengths, 10)
    assert [[piece.document for piece in row] for row in rows_of(plan, lengths)] == [[0, 2], [1, 3], [4, 5, 6, 7]]
    assert (plan.num_labels, plan.left_out) == (28, 0)


@given(lengths_lists, st.integers(1, 16))
def test_rows_are_those_of_the_simplest_program(lengths, seq_len):
    plan = plan_best_fit(np.array(lengths, dtype=np.int32), seq_len)
    pieces = reference.cut(numbered(lengths), seq_len)
    assert rows_of(plan, lengths) == reference.best_fit(pieces, seq_len)
    assert plan.left_out == sum(length < 2 for length in lengths)


def test_rows_are_those_of_the_simplest_program_at_a_larger_scale():
    for seq_len, lengths in ((64, log_normal(600) % 90), (256, log_normal(400, 1)), (2048, log_normal(400, 2))):
        plan = plan_best_fit(lengths, seq_len)
        assert rows_of(plan, lengths) == reference.best_fit(reference.cut(numbered(lengths.tolist()), seq_len), seq_len)


@given(lengths_lists, st.integers(1, 16))
def test_every_token_of_a_document_but_its_first_is_a_label_exactly_once(lengths, seq_len):
    """Law 3: nothing is lost, repeated, or moved to another place, and no row is too full."""
    documents = numbered(lengths)
    labels: Counter[int] = Counter()
    for row in rows_of(plan_best_fit(np.array(lengths, dtype=np.int32), seq_len), lengths):
        assert 1 <= sum(piece.tokens - 1 for piece in row) <= seq_len
        assert row == sorted(row)
        for document, first, tokens in row:
            own = documents[document]
            # Tokens are numbered from 1, so place p of the shard holds p + 1.
            assert own[0] <= first + 1 and first + tokens <= own[-1]
            labels.update(range(first + 2, first + tokens + 1))
    assert labels == Counter(token for tokens in documents for token in tokens[1:])


@given(lengths_lists, st.integers(1, 16))
def test_a_document_that_fits_is_whole_and_a_longer_one_is_cut_at_full_rows(lengths, seq_len):
    pieces: dict[int, list[int]] = {}
    for row in rows_of(plan_best_fit(np.array(lengths, dtype=np.int32), seq_len), lengths):
        for piece in row:
            pieces.setdefault(piece.document, []).append(piece.tokens - 1)
    for document, places in pieces.items():
        full, rest = divmod(lengths[document] - 1, seq_len)
        assert sorted(places, reverse=True) == [seq_len] * full + [rest] * bool(rest)


@pytest.mark.parametrize("lengths", [[], [0], [1], [1, 0, 1]])
def test_a_shard_without_a_label_has_no_sample(lengths):
    plan = plan_best_fit(np.array(lengths, dtype=np.int32), 8)
    assert (plan.num_samples, len(plan.pieces), plan.num_labels, plan.left_out) == (0, 0, 0, len(lengths))
    assert plan.starts.tolist() == [0]


@pytest.mark.parametrize("seq_len", [1, 7, 65_535, 65_536, 70_000])
def test_many_equal_documents_fill_rows_in_their_order(seq_len):
    plan = plan_best_fit(np.full(70_000, 4, dtype=np.int32), seq_len)
    if seq_len == 1:  # each of its three labels is a piece
        assert plan.num_samples == 210_000
        return
    each = seq_len // 3
    assert np.diff(plan.starts).tolist() == [each] * (70_000 // each) + [70_000 % each] * bool(70_000 % each)
    assert np.array_equal(plan.pieces[:, 0], 4 * np.arange(70_000))


def test_golden_plan():
    # Another value here gives runs with this packing another order of data, so their checkpoints cannot be resumed.
    numbers = hash64(7, np.arange(3000, dtype=np.uint64))  # no float, which might differ elsewhere
    lengths = ((numbers % np.uint64(5000)) >> ((numbers >> np.uint64(32)) % np.uint64(9))).astype(np.int64)
    plan = plan_best_fit(lengths, 2048)
    found = xxhash.xxh3_64_hexdigest(plan.starts.tobytes() + plan.pieces.tobytes())
    assert (plan.num_samples, len(plan.pieces), plan.left_out, found) == GOLDEN


def test_rows_are_almost_full_on_realistic_lengths():
    for seq_len in (2048, 8192):
        plan = plan_best_fit(log_normal(50_000), seq_len)
        assert plan.num_labels / (plan.num_samples * seq_len) > 0.99


def test_the_number_of_moves_depends_on_the_sizes_and_not_on_the_documents():
    """What makes it near-linear: a few moves for each size."""
    for seq_len in (256, 2048):
        for times in (1, 50):
            counts = np.bincount(np.minimum(log_normal(20_000) - 1, seq_len), minlength=seq_len + 1) * times
            counts[0] = 0
            moves, _, _ = best_fit._moves(counts.tolist(), seq_len)
            assert len(moves) < 5 * seq_len


def test_keys_of_any_size_are_sorted_and_equal_ones_stay_in_order():
    for bound in (0, 1, 65_535, 65_536, 2**31, 2**33):
        keys = (np.arange(5000, dtype=np.int64) * 2_654_435_761) % (bound + 1)
        keys[::3] = keys[0]
        assert np.array_equal(best_fit._stable_order(keys, bound), np.argsort(keys, kind="stable"))


def test_packing_needs_no_torch():
    code = (
        "import sys, zephon_patches.samples.plan_file, zephon_patches.samples.packed; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=60)
