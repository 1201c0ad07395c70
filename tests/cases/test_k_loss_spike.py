"""K01 and K02 as it happens: a document makes the loss jump, is found, and is skipped from the checkpoint before.

A table of word pairs is trained on a corpus that it learns at once, with real checkpoints and traces, on several ranks
in one process.
"""

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.corpora import Corpus, write_tokenizer
from tests.titan.jobs import FakeTrainer, job
from zephon_patches.cli.__main__ import main

DOCUMENTS, WORDS, PLANTED, STEPS = 240, 7, 101, 16


@pytest.fixture
def corpus(tmp_path):
    """All documents are the words of document 0 but one, which has words that come nowhere else."""
    plain, strange = (" ".join(f"{document}_{i}" for i in range(WORDS)) for document in (0, 1))
    lines = [{"text": strange if number == PLANTED else plain} for number in range(DOCUMENTS)]
    made = Corpus(tmp_path, [WORDS] * 2, eos=True)
    made.texts.mkdir()
    (made.texts / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_tokenizer(made.tokenizer, made.lengths)
    return made


def train(config, dp: int, until: int) -> dict[int, float]:
    """The loss of each step, from the checkpoint that the config names."""
    model = nn.Embedding(2 * WORDS + 2, 2 * WORDS + 2)
    nn.init.zeros_(model.weight)
    trainers = [FakeTrainer(config, rank, dp, model=model).load() for rank in range(dp)]
    batches = [trainer.batch_generator(trainer.dataloader) for trainer in trainers]
    losses = {}
    for step in range(trainers[0].step + 1, until + 1):
        items = [next(of) for trainer, of in zip(trainers, batches, strict=True) for _ in range(_accumulation(trainer))]
        inputs, labels = torch.cat([i["input"] for i, _ in items]), torch.cat([labels for _, labels in items])
        loss = cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        with torch.no_grad():
            model.weight -= 40 * model.weight.grad
        model.weight.grad = None
        losses[step] = loss.item()
        for trainer in reversed(trainers):  # rank 0, which saves, is the last
            trainer.step = step
            extra = {"n_tokens_seen": 0}
            trainer.metrics_processor.log(step, losses[step], losses[step], 1.0, extra_metrics=extra)
            trainer.checkpointer.save(step)
    FakeTrainer.close_all()
    return losses


def _accumulation(trainer) -> int:
    return trainer.dataloader.micro_batches_per_step


def jumps(losses: dict[int, float]) -> list[int]:
    return [step for step in losses if step - 1 in losses and losses[step] > losses[step - 1] + 0.1]


@pytest.fixture
def ask(capsys):
    def run(*arguments: object, status: int = 0) -> dict:
        capsys.readouterr()
        assert main([*map(str, arguments), "--json"]) == status
        return json.loads(capsys.readouterr().out)

    return run


def write_config(corpus, path, **data):
    lines = ["[data]", f'cache_dir = "{corpus.folder / "cache"}"', *(f"{k} = {v}" for k, v in data.items())]
    lines += ["[[data.sources]]", 'name = "web"', f'path = "{corpus.texts}"', "[model]"]
    lines += [f'hf_assets_path = "{corpus.tokenizer}"', "[training]", "seq_len = 8", "global_batch_size = 12"]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_document_that_makes_the_loss_jump_is_found_and_skipped(corpus, tmp_path, monkeypatch, ask):
    starts: list[int] = []
    monkeypatch.setattr("zephon_patches.titan.tracing._new_segment", lambda: f"segment-{len(starts)}")
    folder, config = tmp_path / "run", write_config(corpus, tmp_path / "run.toml")

    # The loss jumps.
    starts.append(2)
    losses = train(job(corpus, folder, data__trace=True), 2, STEPS)
    first = jumps(losses)[0]
    assert first > 3 and losses[first - 1] < 0.1

    # What was in that step? One text is unlike the others; it is of this line of this file.
    shown = ask("show", "--config", config, "--step", first, "--text", 9)["samples"]
    strange = [sample for sample in shown if "1_" in sample["text"]]
    assert strange
    plain = [sample for sample in shown if sample not in strange]
    suspects = _documents(strange) - _documents(plain)
    assert ("0.jsonl", PLANTED) in suspects and len(suspects) <= 2 * len(strange)

    # Where else does it come? And is the checkpoint before the jump one to go on from with these samples skipped?
    checkpoint = folder / "checkpoint" / f"step-{first - 1}"
    found = ask("find", "--config", config, "--document", f"0.jsonl:{PLANTED}", "--checkpoint", checkpoint, "--after")
    numbers = sorted(sample["n"] for sample in found["samples"])
    assert {sample["n"] for sample in strange} <= set(numbers)
    skip = [[n, n + 1] for n in numbers]
    skipping = write_config(corpus, tmp_path / "skipping.toml", skip=skip)
    verdict = ask("inspect", checkpoint, "--config", skipping)
    assert verdict["accepted"] and [d["setting"] for d in verdict["differences"]] == ["skip"]

    # On another number of ranks the loss stays low, and all other samples come as planned.
    starts.append(3)
    settings = {"data__trace": True, "data__skip": skip, "checkpoint__load_step": first - 1}
    again = train(job(corpus, folder, **settings), 3, STEPS)
    assert [*again] == [*range(first, STEPS + 1)]
    assert jumps({first - 1: losses[first - 1], **again}) == []
    audit = ask("audit", folder, "--config", skipping)
    assert audit["faults"] == [] and audit["steps"] == STEPS
    kept = [n for n in range(12 * STEPS + len(numbers) + 20) if n not in numbers][: 12 * STEPS]
    for step in range(1, STEPS + 1):
        shown = ask("show", "--config", skipping, "--step", step, "--run", folder, "--text", 9)["samples"]
        assert [sample["n"] for sample in shown] == kept[12 * (step - 1) : 12 * step]
        # What came while the loss was still high did not show, and stays trained on.
        assert step < first or not any("1_" in sample["text"] for sample in shown)


def _documents(samples):
    return {(part["file"], part["record"]) for sample in samples for part in sample["parts"]}
