"""The picture of a run: what is drawn, and that it is drawn."""

import importlib.util
import json
import sys

import pytest

from zephon_patches.cli.__main__ import main
from zephon_patches.loader.state import describe_order
from zephon_patches.trace.plot import traced_steps
from zephon_patches.trace.records import FOLDER, FORMAT, read_run

SOURCES = [{"name": name, "recipe": "0" * 16, "data": "1" * 16, "tokens": 800, "samples": 100} for name in "ab"]
ORDER = describe_order(
    {
        "packing": "concat",
        "seed": 0,
        "seq_len": 8,
        "shard_bytes": 0,
        "shuffle_shards": 256,
        "sources": SOURCES,
        "tokenizer": "2" * 16,
    },
    12,
)


def write_segment(run, name, dp_size, start, steps, peers=1):
    """A segment of steps of 12 samples, two thirds of them of source a."""
    head = {"format": FORMAT, "segment": name, "dp_size": dp_size, "world_size": dp_size * peers}
    head |= {"global_batch_size": 12, "local_batch_size": 2, "end": None, "order": ORDER, "step": start}
    for rank in range(dp_size * peers):
        lines = [{**head, "rank": rank, "dp_rank": rank // peers, "cursor": 12 * start}]
        for step in range(start + 1, start + 1 + steps):
            line = {"step": step, "cursor": 12 * step - 12, "next": 12 * step, "ranges": []}
            line |= {"digest": "0" * 16, "rows": "0" * 16}
            a = 8 // dp_size
            line |= {"sources": {"a": a, "b": 12 // dp_size - a}, "wait": 0.001 * (rank + 1), "loss": 8 / step}
            lines.append(line)
        path = run / FOLDER / name / f"rank-{rank:05d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path):
    write_segment(tmp_path, "1", 2, 0, 6, peers=2)
    write_segment(tmp_path, "2", 4, 4, 5)
    return tmp_path


def test_steps_are_joined_over_their_ranks(run):
    first, second = traced_steps(read_run(run))
    assert [step.is_final for step in first] == [True] * 4 + [False] * 2
    assert all(step.is_final for step in second)
    assert [step.cursor for step in second] == [60, 72, 84, 96, 108]
    assert first[0].sources == second[0].sources == {"a": 8, "b": 4}, "peers count once"
    assert first[0].wait == second[0].wait == 0.004
    assert first[1].loss == 4.0


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="drawing needs matplotlib")
def test_the_picture_is_drawn(run, capsys):
    file = run / "plots" / "run.png"
    assert main(["plot", str(run), "-o", str(file)]) == 0
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG") and 5_000 < len(content) < 200_000
    assert main(["plot", str(run), "-o", str(run / "run.nonesuch")]) == 1
    assert "run.nonesuch: cannot be written" in capsys.readouterr().err


def test_without_matplotlib_it_is_said_what_to_install(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(run), "-o", "x.png"]) == 1
    assert "pip install 'torchtitan-zephon[plot]'" in capsys.readouterr().err
    assert main(["plot", str(run), "-o", "x.png", "--window", "0"]) == 1
    assert "--window 0: expected at least 1 step" in capsys.readouterr().err
