"""The comparison of the elastic demo: it accepts equal runs of any topologies and notices each kind of difference."""

import importlib.util
import json
from pathlib import Path

import pytest

from scripts import elastic_demo

GLOBAL_BATCH = 6


def write(folder: Path, ranks_of_steps: list[int], rows=lambda number: f"row {number}", loss=lambda step: 8 / step):
    """Records of a run: step k, on ``ranks_of_steps[k - 1]`` ranks, takes the next samples."""
    folder.mkdir()
    for index, ranks in enumerate(ranks_of_steps):
        first = index * GLOBAL_BATCH
        for rank in range(ranks):
            part = range(first + rank * GLOBAL_BATCH // ranks, first + (rank + 1) * GLOBAL_BATCH // ranks)
            line = {
                "step": index + 1,
                "ranks": ranks,
                "dp_rank": rank,
                "first": first,
                "end": first + GLOBAL_BATCH,
                "rows": [rows(number) for number in part],
                "loss": loss(index + 1),
            }
            with (folder / f"rank-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
    return folder


@pytest.fixture
def reference(tmp_path):
    return write(tmp_path / "reference", [2, 2, 2])


def compare(reference: Path, other: Path, *arguments: str) -> int:
    return elastic_demo.main([str(reference), str(other), *arguments])


def test_the_same_samples_on_other_ranks_are_accepted(tmp_path, reference, capsys):
    other = write(tmp_path / "other", [2, 3, 1], loss=lambda step: 8 / step * (1 + 9e-5))
    assert compare(reference, other) == 0
    printed = capsys.readouterr().out
    assert "    3 |     2  12-17" in printed and "|     1  12-17" in printed
    assert "largest difference 9.0e-05" in printed


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"rows": lambda number: f"row {number ^ 1}"}, "step 1: other samples"),
        ({"rows": lambda number: f"row {number + (number == 17)}"}, "step 3: other samples"),
        ({"loss": lambda step: 8 / step * (1 + 1.1e-4 * (step == 2))}, "step 2: the losses 4.000000 and 4.000440"),
        ({"loss": lambda step: float("nan")}, "step 1: the losses 8.000000 and nan"),
        ({"ranks_of_steps": [2, 3]}, "step 3: only in one of the runs"),
    ],
)
def test_a_difference_is_named_and_fails(tmp_path, reference, capsys, run, message):
    other = write(tmp_path / "other", **{"ranks_of_steps": [2, 3, 1], **run})
    assert compare(reference, other) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert "the same samples" not in captured.out


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: [file.unlink() for file in folder.iterdir()], "no records"),
        (lambda folder: (folder / "rank-1.jsonl").unlink(), "not by all of its ranks"),
        (lambda folder: (folder / "rank-2.jsonl").write_text((folder / "rank-1.jsonl").read_text()), "more than once"),
    ],
)
def test_records_that_are_not_whole_are_refused(tmp_path, reference, capsys, spoil, message):
    other = write(tmp_path / "other", [2, 2, 2])
    spoil(other)
    assert compare(reference, other) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="drawing needs matplotlib")
def test_the_curves_are_drawn(tmp_path, reference):
    other = write(tmp_path / "other", [2, 3, 1])
    assert compare(reference, other, "--plot", str(tmp_path / "plots" / "losses.png")) == 0
    content = (tmp_path / "plots" / "losses.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) < 100_000
