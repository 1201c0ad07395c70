"""Ranks agree, and validation: group J of the known faults of data loaders."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.corpora import D60, make_corpus
from tests.reference import IGNORE
from tests.resume import Place, Run, builder, expected_stream, is_padding, rows_of
from tests.titan.jobs import BATCH, SEQ_LEN, job
from torchtitan.distributed import ParallelDims
from torchtitan.hf_datasets.text_datasets import build_text_dataloader, build_text_validation_dataloader

pytestmark = pytest.mark.usefixtures("small_blocks")

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d60"), D60)


@pytest.fixture(scope="module")
def expected(corpus):
    return expected_stream(corpus)


def batch_mesh(rank: int, world_size: int, **degrees: int) -> tuple[int, int]:
    """Size and rank in the batch mesh, as the trainer asks TorchTitan for them; the other processes are not there."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        sizes = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1, **degrees}
        dims = ParallelDims(**sizes, world_size=world_size)
        if not dims.dp_enabled:
            return 1, 0
        mesh = dims.get_mesh("batch")
        return mesh.size(), mesh.get_local_rank()
    finally:
        dist.destroy_process_group()


def first_step(loader) -> list:
    items = iter(loader)
    return [row for _ in range(loader.micro_batches_per_step) for row in rows_of(next(items))]


@pytest.mark.parametrize(
    "degrees, dp_size",
    [
        ({"tp": 2, "cp": 2}, 2),
        ({"pp": 2, "tp": 2}, 2),
        ({"pp": 2, "cp": 2}, 2),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 4),
        ({"dp_replicate": 2, "cp": 2}, 4),
        ({"ep": 4}, 8),
        ({"tp": 8}, 1),
        ({"pp": 2, "tp": 2, "cp": 2}, 1),
    ],
    ids=str,
)
def test_peers_have_equal_batches_and_data_parallel_ranks_have_others(corpus, expected, monkeypatch, degrees, dp_size):
    """J01: 8 processes in TorchTitan's own meshes, among them dp 2 x tp 2 x cp 2."""
    steps: dict[int, list] = {}
    peers = Counter()
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        size, batch_rank = batch_mesh(rank, 8, **degrees)
        assert size == dp_size
        rows = first_step(build_text_dataloader(size, batch_rank, None, job(corpus)))
        assert steps.setdefault(batch_rank, rows) == rows
        peers[batch_rank] += 1
    assert set(peers.values()) == {8 // dp_size}
    rows = [row for _, rows in sorted(steps.items()) for row in rows if not is_padding(row)]
    assert rows == expected.rows(0, BATCH)  # so no sample is on two data-parallel ranks


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rank_among_all_processes_changes_nothing(corpus, expected, monkeypatch, workers):
    """J03: RANK 0 to 7 with the same place in the batch mesh, with workers too."""
    for number in (0, 3, 7):
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("LOCAL_RANK", str(number))
        run = Run(builder(corpus), Place(2, 3, workers=workers))
        assert run.step_by_rank() == [expected.rows(0, 6), expected.rows(6, 12)]


PROCESS = """
import json, sys
from tests.corpora import D60, Corpus
from tests.resume import Place, builder, rows_of
from pathlib import Path
loader = builder(Corpus(Path(sys.argv[1]), D60, True))(Place(4, 3), int(sys.argv[2]))
items = iter(loader)
print(json.dumps([rows_of(next(items)) for _ in range(8)]))
"""


def test_processes_agree_on_the_order_though_no_seed_is_set(corpus, expected):
    """J05: 4 processes, in each of which Python hashes otherwise; the default seed is 0."""
    assert corpus.config().seed == 0
    next(iter(builder(corpus)(Place(1, 12), 0)))  # builds the store
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(corpus.folder), str(rank)],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1), "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    outputs = [json.loads(process.communicate(timeout=100)[0]) for process in processes]
    for step in range(8):  # over the epoch's end at 83
        rows = [tuple(map(tuple, row)) for output in outputs for row in output[step]]
        assert rows == expected.rows(12 * step, 12 * step + 12)


def test_one_epoch_of_shuffled_ranks_is_disjoint_and_complete(corpus, expected):
    """J06: one permutation for all 4 ranks."""
    run = Run(builder(corpus, infinite=False, seed=11), Place(4, 2))
    ranks: list[list] = [[], [], [], []]
    while any(step := run.step_by_rank()):
        for rank, rows in zip(ranks, step, strict=True):
            rank += rows
    everything = [row for rank in ranks for row in rank]
    assert len(set(everything)) == len(everything) == 83
    assert sorted(everything) == sorted(expected.rows(0, 83))
    assert all(rank != sorted(rank) for rank in ranks), "each rank's part is shuffled"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 7, 8])
def test_validation_over_the_whole_set_has_as_many_batches_on_each_rank(tmp_path, dp_size):
    """J07: 101 samples, batches of 2; every sample is counted once, padding is marked."""
    samples = make_corpus(tmp_path, [7] * 100 + [8])
    config = job(samples, validation__steps=-1, validation__local_batch_size=2, validation__seq_len=SEQ_LEN)
    config.data.validation_sources = config.data.sources
    passes = []
    for rank in range(dp_size):
        loader = build_text_validation_dataloader(dp_size, rank, None, config, infinite=False)
        passes.append([rows_of(item) for item in loader])
        assert [rows_of(item) for item in loader] == passes[-1]
    assert {len(batches) for batches in passes} == {-(-101 // (2 * dp_size))}
    rows = [row for batches in passes for batch in batches for row in batch]
    real = [row for row in rows if not is_padding(row)]
    assert len(real) == 101
    assert Counter(real) == Counter(expected_stream(samples).rows(0, 101))
    assert all(set(row.labels) == {IGNORE} for row in rows if is_padding(row))


def test_all_ranks_change_epoch_in_the_same_step_though_documents_are_sorted_by_length(tmp_path):
    """J10: documents of 1 to 60 tokens in this order, on 4 ranks."""
    rising = make_corpus(tmp_path, list(range(1, 61)))
    for shuffle_shards in (0, 256):
        stream = expected_stream(rising, shuffle_shards=shuffle_shards)
        assert stream.epoch_samples == 237  # step 19 takes 228 to 239
        run = Run(builder(rising, shuffle_shards=shuffle_shards), Place(4, 3))
        seen: set = set()
        for step in range(40):
            ranks = run.step_by_rank()
            assert [len(rows) for rows in ranks] == [3, 3, 3, 3]
            repeated = [sum(row in seen for row in rows) for rows in ranks]
            if step < 19:
                assert repeated == [0, 0, 0, 0]
            elif step > 19:
                assert repeated == [3, 3, 3, 3]
            else:
                assert sum(repeated) == 3
            seen.update(row for rows in ranks for row in rows)
        assert len(seen) == 237
