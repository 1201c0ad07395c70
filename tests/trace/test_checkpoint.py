"""Looking into checkpoints: what they say of the data, and whether a resume's verdict is foretold."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.corpora import D60, make_sources
from tests.resume import Place, Run, builder
from tests.trace.runs import prepare, view_of, write_config
from zephon_patches.cli.__main__ import main
from zephon_patches.errors import StateError
from zephon_patches.trace.checkpoint import basis_of_checkpoint, compare, read_checkpoint
from zephon_patches.trace.steps import numbers_of_step

MIXED = {"weights": {"web": 0.7, "code": 0.3}}


class Holding:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        raise AssertionError("nothing is loaded")


@pytest.fixture
def made(tmp_path):
    return make_sources(tmp_path, web=D60, code=[9, 0, 4, 30] * 7)


@pytest.fixture
def checkpoint(made, tmp_path):
    """After 7 steps of 12."""
    run = Run(builder(made, **MIXED, skip=[(20, 24)]), Place(3, 2))
    for _ in range(7):
        run.step()
    folder = tmp_path / "checkpoint" / "step-7"
    state = {"dataloader": Holding(run.state()), "train_state": Holding({"step": 7}), "model": torch.zeros(3)}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def config(made, tmp_path, name="run.toml", **changes):
    path = write_config(tmp_path / name, made, **{**MIXED, "skip": "[[20, 24]]", **changes})
    prepare(path)
    return path


def test_it_says_where_each_source_stands(checkpoint, made, tmp_path):
    contents = read_checkpoint(checkpoint)
    assert (contents.step, contents.cursor) == (7, 88)
    assert contents.sources == view_of(config(made, tmp_path)).sources_at(88)
    assert sum(s["epoch"] * s["samples"] + s["position"] for s in contents.sources) == 88


def test_the_model_is_never_read(checkpoint, monkeypatch):
    monkeypatch.setattr(torch, "load", only_plain(torch.load))
    read_checkpoint(checkpoint)


def only_plain(load):
    def checked(file, **settings):
        assert settings["weights_only"] is True
        value = load(file, **settings)
        assert isinstance(value, int | str)
        return value

    return checked


@pytest.mark.parametrize(
    "changes, accepted, setting",
    [
        ({}, True, None),
        ({"skip": "[[20, 24], [200, 300]]"}, True, "skip"),
        ({"skip": "[[20, 25]]"}, False, "skip"),
        ({"seed": 1}, False, "seed"),
        ({"weights": {"web": 0.5, "code": 0.5}}, False, "mixture from sample 0 on"),
        ({"stages": [(88, {"web": 1})]}, True, "mixture from sample 88 on"),
        ({"stages": [(87, {"web": 1})]}, False, "mixture from sample 87 on"),
        ({"batch": 24}, True, "global_batch_size"),
        ({"batch": -1}, True, "global_batch_size"),
        ({"shard_bytes": 600}, False, "shard_bytes"),
    ],
)
def test_the_verdict_is_the_loader_s(checkpoint, made, tmp_path, capsys, changes, accepted, setting):
    path = config(made, tmp_path, **changes)
    verdict = compare(read_checkpoint(checkpoint), view_of(path))
    assert verdict.accepted == accepted
    assert setting is None or setting in [d.setting for d in verdict.differences]
    assert bool(verdict.differences) == (setting is not None)
    loader = builder(made, **_arguments(changes))(Place(1, 12), 0)
    state = {"cursor": 88, "order": json.dumps(read_checkpoint(checkpoint).order)}
    if accepted:
        loader.load_state_dict(state)
    else:
        with pytest.raises(StateError) as refused:
            loader.load_state_dict(state)
        assert verdict.reason == str(refused.value)
    capsys.readouterr()
    assert main(["inspect", str(checkpoint), "--config", str(path)]) == (0 if accepted else 1)
    out = capsys.readouterr().out
    assert f"A resume would be {'accepted' if accepted else 'refused'}" in out
    assert out.startswith(f"{checkpoint}: step 7, cursor 88\n")
    assert main(["inspect", str(checkpoint), "--config", str(path), "--json"]) == (0 if accepted else 1)
    assert json.loads(capsys.readouterr().out)["accepted"] == accepted


def _arguments(changes):
    settings = {**MIXED, "skip": "[[20, 24]]", **changes}
    settings.pop("batch", None)
    return {**settings, "skip": [tuple(pair) for pair in json.loads(settings["skip"])]}


def test_an_accepted_change_is_told(checkpoint, made, tmp_path):
    view = view_of(config(made, tmp_path, seed=1))
    fingerprint = json.loads(view.description)["fingerprint"]
    view = view_of(config(made, tmp_path, "accepts.toml", seed=1, accept_change=f'"{fingerprint}"'))
    verdict = compare(read_checkpoint(checkpoint), view)
    assert verdict.accepted and verdict.reason == "data.seed: 0 in the checkpoint, 1 now"


def test_steps_are_counted_from_it(checkpoint, made, tmp_path):
    view = view_of(config(made, tmp_path, batch=30))
    basis = basis_of_checkpoint(view, checkpoint)
    assert numbers_of_step(view, 9, basis).numbers.tolist() == [*range(118, 148)]
    view = view_of(config(made, tmp_path, batch=-1))
    assert numbers_of_step(view, 8, basis_of_checkpoint(view, checkpoint)).numbers.tolist() == [*range(88, 100)]
    with pytest.raises(Exception, match="step 7 lies before what it is counted from: step 7 at sample 88"):
        numbers_of_step(view, 7, basis)
    with pytest.raises(StateError, match="data.seed: 0 in the checkpoint, 1 now"):
        basis_of_checkpoint(view_of(config(made, tmp_path, seed=1)), checkpoint)


def test_show_and_find_count_from_it(checkpoint, made, tmp_path, capsys):
    path = config(made, tmp_path, batch=-1)
    capsys.readouterr()
    arguments = ["--config", str(path), "--checkpoint", str(checkpoint)]
    assert main(["show", *arguments, "--step", "8"]) == 0
    assert "step 8: 12 samples, 88-99; told by: " in capsys.readouterr().out
    assert main(["find", *arguments, "--document", "0.jsonl:3", "--source", "web"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("cursor 88, told by:") and " before " in out and " after " in out


def test_what_is_no_such_checkpoint_is_told(checkpoint, tmp_path):
    with pytest.raises(StateError, match=rf"no complete checkpoint here .* in it are {checkpoint}"):
        read_checkpoint(checkpoint.parent)
    dcp.save({"model": torch.zeros(3)}, checkpoint_id=tmp_path / "model", no_dist=True)
    with pytest.raises(StateError, match="holds no place in the data of this pipeline .*none"):
        read_checkpoint(tmp_path / "model")
    (checkpoint / ".metadata").write_bytes(b"x")
    with pytest.raises(StateError, match="cannot be read"):
        read_checkpoint(checkpoint)
