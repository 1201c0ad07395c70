"""A run that gets a SIGTERM ends behind a whole step with a checkpoint that can be resumed, and leaves nothing behind."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.corpora import D60, make_corpus
from tests.resume import expected_stream
from tests.titan.jobs import FakeTrainer, job
from zephon_patches.errors import ConfigError
from zephon_patches.titan.entries import loader_keys, read_entries
from zephon_patches.titan.preemption import Preemption

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


def of_rank(rank: int, size: int, port: int, folder: str, asked: dict[int, int]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    preemption = Preemption()
    answers = []
    for step in range(4):
        if asked.get(rank) == step:
            terminate()
        answers.append(preemption.asked_rank())
    (Path(folder) / str(rank)).write_text(json.dumps(answers))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, [None] * 4),
        ({1: 2}, [None, None, 1, 1]),
        ({0: 1, 1: 3}, [None, 0, 0, 1]),
    ],
)
def test_all_ranks_give_the_same_answer_at_the_same_step(tmp_path, asked, expected):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(of_rank, (2, port, str(tmp_path), asked), nprocs=2)
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [expected] * 2
