"""Which sequence numbers a rank takes, in which micro-batch.

The step that starts at cursor N takes the numbers ``[N, N + G)``; at a finite end the last step has
fewer, K. Rank r of dp takes the part ``[floor(r*K/dp), floor((r+1)*K/dp))`` of them, in order, in
micro-batches of ``local_batch_size`` rows. So any dp up to G works, also one that does not divide it;
rows that are missing from the last micro-batch are padding rows, marked -1 here.

Worked case, G = 7, dp = 2, micro-batches of 2 rows, N = 70::

    rank 0: 70 71 | 72 -1        rank 1: 73 74 | 75 76
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zephon_patches.errors import MappingError

__all__ = [
    "Topology",
    "best_local_batch_size",
    "check",
    "even_steps",
    "micro_batches_per_step",
    "next_cursor",
    "numbers_of_rank",
    "padded_batch_size",
    "part_of_rank",
    "steps_from",
]


class Topology(NamedTuple):
    """A place in the trainer's batch mesh; TP, PP and CP peers have the same."""

    dp_rank: int
    dp_size: int


def numbers_of_rank(
    cursor: int, global_batch_size: int, local_batch_size: int, topology: Topology, end: int | None = None
) -> np.ndarray:
    """Sequence numbers that one rank takes in one step.

    Args:
        cursor: First number of the step.
        global_batch_size: In samples, at least ``dp_size``.
        local_batch_size: Rows of a micro-batch, at least 1.
        topology: Rank and size of the batch mesh.
        end: The number at which the data ends, above ``cursor``; None if it does not.

    Returns:
        int64, shape ``(micro_batches_per_step, local_batch_size)``; -1 marks a padding row.

    Raises:
        MappingError: The batch cannot be dealt to this topology.
    """
    check(global_batch_size, local_batch_size, topology)
    size = next_cursor(cursor, global_batch_size, end) - cursor
    start, stop = part_of_rank(size, topology)
    rows = micro_batches_per_step(global_batch_size, local_batch_size, topology.dp_size) * local_batch_size
    numbers = np.full(rows, -1, dtype=np.int64)
    numbers[: stop - start] = np.arange(cursor + start, cursor + stop, dtype=np.int64)
    return numbers.reshape(-1, local_batch_size)  # shape: (micro-batches, rows)


def part_of_rank(size: int, topology: Topology) -> tuple[int, int]:
    """The half-open part of a step of ``size`` samples that a rank takes; empty only where size < dp_size."""
    rank, dp_size = topology
    return rank * size // dp_size, (rank + 1) * size // dp_size


def next_cursor(cursor: int, global_batch_size: int, end: int | None = None) -> int:
    """The cursor after the step that starts at ``cursor``: the end itself where the data is finite."""
    return cursor + global_batch_size if end is None else min(cursor + global_batch_size, end)


def steps_from(cursor: int, global_batch_size: int, end: int | None = None) -> Iterator[tuple[int, int]]:
    """The half-open intervals of numbers of the steps from a cursor on."""
    while end is None or cursor < end:
        start, cursor = cursor, next_cursor(cursor, global_batch_size, end)
        yield start, cursor


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
