"""``scripts/elastic_nodes.py`` says what happened and finds what is wrong; tests/e2e/test_elastic_nodes.py runs it."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from scripts import elastic_nodes
from zephon_patches.trace.audit import Audit, SegmentReport


def segment(ranks: int, first: int, last: int, repeated: int = 0) -> SegmentReport:
    cursors = (12 * (first - 1), 12 * last)
    return SegmentReport(f"of-{ranks}-from-{first}", ranks, 12, (first, last), cursors, repeated, 0)


def audit_of(*segments: SegmentReport, steps: int = 26, **found) -> Audit:
    values = {"steps": steps, "samples": 12 * steps, "cursors": (0, 12 * steps), **found}
    return Audit(segments=list(segments), **values)


GOOD = (segment(5, 1, 8, 3), segment(3, 6, 11), segment(5, 12, 16), segment(3, 17, 26))
STATUSES = {"a": (-9, -9), "b": (0, 0), "c": (0, 0), "d": (0, 0)}


def test_the_table_says_how_each_start_ended():
    lines = elastic_nodes.table(audit_of(*GOOD), 26).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[1:]] == [
        "lost 3 steps, which were trained again",
        "saved behind step 11",
        "saved behind step 16",
        "complete",
    ]
    assert lines[2].split()[:3] == ["3", "6-11", "60-131"]
    assert "stopped before step 30" in elastic_nodes.table(audit_of(*GOOD), 30)


def test_a_run_as_it_should_be_has_no_problem():
    assert elastic_nodes.problems(audit_of(*GOOD), 26, 12, STATUSES) == []
    # A start at which a machine came late is no problem.
    assert elastic_nodes.problems(audit_of(segment(4, 1, 1), segment(5, 2, 8, 3), *GOOD[1:]), 26, 12, STATUSES) == []


@pytest.mark.parametrize(
    ("audit", "statuses", "found"),
    [
        (audit_of(*GOOD, faults=["x: step 3: no line of rank 1"]), STATUSES, "audit: x: step 3: no line of rank 1"),
        (audit_of(*GOOD, steps=25), STATUSES, "25 steps with 300 samples, from 0 to 300; expected 26 with 312, from 0"),
        (audit_of(*GOOD, samples=311), STATUSES, "26 steps with 311 samples, from 0 to 312; expected 26 with 312"),
        (
            audit_of(GOOD[0], segment(3, 6, 11, 1), *GOOD[2:]),
            STATUSES,
            "steps were lost although nobody was killed, in of-3-from-6",
        ),
        (audit_of(*GOOD[:3]), STATUSES, "the ranks went 5 -> 3 -> 5; expected 5 -> 3 -> 5 -> 3"),
        (audit_of(*GOOD), {**STATUSES, "b": (0, 1)}, "machine b ended with status 1, expected 0"),
    ],
)
def test_each_problem_is_found_and_named(audit, statuses, found):
    (problem,) = elastic_nodes.problems(audit, 26, 12, statuses)
    assert problem.startswith(found)


def test_a_folder_with_other_files_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("three years of work")
    assert elastic_nodes.main(["--out", str(tmp_path)]) == 2
    assert "has other files" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()


@pytest.fixture
def cluster(tmp_path):
    """Of one machine, whose process the test gives."""
    cluster = object.__new__(elastic_nodes.Cluster)
    cluster._folder = tmp_path
    cluster.machines = []
    yield cluster
    for machine in cluster.machines:
        machine.torchrun.kill()
        machine.torchrun.wait()


def machine_of(command: list[str], tmp_path) -> SimpleNamespace:
    return SimpleNamespace(name="a", ranks=1, expected=0, log=tmp_path / "a.log", torchrun=subprocess.Popen(command))


def test_a_machine_that_ends_by_itself_is_said(cluster, tmp_path):
    cluster.machines.append(machine_of(["sh", "-c", "exit 3"], tmp_path))
    with pytest.raises(elastic_nodes.UnexpectedError, match=r"machine a ended with status 3 before .*: see .*a\.log"):
        cluster.until_trained()


def test_a_run_that_does_not_go_on_is_said(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(elastic_nodes, "LONGEST_WAIT", 0.3)
    cluster.machines.append(machine_of(["sleep", "60"], tmp_path))
    with pytest.raises(elastic_nodes.UnexpectedError, match=r"4 steps on 1 ranks: not within 0 s; .*/\*\.log"):
        cluster.until_trained()


def test_what_a_process_started_is_found_with_what_that_started():
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    process = subprocess.Popen([sys.executable, "-c", child])
    try:
        deadline = time.monotonic() + 30
        while not (found := elastic_nodes.descendants(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(found) == 1
    finally:
        for pid in elastic_nodes.descendants(process.pid):
            subprocess.run(["kill", "-9", str(pid)])
        process.wait(30)
    assert elastic_nodes.descendants(process.pid) == []
