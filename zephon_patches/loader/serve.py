"""What a worker process does: reads the micro-batches that its parent asks for, and sends them back.

Three threads: one takes requests at once, so that nobody waits for room in the socket, and ends the process when
its parent has closed the socket or is gone, whatever the others hang in; the main one reads; one sends.

A frame is two numbers, the length of a pickle (u32) and that of the bytes behind it (u64), then the two. A request
pickles the rows; a reply says in which places of the bytes the item's tensors lie, or what went wrong.
"""

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from zephon_patches.errors import ZephonError
from zephon_patches.loader.collate import Item, MicroBatchReader, Row
from zephon_patches.loader.failure import failed_by

__all__ = ["LABELS", "SIGNALS", "SIZES", "Failed", "View", "frame", "serve"]

SIZES = struct.Struct("<IQ")

_WORD = 8  # bytes of an int64

LABELS = ""  # of a view, where the others have their names

# What a process group may get and workers must not act on.
SIGNALS = {
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name) and hasattr(signal, "pthread_sigmask")
}

# Seconds after which a forked worker looks for its parent.
_LOOK = 1.0


class View(NamedTuple):
    """Where a tensor lies in the bytes of an item, an array of int64."""

    name: str
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Failed(NamedTuple):
    """In place of views: what ``failed_by`` makes of an error, and where it was."""

    kind: type[ZephonError]
    reason: str
    traceback: str


class _Reply(NamedTuple):
    head: bytes
    parts: Sequence[Any]
    item: Item | None
    """Kept until its memory is sent"""


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
    requests: SimpleQueue[Sequence[Row]] = SimpleQueue()
    replies: SimpleQueue[_Reply] = SimpleQueue()
    threading.Thread(target=_take_requests, args=(channel, requests, is_fork), daemon=True).start()
    threading.Thread(target=_send_replies, args=(channel, replies), daemon=True).start()
    replies.put(_Reply(frame(None), (), None))  # has started
    while True:
        rows = requests.get()
        try:
            reply = _reply(reader.read(rows))
        except Exception as error:
            failed = Failed(*failed_by(error), traceback.format_exc())
            reply = _Reply(frame(failed), (), None)
        replies.put(reply)


def _take_requests(channel: socket.socket, requests: SimpleQueue[Sequence[Row]], is_fork: bool) -> None:
    """Takes requests at once, so that nobody waits for room in the socket; sees the end, also if reading hangs."""
    parent = multiprocessing.parent_process()
    with _exit_at_end():
        while True:
            while not wait([channel], _LOOK):
                if is_fork and parent is not None and os.getppid() != parent.pid:
                    return
            size, _ = SIZES.unpack(_exactly(channel, SIZES.size))
            requests.put(pickle.loads(_exactly(channel, size)))


def _send_replies(channel: socket.socket, replies: SimpleQueue[_Reply]) -> None:
    with _exit_at_end():
        while True:
            reply = replies.get()
            channel.sendall(reply.head)
            for part in reply.parts:
                channel.sendall(part)


@contextmanager
def _exit_at_end() -> Iterator[None]:
    """Ends the process, whatever its other threads do, without what it may have inherited to be done at exit."""
    try:
        yield
    except (OSError, EOFError):  # the parent has closed, or is gone
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _exactly(channel: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        count = channel.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return content


def frame(content: Any, behind: int = 0) -> bytes:
    """The first part of a frame, behind which so many bytes follow."""
    pickled = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return SIZES.pack(len(pickled), behind) + pickled


def _reply(item: Item) -> _Reply:
    """An item's memory, once where its tensors overlap, and where they lie in it."""
    inputs, labels = item
    tensors = sorted([*inputs.items(), (LABELS, labels)], key=lambda entry: entry[1].data_ptr())
    spans: list[list[int]] = []  # addresses
    views = []
    before = 0  # bytes of the spans before the last one
    for name, tensor in tensors:
        assert tensor.dtype == torch.int64
        start = tensor.data_ptr()
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        stop = start + _WORD * (reach + 1)
        if spans and start < spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], stop)
        else:
            before += spans[-1][1] - spans[-1][0] if spans else 0
            spans.append([start, stop])
        views.append(View(name, (before + start - spans[-1][0]) // _WORD, tuple(tensor.shape), tensor.stride()))
    parts = [(ctypes.c_char * (stop - start)).from_address(start) for start, stop in spans]
    return _Reply(frame(views, sum(map(len, parts))), parts, item)
