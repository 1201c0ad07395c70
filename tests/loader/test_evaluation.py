"""The loader for validation: equal passes, equal numbers of batches, and a mean that hardly depends on the ranks."""

import multiprocessing
import time
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.corpora import D60, make_corpus
from tests.reference import IGNORE
from tests.resume import expected_stream, is_padding, rows_of
from tests.strategies import samples_per_shard
from zephon_patches import build_loader
from zephon_patches.errors import ConfigError, LoaderError, MappingError, StoreError
from zephon_patches.loader.build import build_evaluation_loader
from zephon_patches.loader.collate import MicroBatchReader
from zephon_patches.loader.evaluation import EvaluationLoader
from zephon_patches.mapping import Topology
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.order.shuffle import SourceOrder

pytestmark = pytest.mark.usefixtures("small_blocks")

SAMPLES = 83  # of D60 at seq_len 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d60"), D60)


@pytest.fixture(scope="module")
def expected(corpus):
    return expected_stream(corpus)


def a_loader(corpus, *, dp=1, rank=0, local=5, batches=None, config=None, **delivery) -> EvaluationLoader:
    return build_evaluation_loader(
        corpus.config(**config or {}),
        corpus.tokenizer,
        seq_len=8,
        local_batch_size=local,
        num_batches=batches,
        dp_rank=rank,
        dp_size=dp,
        **delivery,
    )


class Row(NamedTuple):
    source: int
    shard: int
    sample: int
    padding: bool


def pass_of(loader):
    return [rows_of(item) for item in loader]


class Rows:
    """In the place of the reader: an item is its planned rows, and all that were asked for are kept."""

    def __init__(self) -> None:
        self.read_rows: list = []

    def read(self, rows):
        self.read_rows.append(rows)
        return [Row(*row) for row in rows], None


def planned(shards, dp, local, batches=None):
    """The rows of each batch of each rank, without files."""
    order = GlobalOrder([SourceOrder("web", np.array(shards), seed=0, shuffle_shards=3)])
    ranks = []
    for rank in range(dp):
        loader = EvaluationLoader(
            order, Rows(), "", local_batch_size=local, topology=Topology(rank, dp), num_batches=batches
        )
        ranks.append([rows for rows, _ in loader])
        assert len(ranks[-1]) == len(loader)
    return ranks


# --- every pass ---


@pytest.mark.parametrize("delivery", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("batches", [None, 4, 40])
def test_every_pass_reads_the_same_samples_from_number_0(corpus, expected, batches, delivery):
    loader = a_loader(corpus, batches=batches, **delivery)
    first = pass_of(loader)
    rows = [row for batch in first for row in batch if not is_padding(row)]
    assert rows == expected.rows(0, SAMPLES if batches is None else 5 * batches)
    assert pass_of(loader) == first
    # Left in the middle, as by an error, the next pass still starts at 0.
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert pass_of(loader) == first


def test_a_pass_holds_no_state_and_does_not_depend_on_a_training_loader(corpus):
    loader = a_loader(corpus)
    assert not hasattr(loader, "state_dict")
    first = pass_of(loader)
    training = build_loader(
        corpus.config(), corpus.tokenizer, seq_len=8, global_batch_size=12, local_batch_size=12, infinite=True
    )
    batches = iter(training)
    for _, batch in zip(range(9), loader, strict=False):  # by turns, over the epoch's end
        next(batches)
        assert rows_of(batch) == first.pop(0)
    assert training.cursor == 9 * 12


@pytest.mark.parametrize("settings", [{"seed": 3}, {"shuffle_shards": 0}, {"shard_bytes": 900, "shuffle_shards": 1}])
def test_the_order_is_that_of_the_settings(corpus, settings):
    rows = [row for batch in pass_of(a_loader(corpus, config=settings)) for row in batch if not is_padding(row)]
    expected = expected_stream(corpus, **settings)
    assert rows == expected.rows(0, expected.epoch_samples)


# --- a pass over all samples ---


@given(
    shards=samples_per_shard,
    dp=st.integers(1, 24),
    local=st.integers(1, 12),
)
@example(shards=[101], dp=4, local=2)
@example(shards=[1], dp=8, local=3)
@example(shards=[0, 24, 0, 24], dp=4, local=3)
def test_a_whole_pass_reads_every_sample_once_in_as_many_even_batches_on_each_rank(shards, dp, local):
    ranks = planned(shards, dp, local)
    steps = -(-sum(shards) // (dp * local))
    assert {len(batches) for batches in ranks} == {steps}
    real = Counter()
    by_step = [0] * steps
    for batches in ranks:
        for step, rows in enumerate(batches):
            assert len(rows) == local
            kept = [row for row in rows if not row.padding]
            assert rows[: len(kept)] == kept, "padding stands behind the samples"
            real.update((row.shard, row.sample) for row in kept)
            by_step[step] += len(kept)
    assert real == Counter((shard, sample) for shard, size in enumerate(shards) for sample in range(size))
    assert max(by_step) - min(by_step) <= 1
    for step in range(steps):
        of_ranks = [sum(not row.padding for row in batches[step]) for batches in ranks]
        assert max(of_ranks) - min(of_ranks) <= 1


@given(shards=samples_per_shard, dp=st.integers(1, 12), local=st.integers(1, 6))
def test_a_padding_row_repeats_a_sample_of_its_step(shards, dp, local):
    ranks = planned(shards, dp, local)
    for step in range(len(ranks[0])):
        rows = [row for batches in ranks for row in batches[step]]
        real = {(row.shard, row.sample) for row in rows if not row.padding}
        assert {(row.shard, row.sample) for row in rows if row.padding} <= real


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 7, 12, 50])
def test_a_whole_pass_has_each_label_once_and_none_of_a_padding_row(corpus, expected, dp):
    labels = Counter()
    for rank in range(dp):
        for inputs, targets in a_loader(corpus, dp=dp, rank=rank, local=2):
            assert inputs["input"].shape == targets.shape == (2, 8)
            labels.update(targets[targets != IGNORE].tolist())
    assert labels == Counter(label for row in expected.rows(0, SAMPLES) for label in row.labels if label != IGNORE)


def test_fewer_samples_than_ranks_leave_ranks_with_padding_alone():
    ranks = planned([3], dp=8, local=2)
    assert sorted(sum(not row.padding for row in batches[0]) for batches in ranks) == [0] * 5 + [1] * 3


# --- a number of batches ---


@given(shards=samples_per_shard, dp=st.integers(1, 8), local=st.integers(1, 6), batches=st.integers(1, 20))
def test_a_number_of_batches_gives_exactly_them_without_padding(shards, dp, local, batches):
    ranks = planned(shards, dp, local, batches)
    assert {len(found) for found in ranks} == {batches}
    assert not any(row.padding for found in ranks for rows in found for row in rows)
    rows = [row for step in range(batches) for found in ranks for row in found[step]]
    epochs = Counter((row.shard, row.sample) for row in rows)
    whole = dp * local * batches // sum(shards)
    assert set(epochs.values()) <= {whole, whole + 1}, "as many epochs as it takes, each sample once in each"


def test_nothing_is_read_beyond_the_batches():
    # Upstream's validator asks for one more than it uses.
    order = GlobalOrder([SourceOrder("web", np.array([50]), seed=0, shuffle_shards=1)])
    reader = Rows()
    loader = EvaluationLoader(order, reader, "", local_batch_size=2, topology=Topology(0, 1), num_batches=3)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    assert next(iterator, None) is None
    assert len(reader.read_rows) == 3


@pytest.mark.parametrize("batches", [0, -2])
def test_less_than_one_batch_is_refused(corpus, batches):
    with pytest.raises(ConfigError, match=f"num_batches = {batches}: expected at least 1, or None"):
        a_loader(corpus, batches=batches)


@pytest.mark.parametrize(
    "place, text",
    [({"local": 0}, "local_batch_size = 0"), ({"dp": 2, "rank": 2}, "dp_rank = 2 of dp_size = 2")],
)
def test_a_place_that_cannot_be_is_refused(corpus, place, text):
    with pytest.raises(MappingError, match=text):
        a_loader(corpus, **place)


# --- workers ---


@pytest.mark.parametrize("batches", [None, 7])
def test_workers_change_nothing(corpus, batches):
    for rank in range(3):
        place = {"dp": 3, "rank": rank, "batches": batches}
        with_workers = a_loader(corpus, **place, num_workers=2, prefetch_factor=3)
        assert pass_of(with_workers) == pass_of(a_loader(corpus, **place))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="what is patched reaches a fork")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_that_was_replaced_says_so_again_and_again(corpus, monkeypatch, workers):
    # Of persistent workers that are slow nothing is there that was taken for the pass before.
    read = MicroBatchReader.read
    monkeypatch.setattr(MicroBatchReader, "read", lambda self, *given: time.sleep(0.2) or read(self, *given))
    monkeypatch.setattr("zephon_patches.loader.workers._PATIENCE", 0.05)
    settings = {"prefetch_factor": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = a_loader(corpus, num_workers=workers, **settings)
    replaced = iter(loader)
    first = next(replaced)
    again = iter(loader)
    assert rows_of(next(again)) == rows_of(first)
    for _ in range(2):
        with pytest.raises(LoaderError, match="this pass was replaced by a later iter"):
            next(replaced)
    next(again)


@pytest.mark.parametrize("workers", [0, 1])
def test_behind_an_error_a_pass_does_not_look_complete(tmp_path, workers):
    made = make_corpus(tmp_path, D60)
    loader = a_loader(made, num_workers=workers)
    for path in (made.folder / "cache").rglob("*.bin"):
        path.unlink()
    iterator = iter(loader)
    for kind, text in [(StoreError, "cannot be opened"), (LoaderError, "begins anew at sample 0.*cannot be opened")]:
        with pytest.raises(kind, match=text):
            next(iterator)


def test_workers_out_of_range_are_refused(corpus):
    with pytest.raises(ConfigError, match="num_workers = -1: expected at least 0"):
        a_loader(corpus, num_workers=-1)


# --- by how much the number of ranks moves the loss ---

SEQ_LEN = 2048


def reported_losses(samples_of_shards, local, batches, seed=0) -> tuple[list[float], float]:
    """What upstream's validator reports on 1 to 8 ranks, and the mean over all tokens, for random losses of tokens.

    A document's difficulty makes samples differ: sample means are spread by 0.5 around 3, a token's loss by 2.5
    around its sample's mean. The last sample of a shard is filled to a random part.
    """
    random = np.random.default_rng(seed)
    sums, counts = {}, {}
    for shard, size in enumerate(samples_of_shards):
        for sample in range(size):
            tokens = SEQ_LEN if sample < size - 1 else int(random.integers(1, SEQ_LEN + 1))
            counts[shard, sample] = tokens
            sums[shard, sample] = tokens * random.normal(3, 0.5) + random.normal(0, 2.5 * tokens**0.5)
    reported = []
    for dp in range(1, 9):
        means = []
        for step in zip(*planned(samples_of_shards, dp, local, batches), strict=True):
            real = [(row.shard, row.sample) for rows in step for row in rows if not row.padding]
            means.append(sum(sums[row] for row in real) / sum(counts[row] for row in real))
        reported.append(sum(means) / len(means))
    return reported, sum(sums.values()) / sum(counts.values())


def largest_move(reported: list[float]) -> float:
    return max(reported) / min(reported) - 1


@pytest.mark.parametrize("local", [1, 8])
def test_the_loss_of_a_whole_pass_hardly_moves_with_the_number_of_ranks(local):
    moves, errors = [], []
    for seed in range(5):
        reported, mean = reported_losses([250] * 8, local, None, seed)
        moves.append(largest_move(reported))
        errors.append(max(abs(loss / mean - 1) for loss in reported))
    print(
        f"2,000 samples, local batch {local}, steps = -1: dp 1 to 8 moves the loss by at most {max(moves):.1e} of it, "
        f"and it is within {max(errors):.1e} of the mean over tokens"
    )
    assert max(moves) < 1e-3
    assert max(errors) < 1e-3


def test_the_loss_of_some_batches_moves_more_since_other_samples_are_read():
    moves = [largest_move(reported_losses([250] * 8, 8, 10, seed)[0]) for seed in range(5)]
    print(f"2,000 samples, local batch 8, steps = 10: dp 1 to 8 moves the loss by up to {max(moves):.1e} of it")
    assert max(moves) > 5e-3
