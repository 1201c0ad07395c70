"""Ranks meet before they train, in real gloo groups of two processes."""

import json
import os
import time
from datetime import timedelta

import torch.distributed as dist

from tests.ranks import run_ranks
from zephon_patches.loader.state import describe_order
from zephon_patches.titan import agreement
from zephon_patches.titan.agreement import agree_on_order, others_learn_of_failure

ORDER = {
    "packing": "concat",
    "seed": 0,
    "seq_len": 8,
    "shard_bytes": 0,
    "shuffle_shards": 256,
    "sources": [{"name": "web", "data": "d" * 16, "recipe": "r" * 16, "samples": 330, "tokens": 2640}],
    "tokenizer": "t" * 16,
}


def of_rank(rank: int, folder: str, descriptions: list[str], delays: list[float]) -> None:
    # A collective would give up after three seconds.
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    time.sleep(delays[rank])
    result = "agreed"
    try:
        with others_learn_of_failure():
            agree_on_order(descriptions[rank])
        agree_on_order("validation")
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    with open(f"{folder}/{rank}", "w") as file:
        file.write(result)


def run(tmp_path, descriptions: list[str], delays: list[float]) -> list[str]:
    run_ranks(of_rank, len(descriptions), str(tmp_path), descriptions, delays)
    return [(tmp_path / str(rank)).read_text() for rank in range(len(descriptions))]


def test_a_rank_with_other_data_is_refused_with_both_machines_and_the_difference(tmp_path):
    other = json.loads(json.dumps(ORDER))
    other["sources"][0] |= {"tokens": 2000, "data": "e" * 16}
    results = run(tmp_path, [describe_order(ORDER, 12), describe_order(other, 12)], [0, 0])
    assert results[0].startswith("StoreError: another rank could not open its data: rank 1 on ")
    assert "the ranks have different data" in results[0]
    assert results[1].startswith("StoreError: the ranks have different data")
    assert "source web: tokens: 2640 on rank 0 on " in results[1]
    assert "2000 on rank 1 on " in results[1]
    assert "fingerprint" not in results[1]


def test_a_rank_that_is_late_is_waited_for_longer_than_a_collective_would(tmp_path):
    description = describe_order(ORDER, 12)
    assert run(tmp_path, [description] * 2, [0, 5]) == ["agreed", "agreed"]


def of_rank_that_builds(rank: int, folder: str) -> None:
    """Rank 1 dies at once. Rank 2 builds for twice as long as a rank is waited for without a sign of life."""
    agreement._SIGN_SECONDS, agreement._DEAD_SECONDS = 0.1, 2.0
    dist.init_process_group("gloo")
    result = "agreed"
    try:
        with others_learn_of_failure():
            if rank == 1:
                time.sleep(0.5)
                os._exit(0)  # as a kill would end it: nothing is cleaned up
            if rank == 2:
                time.sleep(4)
            agree_on_order("the order")
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    with open(f"{folder}/{rank}", "w") as file:
        file.write(result)


def test_a_rank_that_dies_ends_the_wait_for_stores_and_one_that_builds_does_not(tmp_path):
    run_ranks(of_rank_that_builds, 3, str(tmp_path))
    results = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert results.keys() == {"0", "2"}
    assert results["0"].startswith("StoreError: rank 1 has given no sign of life for ")
    assert results["2"].startswith("StoreError: another rank could not open its data: rank 0 on ")
    assert "rank 1 has given no sign of life" in results["2"]


def test_without_a_process_group_there_is_nothing_to_agree_on():
    agree_on_order("anything")
