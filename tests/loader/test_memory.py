"""Law 5: what a loader and its workers write is the same for little data and for much, and they keep none of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads Linux's /proc")

# 256 KiB a shard: 8 MiB in all, and ten times that.
FEW, MANY, TOKENS = 30, 300, 131_073
DATA = 2 * MANY * TOKENS / 2**20


@pytest.fixture(scope="module")
def grown() -> dict[tuple[int, int], list[float]]:
    """By shards and workers: MiB that this process and the largest worker wrote from the first batch on."""
    cases = [(shards, workers) for workers in (0, 2) for shards in (FEW, MANY)]
    arguments = [[shards, TOKENS, workers, "fork" if workers else None] for shards, workers in cases]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.loader.private_memory", json.dumps(arguments)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    epochs = [case["epoch"] for case in json.loads(ended.stdout)]
    growth = [[last - first for first, last in zip(epoch[0], epoch[-1], strict=True)] for epoch in epochs]
    return dict(zip(cases, growth, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_ten_times_the_data_writes_no_more_memory(grown, workers):
    # Some KiB for each further shard that is mapped, and by chance what a worker shares with this process: its
    # collector of garbage writes to each object. Each worker reads half of the tokens.
    for few, many in zip(grown[FEW, workers], grown[MANY, workers], strict=True):
        assert many - few < DATA / 3, grown


def test_an_epoch_without_workers_leaves_memory_as_it_was(grown):
    assert grown[FEW, 0][0] < 8, grown
