"""The global order: sequence number n -> (source, epoch, shard, sample).

A pure function of the data configuration and the shards' sizes: no rank, no worker, no clock, no
history. Finding a number costs the same at 0 and at 10^15.

Worked case, one source of 6 samples: n = 8 is position 2 of epoch 1, since 8 = 1 * 6 + 2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zephon_patches.order.shuffle import SourceOrder

__all__ = ["GlobalOrder", "Location"]


class Location(NamedTuple):
    """Where samples are: int64 arrays of one shape ``(k,)``."""

    source: np.ndarray
    epoch: np.ndarray
    shard: np.ndarray
    sample: np.ndarray


class GlobalOrder:
    """The order over all sources and epochs.

    Args:
        sources: At present exactly one, with at least one sample.
    """

    def __init__(self, sources: Sequence[SourceOrder]) -> None:
        assert len(sources) == 1, "one source so far; config is checked above"
        assert sources[0].num_samples > 0, "empty sources are refused above"
        self._sources = list(sources)

    def end(self, epochs: int) -> int:
        """The number that follows the last sample of ``epochs`` epochs."""
        return epochs * self._sources[0].num_samples

    def epochs_at(self, cursor: int) -> list[tuple[int, int, int]]:
        """For each source, where a cursor stands: (epoch, position in it, samples of the source)."""
        size = self._sources[0].num_samples
        return [(cursor // size, cursor % size, size)]

    def locate(self, numbers: np.ndarray) -> Location:
        """Finds samples by their sequence numbers.

        Args:
            numbers: int64, shape ``(k,)``, in ``[0, MAX_NUMBER)``.
        """
        epochs, positions = np.divmod(numbers, self._sources[0].num_samples)
        shards, samples = self._sources[0].locate(epochs, positions)
        return Location(np.zeros_like(numbers), epochs, shards, samples)
