"""A disk that is full when a checkpoint or a trace is written: small file systems in memory, as only root can mount."""

import logging
import os
import re
import shutil
import subprocess

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from tests.corpora import D60, make_corpus
from tests.prepare.test_disk import mount
from tests.resume import expected_stream
from tests.titan.jobs import BATCH, FakeTrainer, job
from tests.trace.runs import view_of
from zephon_patches.errors import ConfigError
from zephon_patches.titan import tracing
from zephon_patches.trace.audit import audit_run

PAGE = os.sysconf("SC_PAGE_SIZE")
SAVED, DISK = 2, 256 * PAGE


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d60"), D60)


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    mount(folder, f"size={DISK}")
    yield folder
    FakeTrainer.close_all()
    subprocess.run(["umount", "-l", folder], check=True)


def leave(folder, pages: int) -> None:
    """Fills a disk up to some pages."""
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    filler.write_bytes(bytes(max(free - pages * PAGE, 0)))


def make_room(folder) -> None:
    (folder / "filler").unlink()


def rows_of_step(stream, step: int) -> list:
    return [stream[n] for n in range((step - 1) * BATCH, step * BATCH)]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_checkpoint_that_finds_the_disk_full_at_any_point_ends_the_run_and_the_one_before_is_resumed(
    corpus, disk, mode
):
    """By one page of room more each time, from none to enough; with async the error comes at the next save."""
    config = job(corpus, disk, checkpoint__async_mode=mode)
    trainer = FakeTrainer(config).load()
    trainer.train(SAVED)
    trainer.checkpointer.close()
    trainer.checkpointer._async_wait()
    stream, failed = expected_stream(corpus), 0
    half = disk / "checkpoint" / f"step-{SAVED + 1}"
    for pages in range(0, 40, 1 if mode == "disabled" else 7):
        leave(disk, pages)
        trainer = FakeTrainer(config).load()
        assert (trainer.step, trainer.dataloader.cursor) == (SAVED, SAVED * BATCH)
        try:
            trainer.train(1)
            trainer.checkpointer._async_wait()
        except CheckpointException as error:  # a BaseException, so the run ends
            failed += 1
            assert "No space left on device" in str(error)
            assert not (half / ".metadata").exists()
        else:
            break
        make_room(disk)
        shutil.rmtree(half, ignore_errors=True)  # its pages are free again
    assert failed >= (10 if mode == "disabled" else 2)
    assert (half / ".metadata").exists()
    make_room(disk)
    resumed = FakeTrainer(config).load()
    assert resumed.step == SAVED + 1
    assert resumed.train_step() == rows_of_step(stream, SAVED + 2)


def test_a_step_that_was_half_written_is_written_anew_by_the_run_that_goes_on(corpus, disk):
    config = job(corpus, disk)
    FakeTrainer(config).load().train(SAVED)
    leave(disk, 1)
    with pytest.raises(CheckpointException, match="No space left on device"):
        FakeTrainer(config).load().train(1)
    make_room(disk)
    trainer = FakeTrainer(config).load()
    stream = expected_stream(corpus)
    for step in range(SAVED + 1, SAVED + 4):
        assert trainer.train_step() == rows_of_step(stream, step)
        assert (disk / "checkpoint" / f"step-{step}" / ".metadata").exists()
    assert FakeTrainer(config).load().step == SAVED + 3


def test_a_trace_that_finds_the_disk_full_ends_and_the_audit_says_what_is_missing(corpus, disk, tmp_path, caplog):
    config = job(corpus, disk, data__trace=True, checkpoint__enable=False)
    trainer = FakeTrainer(config).load()
    leave(disk, 0)
    stream = expected_stream(corpus)
    for step in range(1, 60):  # the page of the file's first line has room for some more
        assert trainer.train_step() == rows_of_step(stream, step)
    [error] = [
        record.getMessage()
        for record in caplog.records
        if record.name == tracing.__name__ and record.levelno == logging.ERROR
    ]
    assert re.search(r"the trace .*rank-00000\.jsonl ends here, it cannot be written \(.*No space left", error)
    make_room(disk)
    path = tmp_path / "run.toml"
    path.write_text(
        f'[data]\ncache_dir = "{corpus.folder / "cache"}"\n[[data.sources]]\nname = "web"\npath = "{corpus.texts}"\n'
        f'[model]\nhf_assets_path = "{corpus.tokenizer}"\n[training]\nseq_len = 8\nglobal_batch_size = {BATCH}\n'
    )
    audit = audit_run(disk, view_of(path))
    assert audit.faults == [] and 0 < audit.steps < 59
    (trace,) = disk.glob("data_trace/*/rank-00000.jsonl")
    ends_in_a_line = not trace.read_bytes().endswith(b"\n")  # or by chance behind one
    assert any("killed while it wrote a line" in note for note in audit.notes) == ends_in_a_line


def test_a_trace_that_cannot_begin_is_an_error_at_the_start(corpus, disk):
    leave(disk, 0)
    with pytest.raises(ConfigError, match=r"data_trace: .*No space left on device.*data\.trace = false"):
        FakeTrainer(job(corpus, disk, data__trace=True, checkpoint__enable=False)).load()
