"""What a worker puts into the memory that it shares arrives as it was."""

import os
import pickle
import resource
import signal
import time

import pytest
import torch

from zephon_patches.errors import LoaderError, ReadError, StoreError
from zephon_patches.loader import serve
from zephon_patches.loader.failure import ReadFailure, failed_by
from zephon_patches.loader.pool import WorkerPool
from zephon_patches.loader.serve import SIZE, frame


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-100, 2**62, shape, dtype=torch.int64, generator=torch.Generator().manual_seed(0))


def shared(rows: int, seq_len: int, empty):
    """Inputs and labels in one buffer."""
    buffer = empty((rows, seq_len + 1))
    buffer[:] = numbers(rows, seq_len + 1).numpy()
    return {"input": torch.from_numpy(buffer[:, :-1])}, torch.from_numpy(buffer[:, 1:])


def apart(rows: int, seq_len: int, empty, positions: bool = False):
    names = ["input", "labels", "positions"][: 2 + positions]
    made = {name: torch.from_numpy(empty((rows, seq_len))) for name in names}
    for tensor in made.values():
        tensor.copy_(numbers(rows, seq_len))
    labels = made.pop("labels") + 0
    found = torch.from_numpy(empty((rows, seq_len)))
    found.copy_(labels + 1)
    return made, found


ITEMS = {
    "views": lambda empty: shared(3, 7, empty),
    "one row": lambda empty: shared(1, 5, empty),
    "one token": lambda empty: shared(4, 1, empty),
    "apart": lambda empty: apart(2, 5, empty),
    "with positions": lambda empty: apart(2, 5, empty, positions=True),
    "large": lambda empty: shared(64, 4096, empty),
}


def fresh(shape):
    return torch.empty(shape, dtype=torch.int64).numpy()


class Fake:
    """A row names the item."""

    words = 64 * 4097

    def read(self, rows, empty):
        (name,) = rows[:1]
        if name == "no more files":  # as where a process has many open
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            name = "views"
        if name == "error":
            raise StoreError("cannot be read " + "and why " * 100_000)
        if name == "elsewhere":
            return shared(3, 7, fresh)
        if name == "too large":
            return shared(65, 4096, empty)
        return ITEMS[name](empty)


def items_of(names: list[str]) -> list:
    pool = open_pool()
    try:
        return list(pool.items(iter([[name] for name in names]), 2, Fake.words))
    finally:
        pool.close()


def check(item, name: str) -> None:
    (got, got_labels), (inputs, labels) = item, ITEMS[name](fresh)
    assert set(got) == set(inputs) and all(torch.equal(got[key], inputs[key]) for key in inputs)
    assert torch.equal(got_labels, labels) and got_labels.dtype == torch.int64
    shares = got["input"].data_ptr() + 8 == got_labels.data_ptr()
    assert shares == (inputs["input"].data_ptr() + 8 == labels.data_ptr())


@pytest.mark.parametrize("name", list(ITEMS))
def test_an_item_arrives_as_it_was(name):
    (item,) = items_of([name])
    check(item, name)


def test_items_of_one_layout_and_of_others_follow_each_other():
    names = ["views", "views", "apart", "apart", "views", "one row", "one row", "large", "views", "views"]
    for item, name in zip(items_of(names), names, strict=True):
        check(item, name)


@pytest.mark.parametrize(
    "name, text", [("elsewhere", "lies elsewhere"), ("too large", "words of an item do not fit into")]
)
def test_an_item_that_is_not_in_the_memory_is_an_error_and_no_other_item(name, text):
    with pytest.raises(ReadFailure, match=text) as caught:
        items_of(["views", "views", name, "views"])
    assert caught.value.kind is ReadError and caught.value.rows == [name]


def open_pool() -> WorkerPool:
    return WorkerPool(Fake(), 1, start_method="fork", timeout=60)


def test_larger_memory_that_does_not_come_is_an_error_and_no_other_item():
    pool = open_pool()
    try:
        assert len(list(pool.items(iter([["views"], ["no more files"], ["views"]]), 2, 100))) == 3
        with pytest.raises(ReadFailure, match=r"no descriptor left .*ulimit -n") as caught:
            list(pool.items(iter([["views"]] * 3), 2, Fake.words))
    finally:
        pool.close()
    assert caught.value.kind is LoaderError


def test_long_errors_and_large_requests_do_not_wait_for_each_other():
    # Each is larger than a socket has room for.
    large = ["error", *range(400_000)]
    pool = open_pool()
    try:
        items = pool.items(iter([["views"], *[large] * 6]), 4, Fake.words)
        check(next(items), "views")
        with pytest.raises(ReadFailure, match="cannot be read and why"):
            next(items)
    finally:
        pool.close()


@pytest.mark.parametrize("which", [1, 2])
def test_a_worker_that_dies_before_it_has_told_is_an_error_behind_what_it_has_told(monkeypatch, which):
    tell, told = serve.ring, []

    def ring(bell, number=1):
        told.append(number)
        if len(told) == which + 1:  # the first time it tells that it has started
            time.sleep(0.3)  # for a large request to wait for room meanwhile
            os.kill(os.getpid(), signal.SIGKILL)
        tell(bell, number)

    monkeypatch.setattr(serve, "ring", ring)
    names = ["views", "apart", "views", "apart", "views", "apart"]
    pool = open_pool()
    found = []
    try:
        with pytest.raises(ReadFailure, match="SIGKILL") as caught:
            found.extend(pool.items(iter([[name, *range(300_000)] for name in names]), 2, Fake.words))
    finally:
        pool.close()
    assert len(found) == which - 1 and caught.value.rows[0] == names[which - 1]
    for item, name in zip(found, names, strict=False):
        check(item, name)


def test_errors_that_are_dropped_leave_the_later_items_as_they_are():
    pool = open_pool()
    try:
        for names in (["views"] * 3, ["apart", "error", "error", "apart"], ["views"] * 3, ["apart"] * 3):
            items = pool.items(iter([[name] for name in names]), 4, Fake.words)
            check(next(items), names[0])
            assert pool.drop(60)
        check(next(pool.items(iter([["apart"]]), 4, Fake.words)), "apart")
    finally:
        pool.close()


def test_a_frame_is_a_size_and_a_pickle():
    content = frame({"a": 1})
    (size,) = SIZE.unpack(content[:4])
    assert (size, pickle.loads(content[4:])) == (len(content) - 4, {"a": 1})


def test_errors_of_ours_keep_their_type_and_others_tell_it():
    assert failed_by(StoreError("x.bin: gone")) == (StoreError, "x.bin: gone")
    assert failed_by(OSError(5, "Input/output error"))[1] == "OSError: [Errno 5] Input/output error"
    assert failed_by(MemoryError())[1] == "MemoryError"
