"""Items that a thread takes in advance are the same ones, in the same order, with the same end."""

import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zephon_patches.errors import LoaderError
from zephon_patches.loader.ahead import Ahead


def ended(ahead: Ahead) -> bool:
    return ahead.stop(10)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_the_items_come_in_order_and_end_for_good(count, depth):
    ahead = Ahead(iter(range(count)), depth)
    assert list(ahead) == list(range(count))
    assert list(ahead) == []
    assert ended(ahead)


def test_an_error_comes_behind_the_items_before_it_and_again():
    def items():
        yield from "ab"
        raise ValueError("the third")

    ahead = Ahead(items(), 5)
    assert [next(ahead), next(ahead)] == ["a", "b"]
    for _ in range(2):
        with pytest.raises(ValueError, match="the third"):
            next(ahead)
    assert ended(ahead)


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_the_depth_is_taken_before_it_is_asked_for(depth):
    last = -1

    def items():
        nonlocal last
        while True:
            last += 1
            yield last

    ahead = Ahead(items(), depth)
    assert next(ahead) == 0  # with which the thread starts
    for asked in range(1, 9):
        until = time.monotonic() + 10
        while last < asked + depth // 2 and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.02)  # for one too many
        assert asked + depth // 2 <= last <= asked + depth - 1
        assert next(ahead) == asked
    assert ended(ahead)


def test_a_loop_without_a_pause_takes_items_itself():
    takers = []

    def items():
        for number in range(1000):
            takers.append(threading.current_thread())
            yield number

    ahead = Ahead(items(), 4)
    assert list(ahead) == list(range(1000))
    assert takers.count(threading.main_thread()) > 100, "some pauses on a busy machine aside"
    assert ended(ahead)


def test_an_item_that_is_there_is_handed_out_while_the_thread_waits_for_the_next_one():
    goes_on = threading.Event()

    def items():
        time.sleep(0.2)  # for the loop to wait, too
        yield 0
        goes_on.wait()
        yield 1

    ahead = Ahead(items(), 4)
    assert next(ahead) == 0
    goes_on.set()
    assert next(ahead) == 1
    assert ended(ahead)


def test_it_is_stopped_behind_the_item_that_is_taken():
    goes_on = threading.Event()
    left = []

    def items():
        try:
            yield 0
            goes_on.wait()
            yield 1
        finally:
            left.append(threading.current_thread().name)

    ahead = Ahead(items(), 5)
    assert next(ahead) == 0
    assert not ahead.stop(0.05)
    goes_on.set()
    assert ended(ahead)
    assert left == [], "it goes with who has it"
    del ahead
    assert left == ["MainThread"]


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_one_that_was_stopped_is_an_error_and_nobody_waits(taken):
    ahead = Ahead(itertools.count(), 2)
    for item in range(taken):
        assert next(ahead) == item
    assert ended(ahead)
    with pytest.raises(LoaderError, match=r"was stopped.*iter\(loader\) makes one"):
        for _ in range(3):  # two may be there
            next(ahead)


def test_one_that_is_dropped_ends_its_thread():
    ahead = Ahead(itertools.count(), 2)
    thread = ahead._thread
    next(ahead)
    del ahead
    thread.join(10)
    assert not thread.is_alive()


def test_it_may_be_stopped_in_its_own_thread_by_the_garbage_collector():
    stopped, made = [], threading.Event()

    def items():
        made.wait()
        stopped.append(ahead.stop(10))
        yield 0

    ahead = Ahead(items(), 1)
    made.set()
    assert next(ahead) == 0 and stopped == [False]
    assert ended(ahead)


AT_EXIT = """
import atexit, itertools, os, threading

@atexit.register
def last():  # the first that is registered
    os.write(1, repr([thread.name for thread in threading.enumerate()]).encode())

from zephon_patches.loader.ahead import Ahead
ahead = Ahead(itertools.count(), 2)
next(ahead)
"""


def test_its_thread_has_ended_when_the_interpreter_ends():
    # From Python 3.13 on who joins one that has not, as its iterator does, waits, and then gets an error.
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", AT_EXIT], cwd=root, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "['MainThread']", "")


def test_an_interrupt_while_the_thread_starts_stays_one(monkeypatch):
    def start(self) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("release unlocked lock")  # noqa: B904  (as threading's lock does)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        next(Ahead(itertools.count(), 2))
