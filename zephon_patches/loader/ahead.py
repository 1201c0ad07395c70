"""Takes items from an iterator in a thread, so that one is there when the training loop asks for it.

What workers have read still has to come through their sockets into fresh memory. That takes as long as copying it, and
a training loop that computes in the meantime need not wait for it.
"""

from collections.abc import Iterator
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from threading import Event, Thread, current_thread
from typing import Generic, TypeVar

from zephon_patches.errors import LoaderError

__all__ = ["Ahead"]

T = TypeVar("T")

# At exit behind the workers' end (``pool.py``), which lets a thread go on that waits for one; and the seconds for that.
_AT_EXIT, _PATIENCE = 99, 1.0


class _End:
    """Behind the last item, with the error that the iterator ended with, if it did."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Ahead(Generic[T]):
    """An iterator of the same items. Its thread ends with them, when it is stopped or dropped, and at exit.

    Args:
        items: Used by the thread alone from now on.
        depth: Items that may be there before they are asked for, at least 1.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._ready: SimpleQueue[T | _End] = SimpleQueue()
        self._places: SimpleQueue[None] = SimpleQueue()  # for an item each
        for _ in range(depth):
            self._places.put(None)
        self._stopped = Event()
        self._thread = Thread(
            target=_run, args=(items, self._ready, self._places, self._stopped), name="items-ahead", daemon=True
        )
        self._thread.start()
        # A thread that is there when the interpreter ends cannot end any more, and who joins it would wait.
        Finalize(self, _stop, (self._thread, self._stopped, self._places, _PATIENCE), exitpriority=_AT_EXIT)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            item = self._ready.get_nowait()  # nearly always
        except Empty:
            if not self._thread.is_alive() and self._ready.empty():
                raise _stopped() from None  # in a fork; else there is an end
            item = self._ready.get()
        if isinstance(item, _End):
            self._ready.put(item)  # another call gets it, too
            if item.error is None:
                raise StopIteration
            raise item.error
        self._places.put(None)
        return item

    def stop(self, seconds: float) -> bool:
        """Ends the thread behind the item that it takes, and waits so long for that. Whether it has ended."""
        return _stop(self._thread, self._stopped, self._places, seconds)


def _stop(thread: Thread, stopped: Event, places: SimpleQueue[None], seconds: float) -> bool:
    stopped.set()
    places.put(None)
    if thread is current_thread():  # in which the garbage collector came upon who had its items
        return False
    thread.join(seconds)
    return not thread.is_alive()


def _stopped() -> LoaderError:
    return LoaderError(
        "this iterator was stopped, or is another process's that this one was forked from; iter(loader) makes one"
    )


def _run(items: Iterator[T], ready: "SimpleQueue[T | _End]", places: SimpleQueue[None], stopped: Event) -> None:
    try:
        while True:
            places.get()
            if stopped.is_set():
                ready.put(_End(_stopped()))  # not raised here: its frames would keep the items
                return
            ready.put(next(items))
    except StopIteration:
        ready.put(_End(None))
    except BaseException as error:
        ready.put(_End(error))
