"""A run that gets a SIGTERM ends behind a whole step, with a checkpoint to go on from, and leaves nothing behind."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.corpora import D60, make_corpus
from tests.ranks import Meeting, run_ranks
from tests.resume import expected_stream
from tests.titan.jobs import FakeTrainer, job
from zephon_patches.errors import ConfigError
from zephon_patches.titan import preemption
from zephon_patches.titan.preemption import STAYS, Preemption
from zephon_patches.trace.entries import loader_keys, read_entries

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d60"), D60)


@pytest.fixture(scope="module")
def expected(corpus):
    return expected_stream(corpus)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="zephon_patches")
    return caplog


@pytest.fixture(autouse=True)
def restored():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    FakeTrainer.close_all()


def watchful(corpus, folder, **settings):
    """A run whose last checkpoint is TorchTitan's, of the model only, and which saves no other for a while."""
    settings = {"data__on_preempt": "checkpoint", "checkpoint__interval": 100, **settings}
    return job(corpus, folder, **settings)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def going(trainer: FakeTrainer) -> bool:
    """As TorchTitan's trainer asks before each step."""
    return trainer.step < trainer.job_config.training.steps


@pytest.mark.parametrize("signals", [1, 3])
def test_the_step_is_the_last_and_its_full_checkpoint_is_gone_on_from(corpus, expected, tmp_path, log, signals):
    config = watchful(corpus, tmp_path)
    trainer = FakeTrainer(config).load()
    rows = trainer.train(2)
    assert going(trainer)
    for _ in range(signals):
        terminate()
    rows += trainer.train_step()
    assert not going(trainer)
    assert "data: SIGTERM on rank 0: the run ends behind step 3, with a full checkpoint" in log.messages
    assert os.listdir(tmp_path / "checkpoint") == ["step-3"]
    FakeTrainer.close_all()
    resumed = FakeTrainer(config).load()
    assert (resumed.step, resumed.dataloader.cursor) == (3, 36)
    assert going(resumed), "the steps are those that are set"
    assert rows + resumed.train(5) == expected.rows(0, 8 * 12)


def test_a_signal_before_the_first_step_ends_the_run_without_one(corpus, tmp_path, log):
    trainer = FakeTrainer(watchful(corpus, tmp_path))
    terminate()
    trainer.load()
    assert not going(trainer)
    assert "data: SIGTERM on rank 0 before the first step: the run ends, with nothing new to save" in log.messages
    assert not (tmp_path / "checkpoint").exists()


def test_no_validation_comes_between(corpus, tmp_path):
    trainer = FakeTrainer(watchful(corpus, tmp_path, validation__enable=True)).load()
    trainer.train_step()
    assert trainer.job_config.validation.enable
    terminate()
    trainer.train_step()
    assert not trainer.job_config.validation.enable


class Machines:
    """This rank's machine is one of several, with a torchrun each; the other's rank may have had a SIGTERM."""

    def __init__(self, monkeypatch) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(preemption, "_APART_SECONDS", 0.5)
        monkeypatch.setattr(FakeTrainer, "close", lambda trainer: trainer.checkpointer.close(), raising=False)

    def are(self, number: int, restarts: int) -> None:
        self._monkeypatch.setenv("GROUP_WORLD_SIZE", str(number))
        self._monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))

    def other_is_asked(self) -> None:
        self._monkeypatch.setattr(Preemption, "asked_rank", lambda self: 7)


@pytest.fixture
def machines(monkeypatch):
    return Machines(monkeypatch)


def test_where_another_machine_leaves_the_ranks_save_and_ask_to_be_started_anew(
    corpus, expected, tmp_path, log, machines
):
    machines.are(2, restarts=3)
    config = watchful(corpus, tmp_path)
    trainer = FakeTrainer(config).load()
    machines.other_is_asked()
    with pytest.raises(SystemExit) as ended:
        trainer.train_step()
    assert ended.value.code == STAYS
    assert "data: this machine had no SIGTERM: its ranks end with status 75" in log.text
    assert read_entries(tmp_path / "checkpoint" / "step-1", ["cursor"]) == {"cursor": 12}


def test_it_does_so_before_the_first_step_too(corpus, tmp_path, machines):
    machines.are(2, restarts=3)
    trainer = FakeTrainer(watchful(corpus, tmp_path))
    machines.other_is_asked()
    with pytest.raises(SystemExit) as ended:
        trainer.load()
    assert ended.value.code == STAYS


@pytest.mark.parametrize(
    ("number", "restarts"), [pytest.param(1, 3, id="one machine"), pytest.param(2, 0, id="no restarts")]
)
def test_a_run_that_cannot_go_on_without_the_machine_ends_well(corpus, tmp_path, machines, number, restarts):
    machines.are(number, restarts)
    trainer = FakeTrainer(watchful(corpus, tmp_path)).load()
    machines.other_is_asked()
    trainer.train_step()
    assert not going(trainer)


def test_a_sigterm_that_comes_later_than_that_of_the_other_machine_ends_this_one_well(corpus, tmp_path, machines):
    """As when a machine joins: torchruns tell their ranks one after the other, and none may end before it is told."""
    machines.are(2, restarts=3)
    trainer = FakeTrainer(watchful(corpus, tmp_path)).load()
    machines.other_is_asked()
    timer = threading.Timer(0.2, terminate)
    timer.start()
    begun = time.monotonic()
    trainer.train_step()
    timer.join()
    assert not going(trainer)
    assert time.monotonic() - begun >= 0.2, "it waited for its own"


def test_an_ordinary_step_waits_for_nobody(corpus, tmp_path, machines, monkeypatch):
    machines.are(2, restarts=3)
    monkeypatch.setattr(Preemption, "machine_stays", lambda self: pytest.fail("asked"))
    FakeTrainer(watchful(corpus, tmp_path, checkpoint__interval=1)).load().train(2)


def test_a_signal_during_the_last_step_changes_nothing(corpus, tmp_path):
    trainer = FakeTrainer(watchful(corpus, tmp_path, training__steps=1)).load()
    terminate()
    trainer.train_step()
    assert loader_keys(tmp_path / "checkpoint" / "step-1") == [], "a model only, as it would have been"


def test_a_signal_during_a_checkpoint_is_kept_for_the_next_step(corpus, tmp_path, monkeypatch):
    trainer = FakeTrainer(watchful(corpus, tmp_path, checkpoint__interval=1)).load()
    dcp_save = trainer.checkpointer.dcp_save

    def interrupted(*args, **kwargs):
        terminate()
        return dcp_save(*args, **kwargs)

    monkeypatch.setattr(trainer.checkpointer, "dcp_save", interrupted)
    trainer.train_step()
    assert going(trainer)
    trainer.train_step()
    assert not going(trainer)
    for step in (1, 2):
        assert read_entries(tmp_path / "checkpoint" / f"step-{step}", ["cursor"])["cursor"] == 12 * step


def test_an_asynchronous_checkpoint_that_died_gives_way_to_the_last_one(corpus, tmp_path, log):
    class Died:
        def result(self):
            raise RuntimeError("Checkpoint background process is dead")

    trainer = FakeTrainer(watchful(corpus, tmp_path)).load()
    trainer.checkpointer.async_mode = "async_with_pinned_mem"
    trainer.checkpointer.save_future = Died()
    terminate()
    trainer.train_step()
    assert "the checkpoint before was not completed (Checkpoint background process is dead)" in log.text
    assert read_entries(tmp_path / "checkpoint" / "step-1", ["cursor"]) == {"cursor": 12}


def test_by_default_a_sigterm_is_left_alone(corpus, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    FakeTrainer(job(corpus, tmp_path)).load().train(1)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"checkpoint__enable": False}, "checkpoint.enable = false"),
        ({"checkpoint__load_only": True}, "checkpoint.load_only = true"),
    ],
)
def test_a_run_that_saves_nothing_is_refused_at_the_start(corpus, tmp_path, settings, found):
    with pytest.raises(ConfigError, match=rf'on_preempt = "checkpoint" saves a checkpoint, and with {found} none'):
        FakeTrainer(watchful(corpus, tmp_path, **settings))


def test_another_word_is_refused(corpus):
    with pytest.raises(ConfigError, match="data.on_preempt = 'save': expected 'stop' or 'checkpoint'"):
        type(job(corpus).data)(on_preempt="save")


def test_outside_the_main_thread_it_is_refused(corpus, tmp_path):
    errors = []

    def build() -> None:
        try:
            FakeTrainer(watchful(corpus, tmp_path))
        except ConfigError as error:
            errors.append(str(error))

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "main thread" in errors[0]


# Several ranks


def of_rank(rank: int, folder: str, asked: list[int]) -> None:
    dist.init_process_group("gloo")
    preemption = Preemption()
    answers = []
    for step in range(4):
        if asked[rank] == step:
            terminate()
        answers.append(preemption.asked_rank())
    (Path(folder) / str(rank)).write_text(json.dumps(answers))
    dist.destroy_process_group()


def test_all_ranks_give_the_same_answer_at_the_same_step(tmp_path):
    run_ranks(of_rank, 2, str(tmp_path), [1, 3])
    expected = [None, 0, 0, 1]  # at step 1 rank 0 had one, at step 3 rank 1 had one, too
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [expected] * 2


# TorchTitan's trainer itself, with worker processes


CONFIG = """
[data]
loading_strategy = "zephon"
on_preempt = "checkpoint"
cache_dir = "{corpus}/cache"
[[data.sources]]
name = "web"
path = "{texts}"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{tokenizer}"
[lr_scheduler]
total_steps = 100
[training]
local_batch_size = 2
global_batch_size = 12
seq_len = 8
steps = 1000000
mixed_precision_param = "float32"
dataloader = {{ num_workers = 2 }}
[checkpoint]
enable = true
interval = 1000000
[activation_checkpoint]
mode = "none"
"""


class Trainer:
    """A trainer in a process group of its own, as torchrun starts each rank."""

    def __init__(self, folder: Path, config: Path, name: str) -> None:
        self.record = folder / name / "rank-0.jsonl"
        # Of its own, and short: workers make sockets in it, whose whole path may have 107 bytes.
        self.temporary = Path(tempfile.mkdtemp())
        self.log = folder / f"{name}.log"
        self.meeting = Meeting()
        arguments = ["--job.config_file", str(config), "--job.dump_folder", str(folder)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scripts.recording_train", *arguments],
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    **self.meeting.environment(1),
                    "RANK": "0",
                    "LOCAL_RANK": "0",
                    "PYTHONPATH": str(REPOSITORY),
                    "RECORD_FOLDER": str(self.record.parent),
                    "TMPDIR": str(self.temporary),
                    "CUDA_VISIBLE_DEVICES": "",
                },
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def steps(self) -> list[dict]:
        # The line that is being written is not yet one.
        text = self.record.read_text() if self.record.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for_step(self, number: int) -> list[dict]:
        while len(self.steps()) < number:
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        return self.steps()

    def members(self) -> list[int]:
        """The group's processes that run."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(group) == self.process.pid and state != "Z":
                found.append(int(path.parent.name))
        return found

    def end(self) -> None:
        if self.members():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.temporary)


def left_in_shared_memory(pids: list[int]) -> list[str]:
    """Torch names its files there by the process that made them."""
    return [path.name for pid in pids for path in Path("/dev/shm").glob(f"torch_{pid}_*")]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
def test_a_real_run_ends_by_itself_goes_on_and_leaves_nothing_behind(corpus, expected, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(corpus=corpus.folder, texts=corpus.texts, tokenizer=corpus.tokenizer))
    first = Trainer(tmp_path, config, "first")
    try:
        first.wait_for_step(2)
        pids = first.members()
        assert len(pids) >= 3, "the trainer and two workers"
        os.killpg(first.process.pid, signal.SIGTERM)  # the workers get it, too
        assert first.process.wait(timeout=120) == 0, first.log.read_text()
        steps = first.steps()
        last = steps[-1]["step"]
        assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == [f"step-{last}"]
        assert "Training completed" in first.log.read_text()
        assert first.members() == left_in_shared_memory(pids) == list(first.temporary.glob("pymp-*")) == []
    finally:
        first.end()

    second = Trainer(tmp_path, config, "second")
    try:
        resumed = second.wait_for_step(1)[0]
        assert (resumed["step"], resumed["first"]) == (last + 1, steps[-1]["end"]) == (last + 1, 12 * last)
        pids = second.members()
        second.process.kill()
        second.process.wait()
        # A worker looks for its parent every 5 seconds.
        for _ in range(600):
            if not second.members():
                break
            time.sleep(0.1)
        assert second.members() == left_in_shared_memory(pids) == list(second.temporary.glob("pymp-*")) == []
    finally:
        second.end()
