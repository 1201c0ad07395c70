"""A bell, which lets another process wake up that waits for it.

A socket and a pipe would, too. But Linux takes who writes to them as about to sleep, and gives its core to the one that
it wakes: the two then take turns on it although another one is idle. An eventfd wakes without that.
"""

import os
import sys

__all__ = ["Bell", "hear", "hear_all", "ring"]

_BYTES = 8  # of a number
_ONE = (1).to_bytes(_BYTES, sys.byteorder)

# Of a pipe, in which numbers stand one behind the other.
_AT_ONCE = 8192 * _BYTES


class Bell:
    """Rung with a number by one process, heard by another.

    Args:
        counts: Whether rings with 1 are heard one by one (``hear``); else all at once (``hear_all``).

    Attributes:
        hearing, ringing: Descriptors, which ``close`` closes.
    """

    def __init__(self, counts: bool) -> None:
        if hasattr(os, "eventfd"):
            self.hearing = self.ringing = os.eventfd(0, os.EFD_CLOEXEC | (os.EFD_SEMAPHORE if counts else 0))
        else:
            self.hearing, self.ringing = os.pipe()

    def close(self) -> None:
        for file in {self.hearing, self.ringing}:
            os.close(file)


def ring(ringing: int, number: int = 1) -> None:
    os.write(ringing, _ONE if number == 1 else number.to_bytes(_BYTES, sys.byteorder))


def hear(hearing: int) -> None:
    """Waits for a ring."""
    os.read(hearing, _BYTES)


def hear_all(hearing: int) -> int:
    """Waits for a ring; the sum of the numbers of all that there are."""
    numbers = os.read(hearing, _AT_ONCE)
    return sum(int.from_bytes(numbers[at : at + _BYTES], sys.byteorder) for at in range(0, len(numbers), _BYTES))
