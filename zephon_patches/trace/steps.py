"""Which numbers a step takes, and which rank reads them in which micro-batch.

A number's sample never depends on steps; which step takes it depends on the sizes of all steps before. So a step is
counted from a basis: sample 0 with a size that is fixed for the whole run, or a checkpoint, or it is read from the
traces of the run.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zephon_patches import mapping
from zephon_patches.config import MAX_NUMBER
from zephon_patches.errors import ConfigError
from zephon_patches.mapping import Topology

if TYPE_CHECKING:
    from zephon_patches.trace.view import DataView

__all__ = ["Basis", "Reading", "Step", "basis_of_config", "deal", "numbers_of_step", "steps_over"]


class Basis(NamedTuple):
    """A place of a run from which its further steps are counted."""

    step: int
    """Steps that are done there"""
    cursor: int
    global_batch_size: int
    told_by: str
    """In words"""


class Step(NamedTuple):
    """The numbers of one step."""

    step: int
    numbers: np.ndarray
    """int64, shape ``(samples of the step,)``"""
    global_batch_size: int
    told_by: str


class Reading(NamedTuple):
    """Who reads a number, and where in its batch."""

    step: int
    rank: int
    """In the batch mesh"""
    micro_batch: int
    row: int
    n: int


def basis_of_config(view: "DataView") -> Basis:
    """The start of a run whose steps all have the size that the config fixes.

    Raises:
        ConfigError: It fixes none.
    """
    size, initial = view.config.global_batch_size, view.config.data.initial_cursor
    if size < 1:
        raise ConfigError(
            f"{view.config.path}: training.global_batch_size is not set, so the size of a step depends on the ranks; "
            "give --run RUN (with data.trace = true) or --checkpoint FOLDER"
        )
    return Basis(0, initial, size, f"{size:,} samples a step from sample {initial:,} on (training.global_batch_size)")


def numbers_of_step(view: "DataView", step: int, basis: Basis) -> Step:
    """The numbers that a step behind a basis takes.

    Raises:
        ConfigError: The step is not behind the basis, or behind the end of the data.
    """
    if step <= basis.step:
        raise ConfigError(
            f"step {step:,} lies before what it is counted from: step {basis.step:,} at sample {basis.cursor:,} "
            f"({basis.told_by})" + ("; give an earlier checkpoint" if basis.step else "")
        )
    size = basis.global_batch_size
    first = view.skips.kept(basis.cursor) + (step - basis.step - 1) * size
    last = first + size
    if view.end is not None:
        last = min(last, view.skips.kept(view.end))
    if first >= last or last > MAX_NUMBER:
        raise ConfigError(f"step {step:,}: the data ends at sample {MAX_NUMBER if view.end is None else view.end:,}")
    return Step(step, view.skips.numbers(np.arange(first, last, dtype=np.int64)), size, basis.told_by)


def steps_over(view: "DataView", start: int, stop: int, basis: Basis) -> Iterator[Step]:
    """The steps that take any of the numbers ``[start, stop)``.

    Raises:
        ConfigError: Numbers lie before the basis.
    """
    if start < basis.cursor:
        raise ConfigError(f"sample {start:,} lies before sample {basis.cursor:,}, from which steps are counted")
    kept = view.skips.kept
    before = kept(basis.cursor)
    first, last = (kept(start) - before) // basis.global_batch_size, kept(stop) - before
    step = basis.step + 1 + first
    while (step - basis.step - 1) * basis.global_batch_size < last:
        yield numbers_of_step(view, step, basis)
        step += 1


def deal(step: Step, local_batch_size: int, dp_size: int, rank: int | None = None) -> Iterator[Reading]:
    """Deals a step's numbers to the ranks, or to one of them; padding rows are left out.

    Raises:
        MappingError: There are more ranks than samples in a full step, or there is no such rank.
    """
    mapping.check(step.global_batch_size, local_batch_size, Topology(rank or 0, dp_size))
    for dp_rank in range(dp_size) if rank is None else [rank]:
        first, last = mapping.part_of_rank(len(step.numbers), Topology(dp_rank, dp_size))
        for place, n in enumerate(step.numbers[first:last].tolist()):
            yield Reading(step.step, dp_rank, *divmod(place, local_batch_size), n)
