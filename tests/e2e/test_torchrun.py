"""The product as users run it: torchrun and gloo, checkpoints, another number of ranks.

One run of 8 steps on 2 ranks is the reference. Its checkpoint of step 4 is resumed in other topologies; the
samples of each step must be those of the reference, in order, and the losses within 1e-4 of its losses. There are two
sources, the smaller of which begins its second epoch in step 6; a stage turns the mixture in step 5, and samples are
skipped in steps 3 and 5.
"""

import hashlib
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import corpora
from tests.resume import expected_mix
from zephon_patches.trace.entries import read_entries

REPO = Path(__file__).parents[2]
STEPS = 8
WEIGHTS = {"web": 0.7, "code": 0.3}
STAGE = (68, {"web": 0.4, "code": 0.6})
SKIP = [(30, 40), (62, 65)]
KEPT = [n for n in range(200) if not any(start <= n < stop for start, stop in SKIP)]
# The numbers of each step, and the cursor behind it.
NUMBERS = {step: KEPT[12 * (step - 1) : 12 * step] for step in range(1, STEPS + 1)}
CURSORS = {step: {numbers[-1] + 1} for step, numbers in NUMBERS.items()}

CONFIG = """
[job]
dump_folder = "{folder}/reference"
[data]
loading_strategy = "zephon"
cache_dir = "{folder}/cache"
skip = [[30, 40], [62, 65]]
[[data.sources]]
name = "web"
path = "{folder}/texts/web"
weight = 0.7
[[data.sources]]
name = "code"
path = "{folder}/texts/code"
weight = 0.3
[[data.stages]]
at = 68
weights = {{ web = 0.4, code = 0.6 }}
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{folder}/tokenizer"
[lr_scheduler]
warmup_steps = 2
total_steps = 100
[training]
local_batch_size = 2
global_batch_size = 12
seq_len = 8
steps = {steps}
mixed_precision_param = "float32"
dataset = "c4_test"
dataset_path = "{folder}/texts/web"
[checkpoint]
enable = true
interval = 2
last_save_model_only = false
keep_latest_k = 0
[metrics]
log_freq = 1
[debug]
seed = 42
[activation_checkpoint]
mode = "none"
"""


class Run:
    """One start of ``run_train.sh``: its exit status, what it printed, and what its ranks recorded."""

    def __init__(
        self,
        folder: Path,
        name: str,
        ngpu: int,
        *arguments: str,
        train_file: str = "scripts.recording_train",
        told_to_end_in: int | None = None,
        **environment: str,
    ) -> None:
        self.folder = folder / name
        record = self.folder / "record"
        record.mkdir(parents=True, exist_ok=True)
        with subprocess.Popen(
            ["./run_train.sh", "--job.dump_folder", str(self.folder), *arguments],
            cwd=REPO,
            env={
                **os.environ,
                "NGPU": str(ngpu),
                "CONFIG_FILE": str(folder / "config.toml"),
                "TRAIN_FILE": train_file,
                "RECORD_FOLDER": str(record),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as started:
            if told_to_end_in is not None:
                told = threading.Thread(target=self._terminate, args=(started, record, told_to_end_in))
                told.start()
            try:
                self.output, _ = started.communicate(timeout=240)
            except subprocess.TimeoutExpired:
                started.terminate()
                raise
        self.status = started.returncode
        self.steps: dict[int, list] = {}
        self.losses: dict[int, float] = {}
        self.cursors: dict[int, set[int]] = {}
        by_rank: dict[int, dict[int, list]] = {}
        for path in record.iterdir():
            for line in map(json.loads, path.read_text().splitlines()):
                ranks = by_rank.setdefault(line["step"], {})
                # TP peers have the same place in the batch mesh, and must have the same rows.
                assert ranks.setdefault(line["dp_rank"], line["rows"]) == line["rows"]
                self.cursors.setdefault(line["step"], set()).add(line["end"])
                if line["loss"] is not None:
                    self.losses[line["step"]] = line["loss"]
        for step, ranks in by_rank.items():
            self.steps[step] = [row for _, rows in sorted(ranks.items()) for row in rows]

    @staticmethod
    def _terminate(started: subprocess.Popen, record: Path, step: int) -> None:
        """Sends SIGTERM to ``run_train.sh`` when a rank has completed a step."""
        while started.poll() is None:
            if any(f'"step": {step},' in path.read_text() for path in record.iterdir()):
                started.terminate()
                return
            time.sleep(0.02)

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoint" / f"step-{step}"


def resume(folder: Path, name: str, source: Run, step: int, ngpu: int, *arguments: str, **options: Any) -> Run:
    """Starts a run that finds another run's checkpoint of a step in its folder."""
    shutil.copytree(source.checkpoint(step), folder / name / "checkpoint" / f"step-{step}")
    return Run(folder, name, ngpu, *arguments, **options)


def differences(run: Run, reference: Run) -> list[str]:
    """What tells a resumed run from the reference, up to its last step: samples, cursors, losses."""
    found = []
    for step, rows in run.steps.items():
        if step > STEPS:
            continue
        if rows != reference.steps[step]:
            found.append(f"samples of step {step}")
        if run.cursors[step] != reference.cursors[step]:
            found.append(f"cursor of step {step}")
        if abs(run.losses[step] - reference.losses[step]) > 1e-4 * reference.losses[step]:
            found.append(f"loss of step {step}")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("e2e")
    corpora.make_sources(folder, web=corpora.D60, code=[9] * 20)
    (folder / "config.toml").write_text(CONFIG.format(folder=folder, steps=STEPS))
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    run = Run(folder, "reference", 2)
    assert run.status == 0, run.output
    assert sorted(run.steps) == list(range(1, STEPS + 1))
    assert run.cursors == CURSORS
    made = corpora.Sources(folder, {"web": corpora.D60, "code": [9] * 20})
    expected = expected_mix(made, weights=WEIGHTS, stages=[STAGE])
    assert run.steps == {step: [digest(expected[n]) for n in numbers] for step, numbers in NUMBERS.items()}
    return run


def digest(row) -> str:
    """As the recording trainer's."""
    content = np.array(row.inputs, np.int64).tobytes() + np.array(row.labels, np.int64).tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def test_resuming_on_3_ranks_and_then_on_1_trains_on_the_same_samples(folder, reference):
    on_3 = resume(folder, "on-3", reference, 4, 3, "--training.steps", "6")
    assert on_3.status == 0, on_3.output
    assert sorted(on_3.steps) == [5, 6]
    assert differences(on_3, reference) == []
    assert "resume at sample 58 (epoch" in on_3.output
    assert "mixture from sample 0 on: code 30 %, web 70 %; next from sample 68 on: code 60 %, web 40 %" in on_3.output

    # 5 rows do not divide the step's 12: 15 rows are read, 3 of them padding.
    on_1 = resume(folder, "on-1", on_3, 6, 1, "--training.local_batch_size", "5")
    assert on_1.status == 0, on_1.output
    assert sorted(on_1.steps) == [7, 8]
    assert differences(on_1, reference) == []
    assert "15 rows, 3 of them padding" in on_1.output


def test_resuming_with_tensor_parallel_peers_and_workers_trains_on_the_same_samples(folder, reference):
    """And a SIGTERM to run_train.sh ends it with status 0 and a checkpoint, which is its last step's."""
    run = resume(
        folder, "tp-2", reference, 4, 2,
        "--training.steps", "1000", "--parallelism.tensor_parallel_degree", "2", "--training.dataloader.num_workers",
        "2", "--data.on_preempt", "checkpoint", "--checkpoint.interval", "1000", told_to_end_in=5,
    )  # fmt: skip
    assert run.status == 0, run.output
    last = max(run.steps)
    assert sorted(run.steps) == list(range(5, last + 1)) and last < 1000
    assert differences(run, reference) == []
    assert f"the run ends behind step {last}, with a full checkpoint" in run.output
    assert read_entries(run.checkpoint(last), ["cursor"])["cursor"] in run.cursors[last]


def test_two_samples_swapped_between_steps_are_noticed(folder, reference):
    run = resume(
        folder,
        "swapped",
        reference,
        4,
        1,
        "--training.steps",
        "6",
        train_file="tests.e2e.planted_train",
        PLANT_SWAP="59,75",
    )
    assert run.status == 0, run.output
    assert {"samples of step 5", "samples of step 6", "loss of step 5"} <= set(differences(run, reference))


def test_a_changed_seed_is_refused_by_name(folder, reference):
    run = resume(folder, "seed", reference, 4, 1, "--data.seed", "1")
    assert run.status != 0
    assert "data.seed: 0 in the checkpoint, 1 now" in run.output
    assert run.steps == {}


def test_the_stock_strategy_still_trains(folder):
    run = Run(
        folder, "stock", 1, "--data.loading_strategy=stock", "--training.steps", "2",
        "--training.global_batch_size", "4", train_file="torchtitan.train",
    )  # fmt: skip
    assert run.status == 0, run.output
    assert "step:  2" in run.output and "Training completed" in run.output
