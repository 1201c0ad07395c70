"""Which sequence numbers a rank takes, in which micro-batch.

The step that starts at cursor N takes the first G numbers >= N that no skip covers; without skips that is
``[N, N + G)``. At a finite end the last step has fewer, K. Rank r of dp takes the part ``[floor(r*K/dp),
floor((r+1)*K/dp))`` of them, in order, in micro-batches of ``local_batch_size`` rows. So any dp up to G works, also one
that does not divide it; rows that are missing from the last micro-batch are padding rows, marked -1 here.

The numbers that no skip covers are the kept ones, and counting only those makes a step an interval: if ``kept`` of
them lie below N, the step takes the kept numbers from number ``kept`` to ``kept + G``.

Worked case, G = 7, dp = 2, micro-batches of 2 rows, N = 70, and 72, 73 and 74 skipped. Of the kept numbers 70 to 76 are
taken, which are the numbers 70, 71 and 75 to 79; then N = 80::

    rank 0: 70 71 | 75 -1        rank 1: 76 77 | 78 79
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from zephon_patches.errors import MappingError

__all__ = [
    "NO_SKIPS",
    "Skips",
    "Topology",
    "best_local_batch_size",
    "check",
    "even_steps",
    "micro_batches_per_step",
    "numbers_of_rank",
    "numbers_of_steps",
    "padded_batch_size",
    "part_of_rank",
    "step_at",
    "steps_from",
    "steps_left",
]

Size = TypeVar("Size", int, np.ndarray)


class Topology(NamedTuple):
    """A place in the trainer's batch mesh; TP, PP and CP peers have the same."""

    dp_rank: int
    dp_size: int


class Skips:
    """Numbers that are left out.

    Args:
        intervals: Half-open, in any order; they may touch and overlap.

    Attributes:
        intervals: The same numbers in the fewest intervals, in order.
    """

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        merged: list[list[int]] = []
        for start, stop in sorted(intervals):
            if start >= stop:
                continue
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], stop)
            else:
                merged.append([start, stop])
        self.intervals = [(start, stop) for start, stop in merged]
        self._starts = [start for start, _ in merged]
        skipped = 0
        self._kept = []  # kept numbers below each interval
        for start, stop in merged:
            self._kept.append(start - skipped)
            skipped += stop - start
        # What to add to the rank of a kept number to get the number, by the count of intervals before it.
        shifts = [stop - kept for (_, stop), kept in zip(merged, self._kept, strict=True)]
        self._shift_list = [0, *shifts]
        self._shifts = np.array(self._shift_list, dtype=np.int64)
        self._kept_array = np.array(self._kept, dtype=np.int64)

    def kept(self, number: int) -> int:
        """How many numbers below a number are kept."""
        before = bisect_right(self._starts, number) - 1
        if before < 0:
            return number
        return self._kept[before] + max(number - self.intervals[before][1], 0)

    def numbers(self, kept: np.ndarray) -> np.ndarray:
        """The kept numbers of given ranks among all kept ones.

        Args:
            kept: int64, at least 0, any shape.

        Returns:
            int64, the same shape.
        """
        if not self.intervals:
            return kept
        return kept + self._shifts[np.searchsorted(self._kept_array, kept, side="right")]

    def number(self, kept: int) -> int:
        """As ``numbers``, of one."""
        before = bisect_right(self._kept, kept)
        return kept + self._shift_list[before] if before else kept

    def below(self, number: int) -> list[tuple[int, int]]:
        """The part of the intervals below a number."""
        return [(start, min(stop, number)) for start, stop in self.intervals if start < number]


NO_SKIPS = Skips()


def numbers_of_rank(
    step: tuple[int, int],
    global_batch_size: int,
    local_batch_size: int,
    topology: Topology,
    skips: Skips = NO_SKIPS,
) -> np.ndarray:
    """Sequence numbers that one rank takes in one step.

    Args:
        step: As ``steps_from`` gives it, not empty.
        global_batch_size: In samples, at least ``dp_size``.
        local_batch_size: Rows of a micro-batch, at least 1.
        topology: Rank and size of the batch mesh.
        skips: Numbers that are left out.

    Returns:
        int64, shape ``(micro_batches_per_step, local_batch_size)``; -1 marks a padding row.

    Raises:
        MappingError: The batch cannot be dealt to this topology.
    """
    steps = np.array([step], dtype=np.int64)
    return numbers_of_steps(steps, global_batch_size, local_batch_size, topology, skips)[0]


def numbers_of_steps(
    steps: np.ndarray,
    global_batch_size: int,
    local_batch_size: int,
    topology: Topology,
    skips: Skips = NO_SKIPS,
) -> np.ndarray:
    """``numbers_of_rank`` of several steps at once.

    Args:
        steps: int64, shape ``(k, 2)``.

    Returns:
        int64, shape ``(k, micro_batches_per_step, local_batch_size)``.
    """
    check(global_batch_size, local_batch_size, topology)
    first, sizes = steps[:, :1], steps[:, 1:] - steps[:, :1]
    start, stop = part_of_rank(sizes, topology)
    places = np.arange(
        micro_batches_per_step(global_batch_size, local_batch_size, topology.dp_size) * local_batch_size,
        dtype=np.int64,
    )
    numbers = skips.numbers(first + start + places)  # shape: (steps, rows)
    is_row = places < stop - start
    if not is_row.all():
        numbers = np.where(is_row, numbers, -1)
    return numbers.reshape(len(steps), -1, local_batch_size)


def part_of_rank(size: Size, topology: Topology) -> tuple[Size, Size]:
    """The half-open part of a step of ``size`` samples that a rank takes; empty only where size < dp_size.

    Of an int64 array of sizes, arrays.
    """
    rank, dp_size = topology
    return rank * size // dp_size, (rank + 1) * size // dp_size


def steps_from(
    cursor: int, global_batch_size: int, end: int | None = None, skips: Skips = NO_SKIPS
) -> Iterator[tuple[int, int]]:
    """The steps from a cursor on, each a half-open interval of kept numbers.

    Args:
        cursor: Where the first step starts; it may lie in a skip.
        global_batch_size: In samples, at least 1.
        end: The number at which the data ends; None if it does not.
        skips: Numbers that are left out; without any, the intervals are of sequence numbers.
    """
    start = skips.kept(cursor)
    last = None if end is None else skips.kept(end)
    while last is None or start < last:
        stop = start + global_batch_size if last is None else min(start + global_batch_size, last)
        yield start, stop
        start = stop


def steps_left(cursor: int, global_batch_size: int, end: int, skips: Skips = NO_SKIPS) -> int:
    """How many steps there are from a cursor to a finite end."""
    return -(-max(skips.kept(end) - skips.kept(cursor), 0) // global_batch_size)


def step_at(cursor: int, global_batch_size: int, end: int | None = None, skips: Skips = NO_SKIPS) -> tuple[int, int]:
    """The step that starts at a cursor.

    Returns:
        Its samples: fewer than the batch at a finite end, 0 behind it. And the cursor after it: behind its last number,
        or the end if it is a short one.
    """
    kept = skips.kept(cursor)
    if end is not None and (left := skips.kept(end) - kept) < global_batch_size:
        return max(left, 0), end
    return global_batch_size, skips.number(kept + global_batch_size - 1) + 1


def even_steps(num_samples: int, global_batch_size: int) -> Iterator[tuple[int, int]]:
    """The half-open intervals of one pass over all samples, in as few steps as need be, even to within one sample."""
    steps = -(-num_samples // global_batch_size)
    for step in range(steps):
        yield step * num_samples // steps, (step + 1) * num_samples // steps


def micro_batches_per_step(global_batch_size: int, local_batch_size: int, dp_size: int) -> int:
    """Micro-batches that every rank takes in a step: enough for the rank with the most rows."""
    return -(-global_batch_size // (local_batch_size * dp_size))


def padded_batch_size(global_batch_size: int, local_batch_size: int, dp_size: int) -> int:
    """Rows of all ranks in a step, padding rows included."""
    return micro_batches_per_step(global_batch_size, local_batch_size, dp_size) * local_batch_size * dp_size


def best_local_batch_size(global_batch_size: int, local_batch_size: int, dp_size: int) -> int:
    """The local batch size up to the given one that needs the fewest padding rows; the largest of those."""
    sizes = range(local_batch_size, 0, -1)
    return min(sizes, key=lambda size: padded_batch_size(global_batch_size, size, dp_size))


def check(global_batch_size: int, local_batch_size: int, topology: Topology) -> None:
    """Raises MappingError unless every rank gets at least one sample of a full step."""
    rank, dp_size = topology
    if dp_size < 1 or not 0 <= rank < dp_size:
        raise MappingError(f"dp_rank = {rank} of dp_size = {dp_size}: expected 0 <= dp_rank < dp_size")
    if local_batch_size < 1:
        raise MappingError(f"local_batch_size = {local_batch_size}: expected at least 1")
    if global_batch_size < 1:
        raise MappingError(f"global_batch_size = {global_batch_size}: expected at least 1")
    if dp_size > global_batch_size:
        raise MappingError(
            f"dp_size = {dp_size} is above global_batch_size = {global_batch_size}: some ranks would have no "
            f"sample in any step; train on at most {global_batch_size} data-parallel ranks, or raise the global "
            "batch size"
        )
