"""What a worker sends arrives as it was, and each byte of it once."""

import pickle

import pytest
import torch

from zephon_patches.errors import StoreError
from zephon_patches.loader.failure import failed_by
from zephon_patches.loader.pool import WorkerPool
from zephon_patches.loader.serve import SIZES, _reply, frame


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-100, 2**62, shape, dtype=torch.int64, generator=torch.Generator().manual_seed(0))


def views(rows: int, seq_len: int):
    """Inputs and labels in one buffer."""
    buffer = numbers(rows, seq_len + 1)
    return {"input": buffer[:, :-1]}, buffer[:, 1:]


def made_by_numpy(rows: int, seq_len: int):
    """The same where torch does not know that they share memory."""
    array = numbers(rows, seq_len + 1).numpy()
    return {"input": torch.from_numpy(array[:, :-1])}, torch.from_numpy(array[:, 1:])


ITEMS = {
    "views": (views(3, 7), 3 * 8),
    "views of NumPy": (made_by_numpy(3, 7), 3 * 8),
    "one row": (views(1, 5), 6),
    "one token": (views(4, 1), 4 * 2),
    "apart": (({"input": numbers(2, 5)}, numbers(2, 5)), 2 * 10),
    "with positions": (({**views(2, 5)[0], "positions": numbers(2, 5)}, numbers(2, 5)), 2 * 5 + 2 * 5 + 11),
    "large": (views(64, 4096), 64 * 4097),
}


class Fake:
    def read(self, rows):
        return ITEMS[rows][0]


@pytest.mark.parametrize("name", list(ITEMS))
def test_an_item_is_sent_once_and_arrives_as_it_was(name):
    (inputs, labels), words = ITEMS[name]
    pool = WorkerPool(Fake(), 1, 1, start_method="fork", timeout=60)
    try:
        ((got, got_labels),) = pool.items(iter([name]))
    finally:
        pool.close()
    assert set(got) == set(inputs) and all(torch.equal(got[key], inputs[key]) for key in inputs)
    assert torch.equal(got_labels, labels) and got_labels.dtype == torch.int64
    shares = got["input"].data_ptr() + 8 == got_labels.data_ptr()
    assert shares == (inputs["input"].data_ptr() + 8 == labels.data_ptr())
    head = _reply(ITEMS[name][0]).head
    assert SIZES.unpack(head[: SIZES.size])[1] == 8 * words


def test_a_frame_is_two_sizes_and_a_pickle():
    content = frame({"a": 1}, 24)
    size, behind = SIZES.unpack(content[:12])
    assert (size, behind, pickle.loads(content[12:])) == (len(content) - 12, 24, {"a": 1})


def test_errors_of_ours_keep_their_type_and_others_tell_it():
    assert failed_by(StoreError("x.bin: gone")) == (StoreError, "x.bin: gone")
    assert failed_by(OSError(5, "Input/output error"))[1] == "OSError: [Errno 5] Input/output error"
    assert failed_by(MemoryError())[1] == "MemoryError"
