"""Takes items from an iterator in a thread while the training loop computes, so that some are there when it asks.

What workers have read still has to be made into tensors, others asked for, and their places found: some Python, which
takes several times as long where the loop has computed in between. Whoever asks while none is there takes the item
itself; nothing is handed from thread to thread then, and so a loop that asks without a pause leaves the thread asleep.
"""

import os
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.util import Finalize
from queue import SimpleQueue
from threading import Lock, Thread, get_ident
from typing import Generic, TypeVar

from zephon_patches.errors import LoaderError

__all__ = ["Ahead"]

T = TypeVar("T")

# At exit behind the workers' end (``pool.py``), which lets a thread go on that waits for one; and the seconds for that.
_AT_EXIT, _PATIENCE = 99, 1.0

# Seconds between two items from which on a loop computes: many times what waking the thread takes.
_PAUSE = 3e-4


class _End:
    """Behind the last item, with the error that the iterator ended with, if it did."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Shared(Generic[T]):
    """What the thread has of an ``Ahead``, which ends it when dropped."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self.items = items
        self.depth = depth
        self.lock = Lock()  # for taking
        self.taker = 0  # the thread that has it
        self.ready: deque[T | _End] = deque()
        self.wake: SimpleQueue[None] = SimpleQueue()
        self.is_asleep = False
        self.is_wanted = False  # by who has found none, for whom the thread leaves it
        self.has_ended = False
        self.is_stopped = False

    def take(self, enough: int) -> None:
        """Takes an item, if there are not enough."""
        with self.lock:
            if len(self.ready) >= enough or self.has_ended or self.is_stopped:
                return
            self.taker = get_ident()
            try:
                self.ready.append(next(self.items))
            except BaseException as error:
                self.has_ended = True
                self.ready.append(_End(None if isinstance(error, StopIteration) else error))
            self.taker = 0

    def run(self) -> None:
        while not self.is_stopped:
            if len(self.ready) < self.depth and not self.has_ended and not self.is_wanted:
                self.take(self.depth)
            else:
                self.is_asleep = True
                self.wake.get()


class Ahead(Generic[T]):
    """An iterator of the same items. Its thread ends when it is stopped or dropped, and at exit.

    Args:
        items: Used by this alone from now on.
        depth: Items that may be there before they are asked for, at least 1.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._shared = shared = _Shared(items, depth)
        self._few = depth // 2
        self._pid = os.getpid()
        self._returned = 0.0
        self._is_started = False
        self._thread = Thread(target=shared.run, name="items-ahead", daemon=True)
        # A thread that is there when the interpreter ends cannot end any more, and who joins it would wait.
        Finalize(self, _stop, (self._thread, shared, _PATIENCE), exitpriority=_AT_EXIT)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        shared = self._shared
        if shared.is_stopped or os.getpid() != self._pid:
            raise _stopped()
        if not self._is_started:  # not before whoever is to stop it has it: Ctrl-C may come at any time
            self._is_started = True
            self._start()
        paused = time.perf_counter() - self._returned > _PAUSE
        if not shared.ready:
            shared.is_wanted = True
            try:
                shared.take(1)
            finally:
                shared.is_wanted = False
            if not shared.ready:
                raise _stopped()
        item = shared.ready[0]
        if isinstance(item, _End):  # another call gets it, too
            if item.error is None:
                raise StopIteration
            raise item.error
        shared.ready.popleft()
        if paused and shared.is_asleep and len(shared.ready) <= self._few:
            shared.is_asleep = False
            shared.wake.put(None)
        self._returned = time.perf_counter()
        return item

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # for which threading's lock was not prepared
                raise error.__context__ from None
            raise LoaderError(
                f"the thread that takes items from workers cannot be started ({error}): raise the limit of processes "
                "and threads (ulimit -u), or lower the number of workers"
            ) from error

    @property
    def is_stopped(self) -> bool:
        return self._shared.is_stopped

    def stop(self, seconds: float) -> bool:
        """Has nobody take an item any more, and waits so long for who does. Whether nobody does."""
        return _stop(self._thread, self._shared, seconds)


def _stop(thread: Thread, shared: _Shared[T], seconds: float) -> bool:
    shared.is_stopped = True
    shared.wake.put(None)
    if shared.taker == get_ident():  # the garbage collector came upon who had its items, while it took one
        return False
    if not shared.lock.acquire(timeout=seconds):
        return False
    shared.lock.release()
    if thread.is_alive() and thread.ident != get_ident():
        thread.join(seconds)
    return True


def _stopped() -> LoaderError:
    return LoaderError(
        "this iterator was stopped, or is another process's that this one was forked from; iter(loader) makes one"
    )
