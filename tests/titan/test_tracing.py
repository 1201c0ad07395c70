"""Traces and their audit: a run at any sizes is proven, and every planted fault is found and named."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.corpora import D60, make_corpus
from tests.titan.jobs import FakeTrainer, job
from tests.trace.runs import view_of
from zephon_patches.cli.__main__ import main
from zephon_patches.errors import ConfigError, StateError
from zephon_patches.titan import tracing
from zephon_patches.trace.audit import audit_run
from zephon_patches.trace.records import history, read_run, step_of_run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d60"), D60)


@pytest.fixture(autouse=True)
def trainers():
    yield
    FakeTrainer.close_all()


@pytest.fixture
def run(corpus, tmp_path, monkeypatch):
    return TracedRun(corpus, tmp_path / "run", monkeypatch)


class TracedRun:
    """A run of several starts, each on any number of ranks in this process."""

    def __init__(self, corpus, folder: Path, monkeypatch) -> None:
        self.corpus, self.folder, self.starts = corpus, folder, 0
        monkeypatch.setattr(tracing, "_new_segment", lambda: f"segment-{self.starts}")

    def start(self, dp: int, steps: int, *, workers: int = 0, spoil=None, load: bool = True, **settings) -> None:
        """Trains some steps from the newest checkpoint.

        Args:
            spoil: Given a rank, makes its items others: a function (number of the item, item) -> item.
        """
        self.starts += 1
        config = job(self.corpus, self.folder, data__trace=True, **settings)
        config.training.dataloader.num_workers = workers
        trainers = [FakeTrainer(config, rank, dp) for rank in range(dp)]
        for rank, trainer in enumerate(trainers):
            if spoil is not None and (change := spoil(rank)) is not None:
                spoil_items(trainer.dataloader, change)
            trainer.load()
        for _ in range(steps):
            for trainer in reversed(trainers):  # rank 0, which saves, is the last
                trainer.train_step()

    def config(self, **data) -> Path:
        lines = ["[data]", f'cache_dir = "{self.corpus.folder / "cache"}"', *(f"{k} = {v}" for k, v in data.items())]
        lines += ["[[data.sources]]", 'name = "web"', f'path = "{self.corpus.texts}"']
        lines += ["[model]", f'hf_assets_path = "{self.corpus.tokenizer}"']
        path = self.folder / "run.toml"
        path.write_text("\n".join([*lines, "[training]", "seq_len = 8", "global_batch_size = 12"]) + "\n")
        return path

    def audit(self, **data):
        return audit_run(self.folder, view_of(self.config(**data)))

    def lines(self, segment: int, rank: int) -> Path:
        return self.folder / "data_trace" / f"segment-{segment}" / f"rank-{rank:05d}.jsonl"


def spoil_items(loader, change: Callable) -> None:
    items = loader._items.items
    loader._items.items = lambda plan: (change(number, item) for number, item in enumerate(items(plan)))


def test_a_run_through_changes_of_topology_is_proven(run):
    run.start(2, 4)
    run.start(3, 3, training__local_batch_size=3)
    run.start(1, 2, training__local_batch_size=5)
    run.start(12, 2, training__local_batch_size=1)
    audit = run.audit()
    assert (audit.faults, audit.notes) == ([], [])
    assert (audit.steps, audit.samples, audit.cursors) == (11, 132, (0, 132))
    assert [(s.dp_size, s.steps, s.repeated) for s in audit.segments] == [
        (2, (1, 4), 0),
        (3, (5, 7), 0),
        (1, (8, 9), 0),
        (12, (10, 11), 0),
    ]


def test_another_global_batch_skips_and_padding_are_proven(run):
    run.start(5, 3, data__skip=[(20, 24)])
    run.start(2, 2, training__global_batch_size=7, data__skip=[(20, 24), (45, 50)])
    audit = run.audit(skip="[[20, 24], [45, 50]]")
    assert audit.faults == []
    assert (audit.samples, audit.cursors) == (36 + 14, (0, 59))


def test_a_finite_end_is_proven_to_its_last_samples(run, corpus):
    run.start(5, 7, data__epochs=1)
    audit = run.audit(epochs=1)
    assert audit.faults == [] and audit.samples == view_of(run.config(epochs=1)).end == audit.cursors[1]


def test_workers_change_nothing_in_a_trace(run):
    run.start(2, 3, workers=1)
    assert run.audit().faults == []


def test_a_repeat_from_an_older_checkpoint_is_no_fault(run):
    run.start(2, 6)
    run.start(3, 4, checkpoint__load_step=2)
    audit = run.audit()
    assert audit.faults == []
    assert (audit.steps, audit.samples, audit.segments[0].repeated) == (6, 72, 4)
    assert [segment.name for segment in history(read_run(run.folder)).values()] == ["segment-1"] * 2 + ["segment-2"] * 4


def test_a_start_on_a_machine_whose_clock_is_behind_is_still_the_later_one(run, monkeypatch):
    names = iter(["20260102-100000-000-aaaa", "20260102-095959-000-bbbb", "20260102-095959-500-cccc"])
    for dp, steps in ((2, 4), (1, 2), (1, 1)):
        name = next(names)
        monkeypatch.setattr(tracing, "_new_segment", lambda name=name: name)
        run.start(dp, steps)
    audit = run.audit()
    assert audit.faults == []
    assert [(s.dp_size, s.steps) for s in audit.segments] == [(2, (1, 4)), (1, (5, 6)), (1, (7, 7))]


def test_names_of_starts_do_not_grow_and_other_folders_do_not_count(tmp_path):
    folder = tmp_path / "data_trace"
    (folder / "my notes").mkdir(parents=True)
    assert tracing._behind_others("20260102-100000-000-aaaa", tmp_path) == "20260102-100000-000-aaaa"
    names = ["20260102-100000-000-ffff"]
    for _ in range(60):
        (folder / names[-1]).mkdir()
        names.append(tracing._behind_others("20260102-095959-000-bbbb", tmp_path))
    assert names == sorted(set(names))
    assert len(names[-1]) == len(names[1])
    assert tracing._behind_others("20260102-100000-001-aaaa", tmp_path) == "20260102-100000-001-aaaa"


def test_a_skip_that_is_added_when_going_back_is_proven(run):
    run.start(2, 6)
    run.start(3, 4, checkpoint__load_step=2, data__skip=[(30, 40)])
    audit = run.audit(skip="[[30, 40]]")
    assert audit.faults == []
    assert (audit.samples, audit.cursors) == (72, (0, 82))


def only(rank, change):
    return lambda of: change if of == rank else None


def in_item(number, change):
    return lambda n, item: change(item) if n == number else item


def swap_rows(item):
    inputs, labels = item
    return {"input": inputs["input"][[1, 0]]}, labels[[1, 0]]


def change_token(item):
    inputs, labels = item
    changed = inputs["input"].clone()
    changed[1, 3] += 1
    return {"input": changed}, labels


def change_label(item):
    inputs, labels = item
    changed = labels.clone()
    changed[0, 7] = -100
    return inputs, changed


def test_two_rows_that_are_swapped_are_found(run):
    run.start(2, 4, spoil=only(1, in_item(4, swap_rows)))  # 3 items a step
    assert run.audit().faults == ["segment-1: step 2: data-parallel rank 1 got its rows in another order"]


@pytest.mark.parametrize("change", [change_token, change_label])
@pytest.mark.parametrize("workers", [0, 1])
def test_one_token_that_is_changed_is_found(run, change, workers):
    run.start(2, 3, spoil=only(0, in_item(7, change)), workers=workers)
    assert run.audit().faults == ["segment-1: step 3: data-parallel rank 0 got other tokens"]


def test_a_store_that_is_written_over_in_place_under_a_run_is_found_in_just_those_steps(tmp_path, monkeypatch):
    run = TracedRun(make_corpus(tmp_path / "d60", D60), tmp_path / "run", monkeypatch)
    sound = b""

    def write(number, item):
        nonlocal sound
        if number in (11, 23):  # the last item of step 2, and of step 4
            [path] = run.corpus.folder.glob("cache/web/*/*.bin")
            sound = sound or path.read_bytes()
            with path.open("r+b") as file:
                file.write(bytes(len(sound)) if number == 11 else sound)
        return item

    run.start(1, 5, spoil=lambda rank: write)
    assert run.audit().faults == [f"segment-1: step {step}: data-parallel rank 0 got other tokens" for step in (3, 4)]


def test_two_ranks_that_are_swapped_are_found(run, monkeypatch):
    real = tracing.TraceWriter

    def writer(folder, header):
        return real(folder, {**header, "dp_rank": {0: 1, 1: 0}.get(header["dp_rank"], header["dp_rank"])})

    monkeypatch.setattr(tracing, "TraceWriter", writer)
    run.start(3, 1)
    faults = run.audit().faults
    assert "segment-1: step 1: rank 0 took samples 0-3, expected 4-7" in faults
    assert "segment-1: step 1: data-parallel rank 0 got the rows of data-parallel rank 1" in faults
    assert "segment-1: step 1: data-parallel rank 1 got the rows of data-parallel rank 0" in faults
    assert not any("rank 2" in fault for fault in faults)


def test_tensors_that_go_to_each_other_s_rank_are_found(run, corpus):
    config = job(corpus, None)
    other = {rank: [*itertools.islice(FakeTrainer(config, 1 - rank, 2).dataloader, 9)] for rank in (0, 1)}
    run.start(2, 3, spoil=lambda rank: lambda n, item: other[rank][n] if 3 <= n < 6 else item)
    assert run.audit().faults == [
        "segment-1: step 2: data-parallel rank 0 got the rows of data-parallel rank 1",
        "segment-1: step 2: data-parallel rank 1 got the rows of data-parallel rank 0",
    ]


def test_single_rows_that_go_to_another_rank_are_found(run, corpus):
    config = job(corpus, None)
    items = {rank: [*itertools.islice(FakeTrainer(config, rank, 2).dataloader, 3)] for rank in (0, 1)}

    def exchanged(rank):
        def change(n, item):
            if n != 1:
                return item
            inputs, labels = item[0]["input"].clone(), item[1].clone()
            inputs[0], labels[0] = items[1 - rank][1][0]["input"][0], items[1 - rank][1][1][0]
            return {"input": inputs}, labels

        return change

    run.start(2, 1, spoil=exchanged)
    assert run.audit().faults == ["segment-1: step 1: data-parallel ranks 0, 1 exchanged rows"]


def without_line(path: Path, number: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:number] + lines[number + 1 :]))


def test_a_line_that_is_missing_is_found(run):
    run.start(2, 4)
    without_line(run.lines(1, 1), 2)
    assert run.audit().faults == ["segment-1: step 2: no line of rank 1"]
    with pytest.raises(StateError, match="step 2 is in the traces of 1 of 2 data-parallel ranks only"):
        step_of_run(run.folder, 2)


def test_a_last_line_that_is_missing_is_a_fault_if_the_run_went_on_from_there(run):
    run.start(2, 4)
    without_line(run.lines(1, 1), 4)
    audit = run.audit()
    assert audit.faults == []
    assert audit.notes == ["segment-1: step 4: under way when the run stopped, or not written: no line of rank 1"]
    run.start(2, 1)
    assert run.audit().faults == ["segment-1: step 4: no line of rank 1"]


def test_a_last_line_that_is_missing_is_no_fault_if_the_step_was_trained_again(run):
    """As when a machine dies: its ranks have no line of the step that others have completed."""
    run.start(2, 4)
    without_line(run.lines(1, 1), 4)
    run.start(3, 3, checkpoint__load_step=2)
    audit = run.audit()
    assert audit.faults == []
    assert audit.notes == ["segment-1: step 4: under way when the run stopped, or not written: no line of rank 1"]
    assert (audit.steps, audit.samples, audit.segments[0].repeated) == (5, 60, 2)
    without_line(run.lines(1, 1), 3)
    assert run.audit().faults == ["segment-1: step 3: no line of rank 1"], "ranks are never two steps apart"


def test_a_start_that_ended_before_its_first_step_needs_no_trace_of_every_rank(run):
    run.start(2, 2)
    run.start(3, 0)
    run.lines(2, 1).unlink()
    run.start(2, 2)
    audit = run.audit()
    assert audit.faults == []
    assert audit.notes == ["segment-2: stopped before its first step: no trace of rank 1 yet"]
    assert (audit.steps, audit.samples, audit.cursors) == (4, 48, (0, 48))


def test_a_step_that_no_rank_has_written_is_found(run):
    run.start(2, 4)
    for rank in (0, 1):
        without_line(run.lines(1, rank), 3)
    assert run.audit().faults == ["segment-1: step 3: no line of rank 0, 1"]


def test_a_torn_last_line_is_told_and_no_fault(run):
    run.start(2, 3)
    path = run.lines(1, 1)
    path.write_bytes(path.read_bytes()[:-20])
    audit = run.audit()
    assert audit.faults == []
    assert audit.notes[0] == "segment-1: rank 1: killed while it wrote a line, which is left out"
    path.write_bytes(path.read_bytes().replace(b'"step":1,', b'"step":x,'))
    assert "segment-1: rank 1: line 2 cannot be read" in run.audit().faults


VALUES = [
    None,
    True,
    -1,
    2**61,
    10**40,
    1.5,
    float("nan"),
    "",
    "x",
    [],
    [1],
    [[0]],
    [[5, 3]],
    [[0, 2**59]],
    {},
    {"a": 1},
]


def test_any_value_in_a_trace_is_a_fault_or_an_error_of_ours(run):
    run.start(2, 2)
    path, view = run.lines(1, 1), view_of(run.config())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    named = 0
    for number, line in enumerate(lines[:2]):
        for key in line:
            for value in VALUES:
                changed = [*lines[:number], {**line, key: value}, *lines[number + 1 :]]
                path.write_text("".join(json.dumps(each) + "\n" for each in changed))
                try:
                    named += bool(audit_run(run.folder, view).faults)
                except StateError as error:
                    named += "rank-00001.jsonl: its first line is not what this version writes" in str(error)
    known = {"segment", "sources", "wait", "loss"}  # what is told and not compared: some of these values could be right
    assert (
        named >= sum(len(line.keys() - known) for line in lines[:2]) * len(VALUES) - 2
    )  # an end, and a rank, of None or 1
    path.write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(StateError, match="its first line is not what this version writes"):
        audit_run(run.folder, view)


def test_a_line_that_is_there_twice_is_found(run):
    run.start(2, 3)
    path = run.lines(1, 0)
    path.write_text(path.read_text() + path.read_text().splitlines(keepends=True)[2])
    assert run.audit().faults == ["segment-1: step 2: rank 0 has 2 lines"]


def test_a_rank_without_a_file_and_a_segment_without_a_folder_are_found(run):
    for _ in range(3):
        run.start(2, 2)
    run.lines(2, 1).unlink()
    assert run.audit().faults == ["segment-2: no trace of rank 1 of 2"]
    run.lines(2, 0).unlink()
    assert run.audit().faults == [
        "segment-3: starts behind step 4, and the segments before end with step 2: traces of steps 3 to 4 are missing"
    ]


def test_samples_that_are_left_out_between_two_starts_are_found(run):
    run.start(2, 2)
    run.start(2, 2, checkpoint__exclude_from_loading=["dataloader"], data__initial_cursor=30)
    assert run.audit().faults == [
        "segment-2: starts at sample 30 behind step 2, but that step ended at sample 24: samples between them are "
        "missed or repeated"
    ]


def test_another_order_is_named_and_not_compared(run):
    run.start(2, 2)
    assert run.audit(seed=1).faults == [
        "segment-1: was trained in another order than the config's: data.seed: 0 in the checkpoint, 1 now"
    ]


def test_a_trace_that_begins_later_than_the_run(run):
    run.start(2, 3)
    for rank in (0, 1):
        run.lines(1, rank).unlink()
    run.start(3, 2)
    run.start(1, 1, checkpoint__load_step=3)
    audit = run.audit()
    assert audit.faults == [] and (audit.steps, audit.cursors) == (1, (36, 48))


def test_steps_are_shown_by_the_traces(run, capsys):
    run.start(2, 2, training__global_batch_size=6)
    run.start(3, 2)
    assert step_of_run(run.folder, 2).numbers.tolist() == [*range(6, 12)]
    assert step_of_run(run.folder, 4).numbers.tolist() == [*range(24, 36)]
    with pytest.raises(StateError, match="step 5 is not in its traces, which have steps 1 to 4"):
        step_of_run(run.folder, 5)
    assert main(["show", "--config", str(run.config()), "--step", "3", "--run", str(run.folder)]) == 0
    assert "step 3: 12 samples, 12-23; told by: the traces in" in capsys.readouterr().out


def test_the_command_prints_a_verdict_and_has_a_status(run, capsys):
    run.start(2, 3)
    config = run.config()
    assert main(["audit", str(run.folder), "--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert out.endswith(
        "3 steps from sample 0 to 36 of the order: 36 samples trained on, each once, in order, with the tokens of the "
        "stores\n"
    )
    without_line(run.lines(1, 0), 1)
    assert main(["audit", str(run.folder), "--config", str(config)]) == 1
    assert "FAULT: segment-1: step 1: no line of rank 0\n1 faults\n" in capsys.readouterr().out
    assert main(["audit", str(run.folder), "--config", str(config), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"] == ["segment-1: step 1: no line of rank 0"]


def test_without_the_setting_nothing_is_written(run, corpus):
    trainer = FakeTrainer(job(corpus, run.folder)).load()
    trainer.train(2)
    assert not (run.folder / "data_trace").exists()
    assert trainer.dataloader.on_item is None
    with pytest.raises(StateError, match="no traces in .*data.trace = true"):
        read_run(run.folder)


def test_a_disk_that_is_full_ends_the_trace_and_not_the_run(run, caplog, monkeypatch):
    def full(self, line):
        if "digest" in line and line["step"] == 2:
            raise OSError(28, "No space left on device")
        real(self, line)

    real = tracing.TraceWriter.write
    monkeypatch.setattr(tracing.TraceWriter, "write", full)
    run.start(1, 4)
    assert "ends here, it cannot be written" in caplog.text
    assert len(run.lines(1, 0).read_text().splitlines()) == 2


def test_the_setting_is_a_flag(corpus):
    with pytest.raises(ConfigError, match="data.trace = 1: expected true or false"):
        type(job(corpus).data)(trace=1)


@pytest.mark.parametrize(
    "data",
    [
        {"positions": True},
        {"packing": "best_fit"},
        {"packing": "best_fit", "positions": True},
        {"packing": "document", "positions": True},
    ],
)
def test_whatever_samples_hold_is_computed_anew(run, data):
    settings = {f"data__{key}": value for key, value in data.items()}
    written = {key: json.dumps(value) for key, value in data.items()}
    run.start(2, 3, **settings)
    run.start(3, 3, **settings)
    assert run.audit(**written).faults == []

    def change(number, item):
        item[0]["positions" if "positions" in item[0] else "input"][0, 0] += number == 1
        return item

    run.start(3, 1, spoil=lambda rank: change if rank == 1 else None, **settings)
    [fault] = run.audit(**written).faults
    assert "data-parallel rank 1 got other tokens" in fault
