"""``zephon-data show``, ``order`` and ``find``: what they print, for people and for machines."""

import json

import pytest

from tests.corpora import D60, make_sources
from tests.trace.runs import prepare, write_config
from zephon_patches.cli.__main__ import main


@pytest.fixture
def config(tmp_path, capsys):
    made = make_sources(tmp_path, web=D60, code=[9, 0, 4, 30] * 7)
    path = write_config(tmp_path / "run.toml", made, weights={"web": 0.7, "code": 0.3}, skip="[[5, 8]]")
    prepare(path)
    capsys.readouterr()
    return path


@pytest.fixture
def call(config, capsys):
    def run(command: str, *arguments: str, status: int = 0) -> str:
        assert main([command, "--config", str(config), *arguments]) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    return run


def test_a_step_is_a_table_that_says_how_it_was_counted(call):
    lines = call("show", "--step", "2").splitlines()
    assert lines[0] == (
        "step 2: 12 samples, 15-26; told by: 12 samples a step from sample 0 on (training.global_batch_size)"
    )
    assert lines[1].split() == ["n", "source", "epoch", "shard", "sample", "file", "record", "tokens"]
    numbers = [line.split()[0] for line in lines[2:] if not line.startswith("  ")]
    assert numbers == [str(n) for n in range(15, 27)]


def test_skipped_samples_are_shown_and_marked(call):
    out = call("show", "--at", "4:9")
    cells = [line.split()[:2] for line in out.splitlines()]
    assert [second == "skipped" for first, second in cells if first in "45678"] == [0, 1, 1, 1, 0]


def test_table_and_json_have_the_same_samples(call):
    content = json.loads(call("show", "--step", "1", "--dp", "5", "--text", "4", "--json"))
    assert [s["n"] for s in content["samples"]] == [0, 1, 2, 3, 4, *range(8, 15)]
    assert [s["rank"] for s in content["samples"]] == [0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4]
    assert content["samples"][6]["micro_batch"] == 1
    text = content["samples"][0]["text"]
    assert len(text.split()) == 4
    part = content["samples"][0]["parts"][0]
    table = call("show", "--at", "0", "--text", "4")
    assert repr(text) in table
    assert f"{part['record']}  {part['start']}:{part['stop']} of {part['tokens']}" in table


def test_one_rank_of_a_range_that_begins_inside_a_step(call):
    content = json.loads(call("show", "--at", "10:20", "--dp", "3", "--rank", "1", "--json"))
    assert [(s["step"], s["n"]) for s in content["samples"]] == [(1, 9 + i) for i in (1,)] + [(2, 19)]


def test_who_reads_what(call):
    lines = call("order", "--at", "0:27", "--dp", "5").splitlines()
    assert lines[1].split() == ["step", "rank", "micro-batch", "samples"]
    assert [line.split() for line in lines[2:6]] == [
        ["1", "0", "0", "0-1"],
        ["1", "1", "0", "2-3"],
        ["1", "2", "0", "4,", "8"],
        ["1", "2", "1", "9"],
    ]
    content = json.loads(call("order", "--step", "2", "--dp", "2", "--local-batch-size", "6", "--json"))
    assert [b["samples"] for b in content["batches"]] == [[*range(15, 21)], [*range(21, 27)]]


def test_a_document_is_found_before_and_after_a_place(call):
    every = json.loads(call("find", "--document", "web/0.jsonl:17", "--source", "web", "--epochs", "0:2", "--json"))
    numbers = [s["n"] for s in every["samples"]]
    assert numbers == sorted(numbers) and every["documents"] == 1
    cursor = numbers[len(numbers) // 2 - 1] + 1
    for flag, wanted in (("--before", True), ("--after", False)):
        arguments = ["--document", "0.jsonl:17", "--source", "web", "--cursor", str(cursor), flag, "--json"]
        found = json.loads(call("find", *arguments))["samples"]
        assert [s["n"] for s in found] == [n for n in numbers if (n < cursor) == wanted]
        assert {s["before"] for s in found} == {wanted}
    out = call("find", "--document", "0.jsonl:17", "--source", "web", "--step", "1")
    assert out.startswith("cursor 0, told by: the start of step 1, 12 samples a step from")


def test_a_record_without_tokens_is_in_no_sample_and_an_empty_one_is_no_error(call):
    content = json.loads(call("find", "--document", "0.jsonl:1", "--source", "code", "--json"))
    assert content["documents"] == 1  # EOS alone


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["show", "--at", "5:5"], "--at 5:5: expected A:B"),
        (["show", "--at", "x"], "--at x: expected A:B"),
        (["show", "--at", "0", "--rank", "0"], "--rank goes with --dp"),
        (["show", "--at", "0:3", "--dp", "13"], "dp_size = 13 is above global_batch_size = 12"),
        (["show", "--at", "0:3", "--dp", "3", "--rank", "3"], "expected 0 <= dp_rank < dp_size"),
        (["show", "--at", "0", "--run", "x"], "--run goes with --step"),
        (["show", "--at", "0", "--checkpoint", "x"], "--checkpoint goes with --step, or with --dp"),
        (["show", "--step", "0"], "step 0 lies before what it is counted from"),
        (["show", "--step", "1", "--text", "0"], "--text 0: expected a number of tokens"),
        (["find", "--document", "0.jsonl"], "expected FILE:RECORD"),
        (["find", "--document", "0.jsonl:1", "--before"], "--before and --after go with"),
        (["find", "--document", "0.jsonl:1", "--source", "x"], "--source x: the sources are code, web"),
        (["order", "--at", "0:9", "--dp", "0"], "dp_size = 0"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(call, arguments, text):
    err = call(*arguments, status=1)
    assert text in err and err.count("\n") == 1
