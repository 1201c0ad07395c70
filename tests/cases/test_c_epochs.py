"""Epoch boundaries: group C of the known faults of data loaders."""

import subprocess
import sys
from collections import Counter

import pytest

from tests.corpora import E48, make_corpus
from tests.resume import Place, Run, builder, check_every_stop, check_steps, expected_stream, uninterrupted

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("e48"), E48)


@pytest.fixture(scope="module")
def build(corpus):
    return builder(corpus)


@pytest.fixture(scope="module")
def expected(corpus):
    stream = expected_stream(corpus)
    assert stream.epoch_samples == 48
    return stream


def test_a_state_saved_at_the_end_of_an_epoch_goes_on_with_the_next(build, expected):
    """C01: N = 48 means epoch 1, sample 0."""
    run = Run(build, Place(1, 12))
    check_steps(run, expected, 4)
    state = run.state()
    assert state["cursor"] == 48
    resumed = Run(build, Place(3, 4))
    resumed.load(state)
    assert resumed.state() == state
    assert resumed.step() == expected.rows(48, 60)


@pytest.mark.parametrize("steps", [4, 5, 9, 15])
def test_a_resume_works_after_any_number_of_epochs(build, expected, steps):
    """C02: saved in epochs 1, 1, 2 and 3."""
    run = Run(build, Place(2, 6))
    check_steps(run, expected, steps)
    resumed = Run(build, Place(4, 3))
    resumed.load(run.state())
    check_steps(resumed, expected, 9)


def test_a_resume_at_each_step_of_three_epochs(build):
    """C02, wider."""
    check_every_stop(build, Place(3, 2), [Place(1, 12), Place(4, 3), Place(5, 1)], 13)


def test_each_epoch_has_its_own_order_and_a_run_may_exceed_one(build):
    """C04: 11 steps on an epoch of 4."""
    rows = uninterrupted(build, 11)
    assert len(rows) == 132
    first, second = rows[:48], rows[48:96]
    assert first != second
    assert sorted(first) == sorted(second)
    run = Run(build, Place(1, 4))
    run.load({**run.state(), "cursor": 60})
    check_steps(run, rows, 6)


PROGRAM = """
import sys
from pathlib import Path
from tests.corpora import make_corpus
from tests.resume import Place, Run, builder
files, documents, infinite = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "infinite"
corpus = make_corpus(Path(sys.argv[1]), [7] * documents, files=files)
run = Run(builder(corpus, infinite=infinite), Place(2, 2, 4))
print(sum(len(run.step()) for _ in range(50)))
"""


@pytest.mark.parametrize(
    "files, documents, mode, delivered",
    [(2, 10, "infinite", 200), (1, 1, "infinite", 200), (2, 10, "finite", 10), (1, 1, "finite", 1)],
)
def test_a_few_documents_wrap_or_stop_but_never_spin(tmp_path, files, documents, mode, delivered):
    """C07: 50 steps on 2 files of 5 documents, and on 1 file of 1; one that spins never ends."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(files), str(documents), mode],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == f"{delivered}\n"


def test_the_tail_of_an_epoch_is_neither_lost_nor_padded_over(tmp_path):
    """C08: 101 samples, 4 ranks, steps of 8: over 8 epochs each comes 8 times, and once in each epoch."""
    corpus = make_corpus(tmp_path, [8] * 101, eos=False)  # 808 tokens, so 807 labels in 101 samples
    run = Run(builder(corpus), Place(4, 2, 8))
    rows = [row for _ in range(101) for row in run.step()]
    assert len(rows) == 808
    assert Counter(Counter(rows).values()) == {8: 101}
    for epoch in range(8):
        assert len(set(rows[epoch * 101 : (epoch + 1) * 101])) == 101


def test_the_tail_of_a_number_of_epochs_comes_as_often(tmp_path):
    """C08: the same data, eight epochs and then the end."""
    corpus = make_corpus(tmp_path, [8] * 101, eos=False)
    run = Run(builder(corpus, epochs=8), Place(4, 2, 9))
    steps = []
    while step := run.step():
        steps.append(step)
    assert [len(step) for step in steps] == [9] * 89 + [7]
    assert Counter(Counter(row for step in steps for row in step).values()) == {8: 101}


def test_the_tail_of_finite_data_comes_once(tmp_path):
    """C08: the same data, one epoch."""
    corpus = make_corpus(tmp_path, [8] * 101, eos=False)
    run = Run(builder(corpus, infinite=False), Place(4, 2, 8))
    rows = []
    while step := run.step():
        rows += step
    assert len(rows) == len(set(rows)) == 101
