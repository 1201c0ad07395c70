"""Takes items from an iterator in a thread, so that one is there when the training loop asks for it.

What workers have read still has to come through their sockets into fresh memory. That takes as long as copying it, and
a training loop that computes in the meantime need not wait for it.
"""

from collections.abc import Iterator
from queue import SimpleQueue
from threading import Event, Thread
from typing import Generic, TypeVar

__all__ = ["Ahead"]

T = TypeVar("T")


class _End:
    """Behind the last item, with the error that the iterator ended with, if it did."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Ahead(Generic[T]):
    """An iterator of the same items. To be stopped; nothing else ends its thread before the items do.

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

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
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
        self._stopped.set()
        self._places.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()


def _run(items: Iterator[T], ready: "SimpleQueue[T | _End]", places: SimpleQueue[None], stopped: Event) -> None:
    try:
        while True:
            places.get()
            if stopped.is_set():
                return
            ready.put(next(items))
    except StopIteration:
        ready.put(_End(None))
    except BaseException as error:
        ready.put(_End(error))
