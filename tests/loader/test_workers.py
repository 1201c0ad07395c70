"""Workers, how they start and how far they read ahead change nothing in the data or the state."""

import logging
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from tokenizers import Tokenizer

from tests.corpora import D240, make_corpus
from tests.resume import Place, Run, builder, check_steps, expected_stream, rows_of
from zephon_patches.errors import LoaderError, StoreError
from zephon_patches.loader import collate


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d240"), D240)


@pytest.fixture(scope="module")
def expected(corpus):
    return expected_stream(corpus, shard_bytes=3000)


@pytest.fixture(autouse=True)
def no_worker_is_left_over():
    before = set(multiprocessing.active_children())  # of a test that failed, whose traceback holds them
    yield
    assert set(multiprocessing.active_children()) <= before


def build(corpus, **loader):
    infinite = loader.pop("infinite", True)
    return builder(corpus, shard_bytes=3000, infinite=infinite, loader=loader)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_any_number_of_workers_gives_the_same_steps(corpus, expected, workers):
    run = Run(build(corpus), Place(2, 2, 12, workers))
    check_steps(run, expected, 30)  # into the second epoch


@pytest.mark.parametrize("prefetch", [1, 2, 8])
def test_reading_ahead_is_not_counted_and_changes_nothing(corpus, expected, prefetch):
    run = Run(build(corpus, prefetch_factor=prefetch), Place(1, 4, 12, 3))
    check_steps(run, expected, 5)
    time.sleep(0.1)  # for the workers to run ahead
    assert run.state()["cursor"] == 60
    resumed = Run(build(corpus), Place(2, 3))
    resumed.load(run.state())
    check_steps(resumed, expected, 10)
    check_steps(run, expected, 10)


def test_slow_workers_do_not_change_the_order(corpus, expected, monkeypatch):
    real = collate.MicroBatchReader.read

    def slow(self, *given):
        time.sleep(random.choice([0, 0, 0.02]))
        return real(self, *given)

    monkeypatch.setattr(collate.MicroBatchReader, "read", slow)
    check_steps(Run(build(corpus, multiprocessing_context="fork"), Place(1, 2, 12, 3)), expected, 6)


class Threads:
    """Threads that hold locks nearly all the time: of logging, standard error, Arrow, tokenizers, torch, allocators."""

    def __init__(self, tokenizer: Path, blas: bool) -> None:
        self._ended = threading.Event()
        log = logging.getLogger("tests.threads")
        log.propagate = False
        log.addHandler(logging.FileHandler(os.devnull))
        encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        matrix, tensor = np.ones((150, 150)), torch.ones(200, 200)
        column = pa.array(range(20_000))
        acts = [
            lambda: log.warning("permanently"),
            lambda: print("x", file=sys.stderr, end=""),
            lambda: tensor @ tensor,
            lambda: pc.sum(pc.multiply(column, column)),
            lambda: encoder.encode_batch(["0_0 0_1 0_2"] * 50),
            lambda: [bytearray(random.randrange(1, 10**6)) for _ in range(10)],
        ]
        acts += [lambda: matrix @ matrix] if blas else []
        self._threads = [threading.Thread(target=self._repeat, args=(act,)) for act in acts]

    def _repeat(self, act) -> None:
        while not self._ended.is_set():
            act()
            time.sleep(0.0005)

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


# A start takes a second where the worker imports torch anew. From Python 3.12 on a fork with threads warns, since the
# child may wait for a lock that a thread of its parent held.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method, starts", [("fork", 12), ("spawn", 1), ("forkserver", 1)])
def test_workers_may_start_in_any_way_in_a_parent_whose_threads_hold_locks(corpus, expected, method, starts):
    # With OpenBLAS, os.fork() itself does not return while another thread multiplies, with no loader in sight.
    with Threads(corpus.tokenizer, blas=method != "fork"):
        for _ in range(starts):
            run = Run(build(corpus, multiprocessing_context=method), Place(1, 6, 12, 2))
            run.load({**run.state(), "cursor": 84})
            check_steps(run, expected, 3)
            del run


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("target", [0, 36, 600])
def test_a_load_takes_effect_at_the_next_item_of_a_running_iterator(corpus, expected, persistent, target):
    run = Run(build(corpus, persistent_workers=persistent, prefetch_factor=4), Place(1, 4, 12, 2))
    run.start()
    for taken in (0, 1, 4):  # of 3 items a step
        for _ in range(taken):
            run.micro_step()
        run.load({**run.state(), "cursor": target})
        assert run.cursor == target
        check_steps(run, expected, 2)


def test_persistent_workers_stay_over_iterators_and_loads(corpus, expected):
    run = Run(build(corpus, persistent_workers=True), Place(1, 12, 12, 2))
    check_steps(run, expected, 2)
    before = set(multiprocessing.active_children())
    run.start()
    check_steps(run, expected, 2)
    run.load({**run.state(), "cursor": 300})
    check_steps(run, expected, 4)
    assert set(multiprocessing.active_children()) == before
    assert len(before) == 2


def test_workers_end_with_a_load_on_a_running_iterator(corpus, expected):
    run = Run(build(corpus), Place(1, 12, 12, 2))
    for _ in range(3):
        check_steps(run, expected, 1)
        run.load({**run.state(), "cursor": 0})
    check_steps(run, expected, 1)
    assert len(multiprocessing.active_children()) == 2


def test_iter_twice_goes_on_from_the_last_completed_step(corpus, expected):
    run = Run(build(corpus), Place(1, 4, 12, 2))
    run.start()
    for _ in range(4):
        run.micro_step()
    (old,) = run.iterators
    run.start()
    with pytest.raises(LoaderError, match="replaced by a later iter"):
        next(old)
    check_steps(run, expected, 3)


@pytest.mark.parametrize("persistent", [False, True])
def test_finite_data_ends_with_the_same_short_step(corpus, expected, persistent):
    run = Run(build(corpus, infinite=False, persistent_workers=persistent), Place(2, 5, 12, 2))
    delivered = []
    while rows := run.step():
        delivered += rows
    assert delivered == expected.rows(0, expected.epoch_samples)
    assert run.cursor == expected.epoch_samples


def test_no_global_random_state_is_touched(corpus):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    loader = build(corpus)(Place(1, 4, 12, 2), 0)
    iterator = iter(loader)
    for _ in range(10):
        next(iterator)
    loader.load_state_dict(loader.state_dict())
    next(iterator)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


def test_items_of_workers_are_freshly_allocated_and_share_memory_only_where_no_label_is_masked(corpus):
    loader = build(corpus)(Place(5, 2, 12, 2), 2)  # 3 of 12 rows, so every second item has a padding row
    items = [item for item, _ in zip(loader, range(20), strict=False)]
    kept = [rows_of(item) for item in items]
    for inputs, labels in items[::2]:
        inputs["input"].fill_(-1)
        labels.fill_(-1)
    assert [rows_of(item) for item in items[1::2]] == kept[1::2]
    assert {tuple(inputs["input"].shape) for inputs, _ in items} == {(2, 8)}


def test_what_is_sent_to_a_worker_is_small(corpus):
    loader = build(corpus)(Place(1, 4), 0)
    next(iter(loader))  # shards are mapped by now
    assert len(pickle.dumps(loader._reader)) < 2000


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_reading_reaches_the_consumer_with_the_file(tmp_path, workers):
    corpus = make_corpus(tmp_path, D240)
    loader = build(corpus)(Place(1, 4, 12, workers), 0)
    for path in (corpus.folder / "cache").rglob("*.bin"):
        path.unlink()
    with pytest.raises(StoreError, match=r"\.bin: cannot be opened") as error:
        next(iter(loader))
    traceback.clear_frames(error.tb)  # they hold the workers


def test_without_workers_their_settings_do_not_matter(corpus, expected):
    settings = {
        "prefetch_factor": 4,
        "persistent_workers": True,
        "multiprocessing_context": "spawn",
        "pin_memory": True,
    }
    check_steps(Run(build(corpus, **settings), Place(1, 12)), expected, 2)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_dropped_loader_ends_its_workers_at_once(corpus, persistent):
    # Freed by the garbage collector instead, in its order, torch would wait 5 seconds for each worker.
    before = set(multiprocessing.active_children())
    loader = build(corpus, persistent_workers=persistent)(Place(1, 12, 12, 2), 0)
    iterator = iter(loader)
    next(iterator)
    assert len(set(multiprocessing.active_children()) - before) == 2
    dropped = weakref.ref(loader)
    del loader, iterator
    assert dropped() is None
    assert set(multiprocessing.active_children()) == before


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals cannot be blocked")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_signals_of_others_do_not_end_workers(corpus, expected, method, monkeypatch):
    def send(*pids: int) -> None:
        for name in ("-TERM", "-INT", "-HUP", "-USR1", "-USR2"):
            subprocess.run(["kill", name, *map(str, pids)], check=True)

    start, workers = multiprocessing.process.BaseProcess.start, []

    def start_and_send(self) -> None:
        start(self)
        workers.append(self)
        send(self.pid)  # a spawned one imports for seconds now

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start_and_send)
    run = Run(build(corpus, multiprocessing_context=method), Place(1, 4, 12, 2))
    for _ in range(3):
        check_steps(run, expected, 2)
        send(*(worker.pid for worker in workers))
    assert len(workers) == 2 and all(worker.is_alive() for worker in workers)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == set(), "ours are as they were"
