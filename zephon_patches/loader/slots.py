"""Memory that a worker process shares with its parent: the worker fills a slot with an item, the parent hands it out.

Nothing is copied. The file behind it has no name, so nothing of it is left when the last of the two has gone, however
that ended. A slot is used again when nobody has the tensors of its item any more; whoever keeps more items than a
training loop does gets copies.
"""

import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from threading import Lock

import numpy as np

__all__ = ["Filling", "Slots", "forks_share_no_item"]

_WORD = 8  # bytes of an int64


class Slots:
    """The parent's side.

    Args:
        asked: Items that may be under way at a time.
        lent: Items that may be handed out at a time without a copy.
        words: Words (int64) of the largest item. What none of them uses costs no memory.

    Raises:
        OSError: There is no such memory.
    """

    def __init__(self, asked: int, lent: int, words: int) -> None:
        page = mmap.PAGESIZE // _WORD
        self.words = -(-words // page) * page
        self.asked = asked
        self._free = list(range(asked + lent))
        self._may_lend = lent
        self._lent: set[_Lent] = set()
        self._returned: deque[_Lent] = deque()  # as the last references go, in whatever thread
        self._lock = Lock()
        self._unsent: int | None = None
        self._unsent = _file_without_name()
        try:
            size = (asked + lent) * self.words * _WORD
            os.ftruncate(self._unsent, size)
            self._values = np.frombuffer(mmap.mmap(self._unsent, size), dtype=np.int64)
        except BaseException:
            self.sent()
            raise
        _everywhere[id(self)] = self

    def __del__(self) -> None:
        self.sent()

    @property
    def unsent(self) -> list[int]:
        """The file's descriptor, as long as the worker has not got it."""
        return [] if self._unsent is None else [self._unsent]

    def sent(self) -> None:
        if self._unsent is not None:
            os.close(self._unsent)
            self._unsent = None

    def claim(self) -> int:
        """A slot that nobody uses."""
        self._look_for_returned()
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Lets a slot be used again that was not taken from."""
        self._free.append(slot)

    def take(self, slot: int, words: int) -> np.ndarray:
        """The first words of a slot, int64, which is used again when nobody has this array any more.

        NumPy's views of it do not keep it (their base is what it is a view of); a tensor made of it does.
        """
        first = slot * self.words
        values = self._values[first : first + words]
        if len(self._lent) >= self._may_lend:
            self._look_for_returned()
        with self._lock:
            if len(self._lent) < self._may_lend:
                lent = _Lent(values, self._returned.append)
                lent.slot = slot
                self._lent.add(lent)
                return values
        values = values.copy()
        self._free.append(slot)
        return values

    def _look_for_returned(self) -> None:
        while self._returned:
            lent = self._returned.popleft()
            if lent in self._lent:  # else it is kept
                self._lent.discard(lent)
                self._free.append(lent.slot)

    def keep_lent(self) -> None:
        """Never uses again what is lent now."""
        with self._lock:
            self._may_lend -= len(self._lent)
            self._lent = set()


class _Lent(weakref.ref[np.ndarray]):
    """What is lent. Its callback is of C: in one of Python's a Ctrl-C could be lost, and the slot with it."""

    __slots__ = ("slot",)
    slot: int
    __hash__ = object.__hash__  # an array has none
    __eq__ = object.__eq__


class Filling:
    """The worker's side.

    Args:
        file: Descriptor of the parent's; closed here.
        words: Words of a slot.
    """

    def __init__(self, file: int, words: int) -> None:
        self._words = words
        self._values = np.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=np.int64)
        os.close(file)
        self._address = self._values.__array_interface__["data"][0]
        self._first = self.used = 0

    def open(self, slot: int) -> None:
        """Begins to fill a slot."""
        self._first = slot * self._words
        self.used = 0

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        """The next words of the slot, int64 of that shape."""
        first = self._first + self.used
        self.used += prod(shape)
        if self.used > self._words:
            raise ValueError(f"{self.used:,} words of an item do not fit into {self._words:,}")
        return self._values[first : self._first + self.used].reshape(shape)

    def word_of(self, address: int) -> int:
        """Which word of the slot lies at an address.

        Raises:
            ValueError: It is not in the memory that ``empty`` has given.
        """
        word = (address - self._address) // _WORD - self._first
        if not 0 <= word < self.used:
            raise ValueError("a tensor lies elsewhere than in the memory that was given for it")
        return word


def _file_without_name() -> int:
    if hasattr(os, "memfd_create"):  # not in /dev/shm, which is small in a container
        return os.memfd_create("zephon-items", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# A fork of the process shares what is lent, and may keep it for longer than the process itself does.
_everywhere: "weakref.WeakValueDictionary[int, Slots]" = weakref.WeakValueDictionary()
_thread = threading.local()


@contextmanager
def forks_share_no_item() -> Iterator[None]:
    """For forks of this thread that look at no item."""
    _thread.shares_none = True
    try:
        yield
    finally:
        _thread.shares_none = False


def _keep_lent() -> None:
    if not getattr(_thread, "shares_none", False):
        for reference in _everywhere.valuerefs():
            slots = reference()
            if slots is not None:
                slots.keep_lent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_keep_lent)
