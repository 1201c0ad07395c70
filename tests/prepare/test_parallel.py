"""Worker processes: the same bytes, however many; killed, failing, interrupted, orphaned."""

import os
import pickle
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.prepare.stores import (
    SHARD_BYTES,
    command,
    contents,
    file_input,
    open_store,
    processes_of,
    workers_of,
    write_compressed,
    write_mixed,
)
from tests.prepare.test_build import open_records, records_input
from zephon_patches.errors import InputError
from zephon_patches.prepare import finding, parallel
from zephon_patches.prepare.build import Building, open_or_build
from zephon_patches.prepare.builder import Builder
from zephon_patches.prepare.tokenizers import TextTokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@pytest.fixture
def mixed(tmp_path):
    return write_mixed(tmp_path)


def whole(folder: Path) -> dict[str, bytes]:
    return contents(open_store(folder, cache="whole", processor="tests.prepare.slowly:text").folder)


def store_folder(folder: Path) -> Path:
    (found,) = (folder / "cache" / "web").glob("*")
    return found


def check_store(folder: Path, expected: dict[str, bytes]) -> None:
    store = store_folder(folder)
    assert contents(store) == expected
    assert sorted(path.name for path in store.iterdir() if path.suffix in (".lock", "")) == ["plan.lock"]
    assert not list(store.rglob(".*"))


def wait_for(condition, what: str):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"waited in vain for {what}")


def units_done(folder: Path) -> int:
    return len(list((folder / "cache").glob("web/*/units/*.json")))


def ended(process) -> tuple[str, str]:
    output = process.communicate(timeout=60)
    wait_for(lambda: not processes_of(process.pid), "the end of all processes")
    return output


# --- the same bytes ---


@pytest.mark.parametrize("write", [write_mixed, write_compressed])
def test_bytes_do_not_depend_on_the_number_of_workers(tmp_path, write):
    write(tmp_path)
    expected = whole(tmp_path)
    building = Building(workers=3)
    tokenizer = TextTokenizer(tmp_path / "tokenizer")
    source = file_input(tmp_path, processor="tests.prepare.slowly:text")
    store = open_or_build(source, tokenizer, tmp_path / "cache", SHARD_BYTES, building=building)
    check_store(tmp_path, expected)
    assert store.num_documents == 60


@pytest.mark.parametrize(
    ("workers", "units", "expected"), [(8, 3, (3, 2)), (8, 1, (1, 8)), (2, 100, (2, 1)), (1, 9, (1, 1)), (4, 0, (1, 4))]
)
def test_fewer_units_than_workers_get_more_threads_each(workers, units, expected):
    assert parallel.share_out(workers, units) == expected


@pytest.mark.parametrize(
    ("units", "size", "expected"), [(9, 0, (8, 1)), (9, 1 << 20, (1, 8)), (9, 3 << 30, (6, 1)), (99, 1 << 40, (8, 1))]
)
def test_no_more_processes_are_started_than_pay_for_it_unless_asked_for(monkeypatch, units, size, expected):
    monkeypatch.setattr(parallel, "cores", lambda: 8)
    assert parallel.share_out(None, units, size) == expected
    assert parallel.share_out(8, units, size) == (8, 1)


def test_workers_have_their_number_of_threads_set_before_they_import_the_tokenizers(mixed, monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "7")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    with command(mixed, "--workers", 3, seconds=0.05) as process:
        pids = wait_for(lambda: len(found := workers_of(process.pid)) == 3 and found, "three workers")
        for pid in pids:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert b"TOKENIZERS_PARALLELISM=false" in variables
            assert b"RAYON_NUM_THREADS=1" in variables
        ended(process)
    with parallel._threads_of_workers(2):
        assert (os.environ["TOKENIZERS_PARALLELISM"], os.environ["RAYON_NUM_THREADS"]) == ("true", "2")
    assert os.environ["RAYON_NUM_THREADS"] == "7"
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def no_workers(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("started workers")

    monkeypatch.setattr(parallel, "run_workers", refuse)


def test_one_unit_or_an_input_that_cannot_be_sent_has_no_workers(mixed, monkeypatch):
    no_workers(monkeypatch)
    tokenizer = TextTokenizer(mixed / "tokenizer")
    open_or_build(file_input(mixed), tokenizer, mixed / "cache", 0, building=Building(workers=4))
    open_records(mixed, records_input(["0_0"]))
    source = file_input(mixed)
    source.cannot = lambda: None
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(source)
    store = open_or_build(source, tokenizer, mixed / "cache", SHARD_BYTES, building=Building(workers=4))
    assert store.num_documents == 60


def test_a_job_is_small_and_its_tokenizer_is_read_anew_and_compared(mixed):
    tokenizer = TextTokenizer(mixed / "tokenizer").with_ends(None, False, "here")
    folder, recipe = finding.locate(file_input(mixed), tokenizer, mixed / "cache", SHARD_BYTES)
    builder = Builder(file_input(mixed), tokenizer, folder, recipe)
    data = pickle.dumps(builder.job())
    assert len(data) < 4000
    other = pickle.loads(data).builder(pickle.loads(data).tokenizer())
    assert other.tokenizer.identity == tokenizer.identity != TextTokenizer(mixed / "tokenizer").identity
    path = mixed / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace('"0_0"', '"0_x"'))
    with pytest.raises(InputError, match="tokenizer: the tokenizer changed while it was used"):
        pickle.loads(data).tokenizer()


# --- what goes wrong ---


@pytest.mark.parametrize("workers", [1, 3])
def test_a_bad_record_reaches_the_user_as_the_same_one_message(mixed, workers):
    path = mixed / "texts" / "d" / "e.jsonl"
    path.write_text(path.read_text() + "\n{bad\n")
    process = command(mixed, "--workers", workers)
    out, err = ended(process)
    assert (process.returncode, out) == (1, "")
    assert "Traceback" not in err
    assert re.fullmatch(r"zephon-data prepare: \S+/d/e.jsonl, line 20: not a JSON record .*", err.splitlines()[-1])
    assert sum("not a JSON record" in line for line in err.splitlines()) == 1
    assert not list(store_folder(mixed).rglob(".*"))


def test_what_a_killed_worker_was_at_is_built_by_another(mixed):
    expected = whole(mixed)
    process = command(mixed, "--workers", 2, seconds=0.02)
    wait_for(lambda: units_done(mixed) >= 1, "a finished unit")
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    _, err = ended(process)
    assert process.returncode == 0, err
    assert "a worker process was killed by signal 9" in err
    check_store(mixed, expected)


def test_when_all_workers_are_killed_their_parent_builds(mixed):
    expected = whole(mixed)
    process = command(mixed, "--workers", 2, seconds=0.02)
    for pid in wait_for(lambda: len(found := workers_of(process.pid)) == 2 and found, "two workers"):
        os.kill(pid, signal.SIGKILL)
    _, err = ended(process)
    assert process.returncode == 0, err
    check_store(mixed, expected)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.1, 0.2, 0.4, 0.8])
def test_interrupted_at_any_moment_all_end_with_one_line_and_status_130(mixed, delay):
    expected = whole(mixed)
    process = command(mixed, "--workers", 3, seconds=0.1)
    line = process.stderr.readline()
    assert "tokenizing 8 of 8 units" in line  # right before the workers are started
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    sent = time.monotonic()
    out, err = ended(process)
    assert time.monotonic() - sent < 30
    assert (process.returncode, out) == (130, "")
    assert err.splitlines() == ["zephon-data prepare: interrupted; start it again to go on"]
    assert not list(store_folder(mixed).rglob(".*"))
    process = command(mixed, "--workers", 3)
    _, err = ended(process)
    assert process.returncode == 0, err
    check_store(mixed, expected)


@pytest.mark.parametrize("moment", ["start", "work"])
def test_a_killed_parent_leaves_no_orphans_and_the_rerun_no_temporary_files(mixed, moment):
    expected = whole(mixed)
    process = command(mixed, "--workers", 3, seconds=0.02)
    if moment == "start":
        wait_for(lambda: workers_of(process.pid), "a worker")
    else:
        wait_for(lambda: units_done(mixed) >= 1, "a finished unit")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not processes_of(process.pid), "the end of the workers")
    process = command(mixed, "--workers", 3)
    _, err = ended(process)
    assert process.returncode == 0, err
    check_store(mixed, expected)
