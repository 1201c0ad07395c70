"""Shared memory: what is handed out stays as it was for as long as anybody has it, and is used again behind that."""

import gc
import os
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zephon_patches.loader.slots import Filling, Slots, forks_share_no_item


def make(asked: int = 2, lent: int = 2, words: int = 10) -> tuple[Slots, Filling]:
    """Both sides, in this process."""
    slots = Slots(asked, lent, words)
    (file,) = slots.unsent
    filling = Filling(os.dup(file), slots.words)
    slots.sent()
    return slots, filling


def fill(slots: Slots, filling: Filling, value: int, words: int = 10) -> int:
    slot = slots.claim()
    filling.open(slot)
    filling.empty((words,))[:] = value
    return slot


def item(slots: Slots, filling: Filling, value: int) -> torch.Tensor:
    return torch.from_numpy(slots.take(fill(slots, filling, value), 10))


def test_what_one_side_fills_the_other_one_has():
    slots, filling = make(words=1000)
    slot = slots.claim()
    filling.open(slot)
    first, second = filling.empty((3, 5)), filling.empty((7,))
    first[:], second[:] = np.arange(15).reshape(3, 5), np.arange(100, 107)
    assert filling.used == 22
    assert [filling.word_of(part.__array_interface__["data"][0]) for part in (first, first[1:], second)] == [0, 5, 15]
    assert slots.take(slot, 22).tolist() == [*range(15), *range(100, 107)]


def test_what_does_not_fit_or_lies_elsewhere_is_an_error():
    slots, filling = make()
    filling.open(slots.claim())
    with pytest.raises(ValueError, match="words of an item do not fit into"):
        filling.empty((slots.words + 1,))
    filling.open(slots.claim())
    filling.empty((5,))
    for other in (np.zeros(5, dtype=np.int64), filling._values[(filling._first + 5) % filling._values.size :]):
        with pytest.raises(ValueError, match="lies elsewhere"):
            filling.word_of(other.__array_interface__["data"][0])


@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[3:],
        lambda tensor: tensor.as_strided((2, 4), (5, 1), 1),
        lambda tensor: tensor.numpy()[2:][1:],
        lambda tensor: np.asarray(tensor.view(2, 5))[:, 1:].T,
        lambda tensor: memoryview(tensor.numpy())[1:],
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: torch.from_dlpack(tensor),
        lambda tensor: torch.utils.data.default_convert({"a": [tensor.detach()]}),
        lambda tensor: list(tensor.split(5)),
    ],
)
def test_a_slot_is_not_used_again_while_anything_of_its_item_is_there(keep):
    slots, filling = make(asked=1, lent=1)
    kept = keep(item(slots, filling, 7))
    copies = [item(slots, filling, value) for value in range(20)]
    assert [int(each[0]) for each in copies] == list(range(20))
    assert filling._values.reshape(2, -1)[:, 0].tolist().count(7) == 1
    del kept, keep
    gc.collect()
    lent = item(slots, filling, 30)
    assert np.shares_memory(lent.numpy(), slots._values), "it is used again"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60), st.integers(1, 4), st.integers(0, 4))
def test_items_stay_as_they_were_however_long_each_is_kept(acts, asked, lent):
    slots, filling = make(asked, lent)
    under_way: list[tuple[int, int]] = []
    kept: dict[int, torch.Tensor] = {}
    for number, (takes, which) in enumerate(acts):
        if len(under_way) < asked:
            under_way.append((number, fill(slots, filling, number)))
        if takes and under_way:
            value, slot = under_way.pop(0)
            kept[value] = torch.from_numpy(slots.take(slot, 10))
        elif kept:
            del kept[list(kept)[which % len(kept)]]
        for value, tensor in kept.items():
            assert tensor.tolist() == [value] * 10
    for value, slot in under_way:
        assert slots.take(slot, 10).tolist() == [value] * 10


def test_no_more_is_lent_than_was_said_and_the_rest_are_copies():
    slots, filling = make(asked=1, lent=3)
    kept = [item(slots, filling, value) for value in range(10)]
    shared = [np.shares_memory(tensor.numpy(), slots._values) for tensor in kept]
    assert shared == [True] * 3 + [False] * 7
    assert [int(tensor[0]) for tensor in kept] == list(range(10))


def test_items_outlive_what_they_were_made_by():
    slots, filling = make()
    kept = item(slots, filling, 5)
    del slots, filling
    gc.collect()
    assert kept.tolist() == [5] * 10


def test_memory_goes_with_the_last_reference_and_without_the_garbage_collector():
    before = len(os.listdir("/dev/fd"))
    gc.disable()
    try:
        slots, filling = make()
        kept = item(slots, filling, 5)
        del slots, filling, kept
        assert len(os.listdir("/dev/fd")) == before
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("ours", [False, True])
def test_a_fork_keeps_the_items_that_are_there(ours):
    slots, filling = make(asked=1, lent=1)
    kept = item(slots, filling, 70)
    told, tell = os.pipe()
    if ours:
        with forks_share_no_item():
            pid = os.fork()
    else:
        pid = os.fork()
    if pid == 0:
        status = 2
        try:
            os.read(told, 1)
            status = int(kept.tolist() != [70] * 10)
        finally:
            os._exit(status)
    del kept
    later = [int(item(slots, filling, value)[0]) for value in range(8)]
    os.write(tell, b" ")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert later == list(range(8))
    assert status == (1 if ours else 0), "a fork of ours has no item, so its slot is used again"
    for file in (told, tell):
        os.close(file)


def test_without_memfd_the_file_has_no_name_either(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    slots, filling = make()
    assert item(slots, filling, 3).tolist() == [3] * 10
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="counts the pages of Linux's memory")
def test_what_no_item_uses_costs_no_memory():
    slots = Slots(4, 4, 10**9)
    file = os.dup(slots.unsent[0])
    filling = Filling(os.dup(file), slots.words)
    assert os.fstat(file).st_size >= 8 * 8 * 10**9
    for value in range(20):
        assert int(item(slots, filling, value)[9]) == value
    assert os.fstat(file).st_blocks * 512 <= 8 * 2**16, "bytes that are there"
    os.close(file)
