"""Position right after a resume: group B of the known faults of data loaders."""

import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.corpora import D240, E48, make_corpus
from tests.resume import (
    Place,
    Run,
    builder,
    check_chain,
    check_every_stop,
    check_steps,
    expected_stream,
    uninterrupted,
)

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d240"), D240)


@pytest.fixture(scope="module")
def build(corpus):
    return builder(corpus)


@pytest.fixture(scope="module")
def expected(corpus):
    return expected_stream(corpus)


def test_every_save_after_a_resume_has_moved_on(build, expected):
    """B01: four cycles of three steps; N = 36, 72, 108, 144."""
    state, cursors = None, []
    for _ in range(4):
        run = Run(build, Place(2, 3))
        if state:
            run.load(state)
        check_steps(run, expected, 3)
        state = run.state()
        cursors.append(state["cursor"])
    assert cursors == [36, 72, 108, 144]


PROGRAM = """
import json, sys
from pathlib import Path
from tests.corpora import D240, Corpus
from tests.resume import Place, Run, builder
run = Run(builder(Corpus(Path(sys.argv[1]), D240, True)), Place(1, 4))
if sys.argv[2]:
    run.load(json.loads(sys.argv[2]))
rows = [row for _ in range(3) for row in run.step()]
print(json.dumps([rows, run.state()]))
"""


def test_a_new_process_goes_on_where_the_old_one_stopped(corpus, expected):
    """B01: the same with a process of its own, with other hash seeds, for each cycle."""
    import json

    state, rows = "", []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(corpus.folder), state],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        more, state = json.loads(done.stdout)
        rows += [tuple(map(tuple, row)) for row in more]
        state = json.dumps(state)
    assert rows == expected.rows(0, 72)


def test_loading_and_looking_never_move_the_cursor(build, expected):
    """B03: load, iter and state leave 36; one batch makes it 48."""
    run = Run(build, Place(1, 12))
    run.load({**run.state(), "cursor": 36})
    assert run.state()["cursor"] == 36
    run.start()
    assert run.state()["cursor"] == 36
    check_steps(run, expected, 1)
    assert run.state()["cursor"] == 48


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 2])
def test_a_load_after_iter_takes_effect_at_once(build, expected, workers, taken):
    """B04: with no item taken, and with two steps taken."""
    run = Run(build, Place(1, 4, 12, workers))
    run.start()
    check_steps(run, expected, taken)
    run.load({**run.state(), "cursor": 84})
    assert run.state()["cursor"] == 84
    check_steps(run, expected, 3)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_what_was_read_ahead_is_neither_counted_nor_lost(corpus, expected):
    """B05: prefetch 8, three workers that have time to run ahead."""
    run = Run(builder(corpus, loader={"prefetch_factor": 8}), Place(1, 12, 12, 3))
    for _ in range(5):
        check_steps(run, expected, 1)
        time.sleep(0.05)
    assert run.state()["cursor"] == 60
    resumed = Run(builder(corpus), Place(3, 2))
    resumed.load(run.state())
    check_steps(resumed, expected, 20)


@pytest.mark.parametrize("shuffle_shards", [0, 2, 256])
def test_a_resume_at_any_step_of_shuffled_data_loses_and_repeats_nothing(corpus, shuffle_shards):
    """B07: there is no buffer outside the state."""
    build = builder(corpus, shuffle_shards=shuffle_shards, shard_bytes=3000)
    check_every_stop(build, Place(2, 3), [Place(1, 12), Place(3, 4), Place(4, 1), Place(5, 5)], 30)


def test_documents_that_do_not_fit_a_sample_are_not_in_flight(tmp_path):
    """B08: uneven documents, one sample a step, saved after each."""
    corpus = make_corpus(tmp_path, [5, 9, 3, 20, 1, 8, 8, 2])
    build = builder(corpus)
    check_every_stop(build, Place(1, 1, 1), [Place(1, 1, 1), Place(1, 2, 1)], 20)
    run = Run(build, Place(1, 1, 1))
    check_steps(run, expected_stream(corpus), 20)


def test_accumulated_micro_batches_are_all_counted(build, expected):
    """B10: dp 3, m 1, g 4; saved at step 5; resumed with dp 2, m 1, g 6."""
    assert check_chain(build, [(Place(3, 1), 5), (Place(2, 1), 20)], expected) == 300


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_state_is_full_at_birth_and_right_after_a_resume(build, expected):
    """B14: four workers; load, one batch, save, twice."""
    state = Run(build, Place(1, 4, 12, 4)).state()
    assert state["cursor"] == 0
    for cursor in (0, 12, 24):
        run = Run(build, Place(1, 4, 12, 4))
        run.load(state)
        assert run.state() == state
        check_steps(run, expected, 1)
        state = run.state()
        assert state["cursor"] == cursor + 12


def test_a_stop_in_the_second_epoch_resumes_in_the_second_epoch(tmp_path):
    """B15: E48 has four steps an epoch; saved at step 6; all global seeds differ between the runs."""
    corpus = make_corpus(tmp_path, E48)
    build = builder(corpus)
    expected = uninterrupted(build, 12)

    def seed(value: int) -> None:
        torch.manual_seed(value)
        np.random.seed(value)
        random.seed(value)

    seed(1)
    run = Run(build, Place(2, 3))
    check_steps(run, expected, 6)
    seed(2)
    resumed = Run(build, Place(4, 3))
    resumed.load(run.state())
    assert resumed.cursor == 72
    check_steps(resumed, expected, 6)
    assert expected[72:96] != expected[24:48]
