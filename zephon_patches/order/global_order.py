"""The global order: sequence number n -> (source, epoch, shard, sample), and back.

A pure function of the data configuration and the shards' sizes: no rank, no worker, no clock, no
history. Finding a number costs the same at 0 and at 10^15. The stages say which source a number is of and how many
numbers of that source came before; that count is a place in the source's own order, epoch after epoch.

Worked case, one source of 6 samples: n = 8 is position 2 of epoch 1, since 8 = 1 * 6 + 2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zephon_patches.order.shuffle import SourceOrder
from zephon_patches.order.stages import Stage, Stages

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
        sources: Each with at least one sample.
        stages: The first at 0, with a weight for each source; None counts every source by its size, from 0 on.
    """

    def __init__(self, sources: Sequence[SourceOrder], stages: Sequence[Stage] | None = None) -> None:
        assert sources, "configs without sources are refused above"
        assert all(source.num_samples > 0 for source in sources), "empty sources are refused above"
        self._sources = list(sources)
        self._sizes = np.array([source.num_samples for source in sources], dtype=np.int64)
        self._by_size = stages is None
        self._stages = Stages([Stage(0, tuple(self._sizes.tolist()))] if stages is None else stages)

    @property
    def num_sources(self) -> int:
        return len(self._sources)

    @property
    def num_samples(self) -> int:
        """Of all sources, each for one epoch."""
        return int(self._sizes.sum())

    def end(self, epochs: int) -> int:
        """The number that follows the last sample of ``epochs`` epochs of all sources, counted by their size."""
        assert self._by_size, "sources with weights end their epochs at different numbers"
        return epochs * self.num_samples

    def epochs_at(self, cursor: int) -> list[tuple[int, int, int]]:
        """For each source, where a cursor stands: (epoch, position in it, samples of the source)."""
        return [
            (*divmod(count, size), size)
            for count, size in zip(self._stages.counts(cursor), self._sizes.tolist(), strict=True)
        ]

    def mixture_at(self, cursor: int) -> tuple[int, list[int], list[int]]:
        """The mixture in force at a cursor: its first number, its weights, and each source's samples since then."""
        return self._stages.mixture_at(cursor)

    def locate(self, numbers: np.ndarray) -> Location:
        """Finds samples by their sequence numbers.

        Args:
            numbers: int64, shape ``(k,)``, in ``[0, MAX_NUMBER)``.
        """
        sources, counts = self._stages.draw(numbers)
        epochs, positions = np.divmod(counts, self._sizes[sources])
        shards, samples = np.empty_like(numbers), np.empty_like(numbers)
        # A stable sort puts each source's numbers together, in order.
        by_source = np.argsort(sources, kind="stable")
        counted = np.bincount(sources, minlength=len(self._sources))
        ends = np.cumsum(counted)
        for source in np.flatnonzero(counted).tolist():
            chosen = by_source[ends[source] - counted[source] : ends[source]]
            shards[chosen], samples[chosen] = self._sources[source].locate(epochs[chosen], positions[chosen])
        return Location(sources, epochs, shards, samples)

    def number(self, source: int, epoch: int, shard: int, sample: int) -> int | None:
        """The sequence number of a sample in an epoch; None if it has none, as a stage turned its source off before.

        Args:
            source: Its number among the sources.
            epoch: At least 0.
            shard: Of the source.
            sample: In the shard.
        """
        order = self._sources[source]
        count = epoch * order.num_samples + order.position(epoch, shard, sample)
        return self._stages.number(source, count)
