"""What a worker process does: reads the micro-batches that its parent asks for, into memory that both have.

Its main thread takes a request, reads, and says that it has; another one ends the process when its parent has closed
the socket or is gone, whatever the main one hangs in.

A frame is the length of a pickle (u32), and the pickle. A request is a frame in the socket: the size of a slot
(``slots.py``), whether a descriptor of the memory comes with it, as with the first one, and the slot and the rows of
each micro-batch. Behind the start of each the worker's bell (``bell.py``) is rung.

When a worker has started, and for each micro-batch, in their order, it rings its parent's bell. The number is 1 where
the item lies in its slot as the one before it did in its own, nearly always. Else it is ``FRAME`` + 1, and a frame that
is in the socket by then says which micro-batch it is, and where the item's tensors lie, or what went wrong.
"""

import gc
import multiprocessing
import os
import pickle
import select
import signal
import socket
import struct
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from zephon_patches.errors import LoaderError, ZephonError
from zephon_patches.loader.bell import hear, ring
from zephon_patches.loader.collate import MicroBatchReader, Row
from zephon_patches.loader.failure import failed_by
from zephon_patches.loader.slots import Filling

__all__ = ["FRAME", "LABELS", "SIGNALS", "SIZE", "Failed", "Filled", "Request", "View", "frame", "serve"]

SIZE = struct.Struct("<I")

FRAME = 2**32

LABELS = ""  # of a view, where the others have their names

# What a process group may get and workers must not act on.
SIGNALS = {
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name) and hasattr(signal, "pthread_sigmask")
}

# Milliseconds after which a forked worker looks for its parent.
_LOOK = 1000

Request = tuple[int, bool, list[tuple[int, Sequence[Row]]]]
"""Words of a slot; whether their memory comes with it; slot and rows of each micro-batch. Plain tuples pickle in a
fraction of the time, as in a reply."""

View = tuple[str, int, tuple[int, ...], tuple[int, ...]]
"""Where a tensor lies in the words of an item: name, first word, shape, strides"""

Filled = tuple[int, list[View]]
"""Words of an item, and its tensors"""


class Failed(NamedTuple):
    """In place of an item: what ``failed_by`` makes of an error, and where it was."""

    kind: type[ZephonError]
    reason: str
    traceback: str


def serve(reader: MicroBatchReader, channel: socket.socket, is_fork: bool) -> None:
    """Reads what it is asked for until its parent ends the connection, or is gone.

    Args:
        is_fork: Whether this process is its parent's fork. It has its parent's end of the socket, too, so that end does
            not come when the parent dies.
    """
    if SIGNALS:  # a forkserver that started elsewhere has not inherited the mask
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    torch.set_num_threads(1)  # the threads of a pool are not there behind a fork
    gc.freeze()  # the collector would write to all that a fork shares with its parent, and so copy it
    threading.Thread(target=_watch, args=(channel, is_fork), daemon=True).start()
    with _exit_at_end():
        _, bells, _, _ = socket.recv_fds(channel, 1, 2)
        if len(bells) < 2:
            raise _no_descriptor()
        asked, read = bells
        ring(read)  # has started
        memory: Filling | None = None
        last: Filled | None = None
        done = 0
        while True:
            hear(asked)
            (words, comes, requests), files = _receive(channel)
            if comes:
                memory = Filling(files[0], words) if files else None
            for slot, rows in requests:
                reply = _fill(reader, rows, memory, slot)
                done += 1
                if reply == last:
                    ring(read)
                    continue
                channel.sendall(frame((done, reply)))
                ring(read, FRAME + 1)
                if not isinstance(reply, Failed):
                    last = reply


def _watch(channel: socket.socket, is_fork: bool) -> None:
    parent = multiprocessing.parent_process()
    hang_up = select.poll()
    hang_up.register(channel, select.POLLHUP)
    with _exit_at_end():
        while not hang_up.poll(_LOOK):
            if is_fork and parent is not None and os.getppid() != parent.pid:
                return


@contextmanager
def _exit_at_end() -> Iterator[None]:
    """Ends the process, whatever its other threads do, without what it may have inherited to be done at exit."""
    try:
        yield
    except (ConnectionError, EOFError):  # the parent has closed, or is gone
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _receive(channel: socket.socket) -> tuple[Request, list[int]]:
    head, files, _, _ = socket.recv_fds(channel, SIZE.size, 1)
    head += _exactly(channel, SIZE.size - len(head)) if head else b""
    if not head:
        raise EOFError
    return pickle.loads(_exactly(channel, SIZE.unpack(head)[0])), files


def _exactly(channel: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        count = channel.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return content


def frame(content: Any) -> bytes:
    pickled = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return SIZE.pack(len(pickled)) + pickled


def _fill(reader: MicroBatchReader, rows: Sequence[Row], memory: Filling | None, slot: int) -> Filled | Failed:
    try:
        if memory is None:
            raise _no_descriptor()
        memory.open(slot)
        inputs, labels = reader.read(rows, memory.empty)
        return memory.used, [
            (name, memory.word_of(tensor.data_ptr()), tuple(tensor.shape), tensor.stride())
            for name, tensor in (*inputs.items(), (LABELS, labels))
        ]
    except Exception as error:
        return Failed(*failed_by(error), traceback.format_exc())


def _no_descriptor() -> LoaderError:
    return LoaderError(
        "a worker has no descriptor left for the memory that it shares with its parent: raise the limit of open files "
        "(ulimit -n)"
    )
