"""Workers that die, hang or have an error: said at once, with what they were to read; nothing is left of them."""

import faulthandler
import gc
import multiprocessing
import multiprocessing.util
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.corpora import D240, make_corpus
from tests.resume import Place, builder, expected_stream, rows_of
from zephon_patches import build_evaluation_loader
from zephon_patches.errors import ConfigError, InputError, LoaderError, ReadError, StoreError
from zephon_patches.loader import pool
from zephon_patches.loader.collate import MicroBatchReader
from zephon_patches.loader.pool import WorkerPool
from zephon_patches.loader.serve import serve
from zephon_patches.loader.workers import Delivery

REPOSITORY = Path(__file__).resolve().parents[2]
TWO_WORKERS = Place(1, 4, 12, 2)
LINUX = Path("/proc/self/stat").exists()

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="workers are forked, so that what is patched reaches them"
)


def children() -> set:
    """Processes of this one. multiprocessing also names, for a moment, one that another thread has waited for."""

    def is_there(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    return {child for child in multiprocessing.active_children() if is_there(child.pid)}


def workers() -> list:
    return [child for child in children() if child.name.startswith("reader-")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d240"), D240)


@pytest.fixture(scope="module")
def expected(corpus):
    return expected_stream(corpus, shard_bytes=3000)


def in_shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """Neither a process nor a file, whatever a test does to workers."""
    multiprocessing.util.get_temp_dir()  # one for the whole process, where it has none yet
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    processes, files = children(), in_shared_memory()
    yield
    assert children() <= processes
    ours = {name for name in in_shared_memory() - files if str(os.getpid()) in name}
    assert ours == set() and list(temporary.iterdir()) == []


def quietly(reader, channel, is_fork) -> None:
    faulthandler.disable()  # of pytest, which would tell of each signal
    serve(reader, channel, is_fork)


@pytest.fixture(autouse=True)
def deaths_are_quiet(monkeypatch):
    monkeypatch.setattr(pool, "serve", quietly)


def build(corpus, *, place=TWO_WORKERS, rank=0, config=None, **loader):
    loader = {"multiprocessing_context": "fork", **loader}
    return builder(corpus, shard_bytes=3000, loader=loader, **(config or {}))(place, rank)


def until_error(iterator, most: int = 200) -> tuple[Exception, int]:
    """The error of an iterator, and the items before it."""
    for count in range(most):
        try:
            next(iterator)
        except Exception as error:
            for kept in (error, error.__cause__, error.__context__):
                if kept is not None:
                    kept.__traceback__ = None  # it holds the loader
            return error, count
    raise AssertionError(f"{most} items and no error")


def check_goes_on(loader, expected) -> None:
    """A new iterator begins the step anew, with other workers."""
    start = loader.cursor
    iterator = iter(loader)
    for item in range(6):
        assert rows_of(next(iterator)) == expected.rows(start + 4 * item, start + 4 * item + 4)
    assert loader.cursor == start + 24


# --- dead ---


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT"])
def test_a_killed_worker_is_an_error_that_names_what_it_was_to_read(corpus, expected, name, persistent):
    loader = build(corpus, persistent_workers=persistent)
    iterator = iter(loader)
    for item in range(4):
        assert rows_of(next(iterator)) == expected.rows(4 * item, 4 * item + 4)
    victim = next(worker for worker in workers() if worker.name == "reader-1")
    os.kill(victim.pid, getattr(signal, name))
    error, count = until_error(iterator)
    assert type(error) is ReadError
    # What it had read before is still handed out, in order, so the item is one of worker 1.
    item = 4 + count
    assert item % 2 == 1
    text = str(error)
    assert f"worker 1 (process {victim.pid}) was killed by {name}" in text
    step, place = divmod(item, 3)
    assert f"item {place + 1} of 3 of the step at sample {12 * step}, on dp_rank 0 of 1" in text
    first = 4 * item
    assert f"numbers {first} to {first + 3}:" in text
    where = loader.order.locate(np.arange(first, first + 4))
    for n, shard, sample in zip(range(first, first + 4), where.shard, where.sample, strict=True):
        assert f"  {n}: source web, shard {int(shard):06d}" in text and f"sample {sample} of it" in text
    assert workers() == []
    assert len(text.splitlines()) == 7 and f"source web is {corpus.folder}" in text
    check_goes_on(loader, expected)


def test_all_workers_killed_while_nobody_waits_is_said_at_the_next_item_that_is_missing(corpus, expected):
    loader = build(corpus, place=Place(1, 4, 12, 3))
    iterator = iter(loader)
    next(iterator)
    for worker in workers():
        worker.kill()
        worker.join()
    begun = time.monotonic()
    error, _ = until_error(iterator)
    assert type(error) is ReadError and "SIGKILL" in str(error)
    assert time.monotonic() - begun < 60, "the timeout is 90 seconds, and it is not waited for"
    check_goes_on(loader, expected)


def test_a_persistent_worker_killed_between_two_passes_is_said(corpus, expected):
    loader = build(corpus, persistent_workers=True)
    next(iter(loader))
    workers()[0].kill()
    error, _ = until_error(iter(loader))
    assert type(error) is ReadError and "SIGKILL" in str(error)
    check_goes_on(loader, expected)


def test_a_store_file_that_becomes_shorter_under_a_worker_is_named(tmp_path):
    made = make_corpus(tmp_path / "corpus", D240)
    loader = build(made)
    iterator = iter(loader)
    next(iterator)
    for path in (made.folder / "cache").rglob("*.bin"):
        os.truncate(path, 0)  # checked where it is mapped, which is behind
    error, _ = until_error(iterator, 200)
    assert isinstance(error, ReadError | StoreError)
    assert "SIGBUS: a file of the store became shorter" in str(error) or "the manifest says" in str(error)
    assert "source web, shard " in str(error)


def test_a_worker_that_ends_before_it_begins_is_told_with_what_may_be_wrong(corpus, monkeypatch):
    monkeypatch.setattr(pool, "serve", lambda *arguments: os._exit(3))
    error, count = until_error(iter(build(corpus)))
    assert count == 0 and type(error) is ReadError
    assert "ended with status 3 before it could begin" in str(error) and '__name__ == "__main__"' in str(error)


def test_workers_that_cannot_be_started_are_an_error_and_the_others_end(corpus, monkeypatch):
    start, started = multiprocessing.process.BaseProcess.start, []

    def once(self) -> None:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        start(self)
        started.append(self)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", once)
    with pytest.raises(LoaderError, match=r"worker 1 of 2 cannot be started .*num_workers") as caught:
        next(iter(build(corpus)))
    traceback.clear_frames(caught.tb)
    assert len(started) == 1 and not started[0].is_alive()


# --- errors ---


class Odd(Exception):
    """Cannot be made from a text, or pickled."""

    def __init__(self, one, two) -> None:
        super().__init__("odd one")
        self.lock = threading.Lock()


def too_large():
    np.empty(2**50, dtype=np.int64)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    "act, text",
    [
        (lambda: {}["x"], "KeyError: 'x'"),
        (too_large, "MemoryError: Unable to allocate"),
        (lambda: os.open("/absent/file", os.O_RDONLY), "FileNotFoundError: .*'/absent/file'"),
        (lambda: (_ for _ in ()).throw(Odd(1, 2)), "Odd: odd one"),
        (lambda: next(iter(())), "StopIteration"),
    ],
    ids=["key", "memory", "file", "odd", "stop"],
)
def test_any_exception_in_reading_names_the_samples_and_keeps_its_cause(
    corpus, expected, monkeypatch, number, act, text
):
    calls, read = [], MicroBatchReader.read

    def fails(self, *given):
        calls.append(given)
        return read(self, *given) if len(calls) < (5 if number == 0 else 3) else act()

    loader = build(corpus, place=Place(2, 2, 12, number), rank=1)
    with monkeypatch.context() as patch:
        patch.setattr(MicroBatchReader, "read", fails)
        iterator = iter(loader)
        error, count = until_error(iterator)
    assert count == 4 and type(error) is ReadError
    assert re.match(text if "MemoryError" not in text else f".*{text}", str(error))
    assert "item 2 of 3 of the step at sample 12, on dp_rank 1 of 2, numbers 20 to 21:" in str(error)
    assert len(str(error).splitlines()) == 5
    assert error.__cause__ is not None
    if number:
        assert "act()" in str(error.__cause__), "the place in the code"
    # An end would look like that of the data.
    for _ in range(2):
        with pytest.raises(LoaderError, match=r"ended with an error; iter\(loader\) begins anew at sample 12"):
            next(iterator)
    assert loader.cursor == 12 and rows_of(next(iter(loader))) == expected.rows(18, 20)


@pytest.mark.parametrize("number", [0, 2])
def test_an_error_of_ours_stays_what_it_is(tmp_path, number):
    made = make_corpus(tmp_path / "corpus", D240)
    loader = build(made, place=Place(1, 4, 12, number))
    paths = list((made.folder / "cache").rglob("*.bin"))
    for path in paths:
        path.rename(path.with_suffix(".gone"))
    error, _ = until_error(iter(loader))
    assert type(error) is StoreError
    assert ".bin: cannot be opened" in str(error)
    assert "item 1 of 3 of the step at sample 0" in str(error) and "numbers 0 to 3:" in str(error)
    for path in paths:
        path.with_suffix(".gone").rename(path)
    check_goes_on(loader, expected_stream(made, shard_bytes=3000))


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_padding_rows_are_named_as_such(corpus, monkeypatch, packing):
    loader = build(corpus, place=Place(1, 7, 12, 1), config={"packing": packing})
    read, calls = MicroBatchReader.read, []
    monkeypatch.setattr(
        MicroBatchReader,
        "read",
        lambda self, *given: calls.append(given) or (read(self, *given) if len(calls) < 2 else [][0]),
    )
    error, count = until_error(iter(loader))
    assert count == 1 and "item 2 of 2 of the step at sample 0, on dp_rank 0 of 1, numbers 7 to 11:" in str(error)
    rows = str(error).splitlines()[2:-1]
    assert [row.split(": source")[0] for row in rows[:5]] == ["  7", "  8", "  9", "  10", "  11"]
    assert len(rows) == 7 and all(
        row.startswith("  source web") and row.endswith("(a padding row)") for row in rows[5:]
    )


@pytest.mark.parametrize("number", [0, 1])
def test_a_validation_pass_names_its_batch(corpus, monkeypatch, number):
    loader = build_evaluation_loader(
        corpus.config(shard_bytes=3000),
        corpus.tokenizer,
        seq_len=8,
        local_batch_size=4,
        num_batches=40,
        dp_rank=1,
        dp_size=2,
        num_workers=number,
        multiprocessing_context="fork",
    )
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    if number:
        workers()[0].kill()
    else:
        monkeypatch.setattr(MicroBatchReader, "read", lambda self, *given: {}["x"])
    error, count = until_error(iterator)
    assert type(error) is ReadError
    assert f"batch {3 + count} of 40 of a validation pass, on dp_rank 1 of 2" in str(error)
    assert "source web, shard " in str(error)


@pytest.mark.parametrize("number", [0, 2])
def test_an_error_of_the_plan_comes_behind_the_items_before_it(corpus, expected, number):
    loader = build(corpus, place=Place(1, 4, 12, number))
    plan = loader._plan()

    def fails():
        for _ in range(5):
            yield next(plan)
        raise InputError("no more")

    loader._plan = fails
    iterator = iter(loader)
    for item in range(5):
        assert rows_of(next(iterator)) == expected.rows(4 * item, 4 * item + 4)
    error, count = until_error(iterator)
    assert count == 0 and type(error) is InputError


@pytest.mark.parametrize("error", [AssertionError, KeyboardInterrupt])
@pytest.mark.parametrize("number", [0, 2])
def test_behind_an_error_without_a_text_comes_an_error_too(corpus, expected, number, error):
    loader = build(corpus, place=Place(1, 4, 12, number))
    iterator = iter(loader)
    next(iterator)

    def fails(item) -> None:
        raise error

    loader.on_item = fails
    with pytest.raises(error) as caught:
        next(iterator)
    traceback.clear_frames(caught.tb)  # they hold the workers
    loader.on_item = None
    for _ in range(2):
        with pytest.raises(LoaderError, match=rf"begins anew at sample 0, .*The error: {error.__name__}"):
            next(iterator)
    check_goes_on(loader, expected)


# --- hanging ---


def named_pipe(folder: Path):
    path = folder / "pipe"
    os.mkfifo(path)
    return lambda: path.read_bytes()  # waits for a writer, as a read waits for a server that is gone


@pytest.mark.parametrize("hangs, persistent", [("fifo", False), ("sleep", True), ("busy", False)])
def test_a_worker_that_hangs_in_reading_is_an_error_after_the_timeout(
    corpus, expected, tmp_path, monkeypatch, hangs, persistent
):
    act = {"fifo": named_pipe(tmp_path), "sleep": lambda: time.sleep(1000), "busy": busy}[hangs]
    read, calls = MicroBatchReader.read, []

    def hang(self, *given):
        calls.append(given)
        return read(self, *given) if len(calls) < 3 else act()

    loader = build(corpus, config={"worker_timeout": 2}, persistent_workers=persistent)
    with monkeypatch.context() as patch:
        patch.setattr(MicroBatchReader, "read", hang)
        error, count = until_error(iter(loader))
    assert type(error) is ReadError and count == 4, "each of two workers has read two"
    assert "worker 0 (process " in str(error) and "gave nothing for 2 seconds" in str(error)
    assert "item 2 of 3 of the step at sample 12" in str(error) and "numbers 16 to 19" in str(error)
    assert "data.worker_timeout" in str(error)
    assert workers() == []
    check_goes_on(build(corpus, persistent_workers=persistent), expected)


def busy() -> None:
    while True:
        pass


@pytest.mark.skipif(not LINUX, reason="a process's state is read from /proc")
def test_a_stopped_worker_is_an_error_that_says_so(corpus, expected):
    loader = build(corpus, config={"worker_timeout": 2})
    iterator = iter(loader)
    for _ in range(2):  # of both, which have started then
        next(iterator)
    stopped = workers()
    for worker in stopped:
        os.kill(worker.pid, signal.SIGSTOP)
    error, _ = until_error(iterator)
    assert type(error) is ReadError and "(it is stopped)" in str(error)
    assert not any(worker.is_alive() for worker in stopped)
    check_goes_on(loader, expected)


@pytest.mark.parametrize("name", ["SIGSTOP", "SIGKILL"])
def test_one_that_stops_or_dies_in_the_middle_of_an_item_is_an_error(corpus, expected, monkeypatch, name):
    read, calls = MicroBatchReader.read, []

    def half(self, rows, empty):
        calls.append(rows)
        if len(calls) == 6:
            empty((len(rows), 4))[:] = -1
            os.kill(os.getpid(), getattr(signal, name))
        return read(self, rows, empty)

    loader = build(corpus, config={"worker_timeout": 2}, place=Place(1, 4, 12, 1))
    with monkeypatch.context() as patch:
        patch.setattr(MicroBatchReader, "read", half)
        iterator = iter(loader)
        items = [next(iterator) for _ in range(5)]
        error, count = until_error(iterator)
    assert type(error) is ReadError and count == 0
    assert ("gave nothing" if name == "SIGSTOP" else "killed by SIGKILL") in str(error)
    assert "item 3 of 3 of the step at sample 12" in str(error)
    for number, item in enumerate(items):
        assert rows_of(item) == expected.rows(4 * number, 4 * number + 4)
    check_goes_on(loader, expected)


def test_a_slow_worker_is_waited_for(corpus, expected, monkeypatch):
    read = MicroBatchReader.read
    monkeypatch.setattr(MicroBatchReader, "read", lambda self, *given: time.sleep(0.3) or read(self, *given))
    for timeout in (30, 0):  # 0 for any time
        iterator = iter(build(corpus, config={"worker_timeout": timeout}, place=Place(1, 4, 12, 1)))
        assert rows_of(next(iterator)) == expected.rows(0, 4)


def test_many_large_requests_do_not_block_parent_and_worker_against_each_other(corpus):
    # Some 200 KB in a request and 1 MB in a reply, several on the way both ways; a socket has room for 200 KB.
    loader = build(corpus, place=Place(1, 15_000, 15_000, 1))
    assert [len(item["input"]) for (item, _), _ in zip(loader, range(2), strict=False)] == [15_000] * 2


@pytest.mark.parametrize("value", [-1, float("inf"), True, "90"])
def test_a_timeout_out_of_range_is_refused_by_name(corpus, value):
    with pytest.raises(ConfigError, match=r"data.worker_timeout = .*: expected a number of seconds"):
        build(corpus, config={"worker_timeout": value})


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"prefetch_factor": 0}, "prefetch_factor = 0: expected at least 1"),
        ({"multiprocessing_context": "thread"}, "multiprocessing_context = 'thread': expected one of"),
    ],
)
def test_settings_of_workers_out_of_range_are_refused_by_name(settings, text):
    with pytest.raises(ConfigError, match=text):
        Delivery(2, **settings)
    assert Delivery(0, **settings)


# --- unclean ends ---


def test_an_abandoned_iterator_ends_its_workers_also_where_they_hang_or_are_stopped(corpus, monkeypatch):
    read, calls = MicroBatchReader.read, []

    def hang(self, *given):
        calls.append(given)
        return read(self, *given) if len(calls) < 2 else time.sleep(1000)

    monkeypatch.setattr(MicroBatchReader, "read", hang)
    loader = build(corpus, place=Place(1, 4, 12, 3))
    iterator = iter(loader)
    next(iterator)
    ours = workers()
    os.kill(ours[0].pid, signal.SIGSTOP)
    del iterator
    assert len(ours) == 3 and workers() == [] and not any(worker.is_alive() for worker in ours)


def test_an_interrupt_while_waiting_leaves_a_loader_that_goes_on(corpus, expected, monkeypatch):
    loader = build(corpus, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    for worker in workers():
        os.kill(worker.pid, signal.SIGSTOP)
    main = threading.main_thread().ident
    timer = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        while True:
            next(iterator)
    timer.join()
    traceback.clear_frames(caught.tb)
    assert workers() == []
    with pytest.raises(LoaderError, match=r"iter\(loader\) begins anew .*The error: KeyboardInterrupt"):
        next(iterator)  # an end would look like that of the data
    check_goes_on(loader, expected)
    loader._items._pool.close()  # of persistent workers


def test_an_interrupt_while_workers_end_leaves_none_and_a_loader_that_goes_on(corpus, expected, monkeypatch):
    loader = build(corpus, persistent_workers=True)
    next(iter(loader))
    join, calls = multiprocessing.process.BaseProcess.join, []

    def interrupted(self, timeout=None):
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return join(self, timeout)

    ours = workers()
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loader._items._pool.close()
    for worker in ours:
        join(worker, 10)
    assert len(ours) == 2 and workers() == []
    check_goes_on(loader, expected)
    loader._items._pool.close()


INTERRUPTED = """
import random, signal, sys, threading
from pathlib import Path
from tests.corpora import Corpus, D240
from tests.resume import Place, builder, expected_stream, rows_of

def interrupt():  # to this thread, which has it blocked while workers start
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

corpus = Corpus(Path({folder!r}), list(D240), True)
expected = expected_stream(corpus, shard_bytes=3000)
settings = dict(persistent_workers={persistent}, multiprocessing_context="fork")
loader = builder(corpus, shard_bytes=3000, loader=settings)(Place(1, 4, 12, 2), 0)
sys.unraisablehook = lambda *_: None
came, others, seed = 0, [], random.Random(0)
for _ in range(60):
    start = loader.cursor
    timer = threading.Timer(seed.uniform(0.001, 0.08), interrupt)
    try:
        timer.start()
        for item, found in zip(range(2000), loader):  # an interrupt may be lost in a callback of Python's
            n = start + 4 * item
            if rows_of(found) != expected.rows(n, n + 4):
                sys.exit(f"wrong samples at {{n}}")
    except KeyboardInterrupt:
        came += 1
    except Exception as error:
        others.append(repr(error))
    try:
        timer.join()
    except KeyboardInterrupt:
        pass
assert len(others) <= 3, others  # Python's own modules are not prepared for one at any moment
assert rows_of(next(iter(loader))) == expected.rows(loader.cursor, loader.cursor + 4)
print(came)
"""


@pytest.mark.slow  # Python's own modules are not prepared for an interrupt at any moment: now and then it does not end
@pytest.mark.parametrize("persistent", [False, True])
def test_interrupts_at_any_time_leave_a_loader_that_goes_on_with_the_right_samples(corpus, persistent):
    build(corpus)  # the store is there
    script = INTERRUPTED.format(folder=str(corpus.folder), persistent=persistent)
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0 and int(ran.stdout) > 30, ran.stderr[-3000:]


def test_another_thread_that_waits_for_an_item_gets_an_error_when_the_loader_begins_anew(corpus, monkeypatch):
    read = MicroBatchReader.read
    monkeypatch.setattr(MicroBatchReader, "read", lambda self, *given: time.sleep(0.1) or read(self, *given))
    items = build(corpus, persistent_workers=True)._items
    plan = [[(0, 0, sample, False)] * 4 for sample in range(8)] * 50
    old, ended = items.items(iter(plan)), []

    def takes() -> None:
        try:
            for _ in old:
                pass
        except Exception as error:
            ended.append((type(error), str(error)))

    thread = threading.Thread(target=takes)
    thread.start()
    time.sleep(0.5)
    expected = [rows_of(items._reader.read(rows)) for rows in plan[5:9]]
    assert [rows_of(item) for item, _ in zip(items.items(iter(plan[5:])), range(4), strict=False)] == expected
    thread.join(30)
    assert not thread.is_alive() and [kind for kind, _ in ended] == [LoaderError] and "was stopped" in ended[0][1]
    items._pool.close()


@pytest.mark.parametrize("number", [0, 2])
def test_a_thread_that_cannot_be_started_is_an_error_that_says_what_to_raise(corpus, expected, monkeypatch, number):
    loader = build(corpus, place=Place(1, 4, 12, number))
    start = threading.Thread.start

    def fails(self) -> None:
        if self.name == "items-ahead":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        if number:
            error, count = until_error(iter(loader))
            assert type(error) is LoaderError and count == 0 and "ulimit -u" in str(error)
    check_goes_on(loader, expected)


def test_a_persistent_worker_whose_first_read_hangs_is_replaced_when_the_loader_begins_anew(
    corpus, expected, monkeypatch
):
    read = MicroBatchReader.read

    def hang(self, rows, empty):
        if multiprocessing.current_process().name == "reader-2":
            time.sleep(1000)
        return read(self, rows, empty)

    loader = build(corpus, place=Place(1, 4, 12, 3), persistent_workers=True, prefetch_factor=2)
    with monkeypatch.context() as patch:
        patch.setattr(MicroBatchReader, "read", hang)
        next(iter(loader))
    check_goes_on(loader, expected)
    loader._items._pool.close()


@pytest.mark.parametrize("number", [0, 2])
def test_items_in_inference_mode_do_not_depend_on_which_thread_takes_them(corpus, number):
    with torch.inference_mode():
        kinds = {
            tensor.is_inference()
            for (inputs, labels), _ in zip(build(corpus, place=Place(1, 4, 12, number)), range(40), strict=False)
            for tensor in (inputs["input"], labels)
        }
    assert len(kinds) == 1


@pytest.mark.skipif(not LINUX, reason="counts descriptors in /proc")
@pytest.mark.parametrize("free", range(14))
def test_want_of_descriptors_is_an_error_and_leaves_none(corpus, expected, free):
    loader = build(corpus, place=Place(1, 4, 12, 2))
    next(iter(loader))  # what is opened once is open
    gc.collect()
    used = [int(name) for name in os.listdir("/proc/self/fd")]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(max(used) + 2 - len(used))]  # no gap is left
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(*used, *taken) + 1 + free, limits[1]))
    try:
        error, _ = until_error(iter(loader))
    except AssertionError:
        error = None  # there were enough
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in taken:
            os.close(file)
    assert error is None or isinstance(error, LoaderError | ReadError), error
    assert free > 3 or isinstance(error, LoaderError)
    del error  # it may hold the workers
    gc.collect()
    # Where its second pipe cannot be made Python's multiprocessing leaves the first one.
    assert workers() == [] and len(os.listdir("/proc/self/fd")) <= len(used) + 2
    check_goes_on(loader, expected)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("persistent", [False, True])
def test_what_a_fork_does_with_an_iterator_is_nothing_to_its_parent(corpus, expected, persistent):
    loader = build(corpus, persistent_workers=persistent)
    iterator = iter(loader)
    assert rows_of(next(iterator)) == expected.rows(0, 4)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with pytest.raises(LoaderError, match="another process's"):
                for _ in range(4):  # some are there
                    next(iterator)
            del iterator
            loader.seek(24)
            assert rows_of(next(iter(loader))) == expected.rows(24, 28), "by workers of its own"
            loader = None
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for item in range(1, 12):
        assert rows_of(next(iterator)) == expected.rows(4 * item, 4 * item + 4)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_that_its_own_thread_collects_as_garbage_ends_its_workers(corpus, monkeypatch, persistent):
    loader = build(corpus, persistent_workers=persistent, prefetch_factor=2, place=Place(1, 4, 12, 1))
    plan, dropped, unraisable = loader._plan(), threading.Event(), []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)

    def collects():
        for number, rows in enumerate(plan):
            if number == 4:  # in the thread that takes items, which takes some at the start
                dropped.wait()
                gc.collect()
            yield rows

    loader._plan = collects
    cycle = [loader, iter(loader)]
    next(cycle[1])
    cycle.append(cycle)
    ours = workers()
    gc.disable()
    try:
        del loader, cycle
        dropped.set()
        for worker in ours:
            worker.join(10)
    finally:
        gc.enable()
    assert len(ours) == 1 and workers() == [] and unraisable == []


# One of three workers is stopped when the script ends.
RUNS = """
next(iterator)
os.write(1, b"ready")
os.kill(loader._items._pool._workers[1].process.pid, signal.SIGSTOP)
"""

# None of them serves yet.
STARTS = """
def late(*arguments):
    time.sleep(2)
    serve(*arguments)

pool.serve = late
workers = pool.WorkerPool(loader._reader, 3, start_method="fork")
os.write(1, b"ready")
"""

ENDS = {
    "end": (RUNS, 0),
    "exception": (RUNS + "raise RuntimeError('the training loop')", 1),
    "SIGTERM": (RUNS + "os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGKILL while they start": (STARTS + "os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}

SCRIPT = """
import os, signal, sys, time
from tests.corpora import Corpus, D240
from tests.resume import Place, builder
from zephon_patches.loader import pool
from zephon_patches.loader.collate import MicroBatchReader
from zephon_patches.loader.serve import serve
from pathlib import Path
corpus = Corpus(Path({folder!r}), list(D240), True)
settings = dict(persistent_workers=True, multiprocessing_context="fork")
loader = builder(corpus, shard_bytes=3000, loader=settings)(Place(1, 4, 12, 3), 0)
iterator = iter(loader)
{end}
"""


@pytest.mark.skipif(not LINUX, reason="looks at processes as Linux shows them")
@pytest.mark.parametrize("end", list(ENDS))
def test_a_parent_that_ends_uncleanly_leaves_no_worker(corpus, end, tmp_path):
    statement, expected_status = ENDS[end]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(folder=str(corpus.folder), end=statement))
    build(corpus)  # the store is there
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = process.wait(timeout=120)
        assert (status, log.read_text()[:5]) == (expected_status, "ready"), log.read_text()
        assert status or log.read_text() == "ready", "nothing more is said at an end"
        left = members(process.pid)
        for _ in range(100):
            # The one that is stopped cannot see that its parent is gone until it goes on.
            for pid in left if end == "SIGTERM" else ():
                os.kill(pid, signal.SIGCONT)
            if not (left := members(process.pid)):
                break
            time.sleep(0.1)
        assert left == []
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)


def members(session: int) -> list[int]:
    """Processes of a session that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def test_a_pool_closes_as_often_as_one_likes(corpus):
    loader = build(corpus)
    made = WorkerPool(loader._reader, 2, start_method="fork")
    assert made.is_open and len(workers()) == 2
    made.close()
    made.close()
    assert not made.is_open and workers() == []


@pytest.mark.parametrize("number", [0, 1])
def test_pinned_memory_is_what_tensors_lie_in(corpus, expected, monkeypatch, number):
    # Without an accelerator there is none, so it is looked what is asked for.
    pinned = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.clone()) or pinned[-1])
    iterator = iter(build(corpus, pin_memory=True, place=Place(1, 4, 12, number)))
    items = [next(iterator) for _ in range(20)]
    for at, (inputs, labels) in enumerate(items):
        assert rows_of((inputs, labels)) == expected.rows(4 * at, 4 * at + 4)
        for tensor in (inputs["input"], labels):
            assert tensor.untyped_storage().data_ptr() in {each.untyped_storage().data_ptr() for each in pinned}
