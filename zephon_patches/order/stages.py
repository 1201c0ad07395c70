"""Stages: which mixture is in force at a sequence number, and how far each source has come.

A stage is a mixture from a number on. It counts its own draws from 0; each source goes on where the stage before left
it. So a number n of the stage that starts at ``at`` is draw ``n - at`` of its mixture, and the samples that a source
has given before are those of all earlier stages (known from their lengths alone) and those of this one.

Worked case, sources a and b, halves at first and b alone from number 3 on::

    n         0  1  2 | 3  4  5
    source    a  b  a | b  b  b
    before    0  0  1 | 1  2  3
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zephon_patches.order.mixture import Mixture

__all__ = ["Stage", "Stages"]


class Stage(NamedTuple):
    """A mixture, in force from a sequence number on."""

    at: int
    weights: tuple[int, ...]
    """One for each source of the order, whole numbers; 0 is off"""


class Stages:
    """All stages of an order.

    Args:
        stages: The first at 0, each later one above the one before.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._starts = [stage.at for stage in stages]
        assert self._starts[0] == 0, self._starts
        assert all(a < b for a, b in zip(self._starts, self._starts[1:], strict=False)), self._starts
        self._mixtures = [Mixture(stage.weights) for stage in stages]
        self._counts = [[0] * len(stages[0].weights)]  # of each source at the start of each stage
        for number, start in enumerate(self._starts[1:]):
            self._counts.append(self._after(number, start))

    def draw(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds numbers.

        Args:
            numbers: int64, shape ``(k,)``, at least 0.

        Returns:
            The source of each, and how many numbers before it are of that source; both int64 of shape ``(k,)``.
        """
        sources, counts = np.empty_like(numbers), np.empty_like(numbers)
        stage_of = np.searchsorted(self._starts, numbers, side="right") - 1
        for stage in np.flatnonzero(np.bincount(stage_of)).tolist():
            chosen = stage_of == stage
            drawn, before = self._mixtures[stage].draw(numbers[chosen] - self._starts[stage])
            sources[chosen] = drawn
            counts[chosen] = before + np.array(self._counts[stage], dtype=np.int64)[drawn]
        return sources, counts

    def counts(self, number: int) -> list[int]:
        """How many numbers below a number are of each source."""
        return self._after(bisect_right(self._starts, number) - 1, number)

    def mixture_at(self, number: int) -> tuple[int, list[int], list[int]]:
        """Where the stage in force at a number starts, its weights, and the numbers of each source since then."""
        stage = bisect_right(self._starts, number) - 1
        start, mixture = self._starts[stage], self._mixtures[stage]
        return start, mixture.weights, mixture.counts(number - start)

    def number(self, source: int, count: int) -> int | None:
        """The number of a source before which ``count`` others are of it; None if there is none, since it is off."""
        # It lies in the last stage that starts with at most so many: the next one starts with more.
        stage = bisect_right([counts[source] for counts in self._counts], count) - 1
        draw = self._mixtures[stage].number(source, count - self._counts[stage][source])
        return None if draw is None else self._starts[stage] + draw

    def _after(self, stage: int, number: int) -> list[int]:
        more = self._mixtures[stage].counts(number - self._starts[stage])
        return [a + b for a, b in zip(self._counts[stage], more, strict=True)]
