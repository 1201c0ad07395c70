"""A bell wakes who waits, also where there is no eventfd."""

import os
import select
import threading

import pytest

from zephon_patches.loader.bell import Bell, hear, hear_all, ring


@pytest.fixture(params=["eventfd", "pipe"])
def kind(request, monkeypatch):
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)
    elif not hasattr(os, "eventfd"):
        pytest.skip("no eventfd here")


def is_ringing(bell: Bell) -> bool:
    return bool(select.select([bell.hearing], [], [], 0)[0])


def test_rings_are_counted(kind):
    bell = Bell(counts=True)
    for _ in range(3):
        ring(bell.ringing)
    for _ in range(3):
        assert is_ringing(bell)
        hear(bell.hearing)
    assert not is_ringing(bell)
    bell.close()


def test_all_rings_are_heard_at_once_with_the_sum_of_their_numbers_and_a_later_one_by_itself(kind):
    bell = Bell(counts=False)
    for number in (1, 2**32 + 1, 1):
        ring(bell.ringing, number)
    assert hear_all(bell.hearing) == 2**32 + 3
    assert not is_ringing(bell)
    ring(bell.ringing, 5)
    assert hear_all(bell.hearing) == 5
    bell.close()


def test_who_waits_is_woken(kind):
    bell, heard = Bell(counts=True), threading.Event()
    thread = threading.Thread(target=lambda: (hear(bell.hearing), heard.set()))
    thread.start()
    assert not heard.wait(0.05)
    ring(bell.ringing)
    assert heard.wait(10)
    thread.join()
    bell.close()


def test_it_is_closed_and_no_descriptor_is_left(kind):
    before = len(os.listdir("/dev/fd"))
    Bell(counts=True).close()
    assert len(os.listdir("/dev/fd")) == before
