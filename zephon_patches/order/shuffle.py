"""The order of one source: (epoch, position in the epoch) -> (shard, sample of the shard).

Each epoch permutes the shards, cuts the permuted list into shuffle groups of ``shuffle_shards``, and
permutes all samples of a group together. So consecutive samples come from few shards, which is what
prefetching needs, and a source of up to ``shuffle_shards`` shards is shuffled in full. What is kept is
one array of prefix sums over the shards of the epoch; a group is known from the shards up to its end.

Worked case, three shards of 2, 3 and 1 samples, groups of two shards, an epoch whose shards come as
2, 0, 1::

    permuted shards      2   0 0   1 1 1        prefix sums 0 1 3 6
    shuffle groups      [  group 0  ][ group 1 ]
    position               0  1  2    3  4  5

Position 1 is number 1 of group 0; if the group's permutation sends 1 to 2, it is the group's third
sample: sample 1 of shard 0.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from zephon_patches.keys import derive_key
from zephon_patches.order.permutation import Permutation

__all__ = ["SourceOrder"]


class SourceOrder:
    """The order of one source over all its epochs.

    Args:
        name: The source's name; part of its keys, so sources of equal size are shuffled differently.
        samples_per_shard: int64, shape ``(shards,)``; in the order of the store, zeros allowed.
        seed: ``data.seed``.
        shuffle_shards: Shards in a shuffle group; 0 keeps the order of the store in every epoch.
    """

    def __init__(self, name: str, samples_per_shard: np.ndarray, seed: int, shuffle_shards: int) -> None:
        self.name = name
        self._samples_per_shard = np.asarray(samples_per_shard, dtype=np.int64)
        self._seed = seed
        self._shuffle_shards = shuffle_shards
        self.num_samples = int(self._samples_per_shard.sum())
        # A block of numbers spans two epochs at most, unless epochs are tiny; then each is cheap to make.
        self._epoch = lru_cache(maxsize=8)(self._make_epoch)
        self._permutation = lru_cache(maxsize=32)(self._make_permutation)

    def locate(self, epochs: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds the samples at positions of epochs.

        Args:
            epochs: int64, shape ``(k,)``, at least 0.
            positions: int64, shape ``(k,)``, in ``[0, num_samples)``.

        Returns:
            Shards and samples in them, both int64 of shape ``(k,)``.
        """
        shards = np.empty(len(positions), dtype=np.int64)
        samples = np.empty(len(positions), dtype=np.int64)
        for epoch, chosen in _places_by_value(epochs):
            shards[chosen], samples[chosen] = self._locate_in_epoch(epoch, positions[chosen])
        return shards, samples

    def _locate_in_epoch(self, epoch: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        permuted, starts, group_starts = self._epoch(epoch)
        if self._shuffle_shards:
            # side="right" steps over empty shards and groups, whose start equals the next one's.
            groups = np.searchsorted(group_starts, positions, side="right") - 1
            shuffled = np.empty_like(positions)
            for group, chosen in _places_by_value(groups):
                start, stop = int(group_starts[group]), int(group_starts[group + 1])
                permutation = self._permutation(epoch, group, stop - start)
                shuffled[chosen] = start + permutation(positions[chosen] - start)
            positions = shuffled
        places = np.searchsorted(starts, positions, side="right") - 1
        return permuted[places], positions - starts[places]

    def position(self, epoch: int, shard: int, sample: int) -> int:
        """The place of a sample in an epoch: what ``locate`` finds there."""
        permuted, starts, group_starts = self._epoch(epoch)
        place = int(np.flatnonzero(permuted == shard)[0])
        position = int(starts[place]) + sample
        if self._shuffle_shards:
            group = place // self._shuffle_shards
            start, stop = int(group_starts[group]), int(group_starts[group + 1])
            inverse = self._permutation(epoch, group, stop - start).inverse
            position = start + int(inverse(np.array([position - start], dtype=np.int64))[0])
        return position

    def _make_permutation(self, epoch: int, group: int, size: int) -> Permutation:
        return Permutation(size, derive_key(self._seed, self.name, epoch, "group", group))

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The permuted shards (M,), where each starts (M + 1,), and where each group starts (groups + 1,)."""
        num_shards = len(self._samples_per_shard)
        permuted = np.arange(num_shards, dtype=np.int64)
        if self._shuffle_shards:
            permuted = Permutation(num_shards, derive_key(self._seed, self.name, epoch, "shards"))(permuted)
        starts = np.zeros(num_shards + 1, dtype=np.int64)
        np.cumsum(self._samples_per_shard[permuted], out=starts[1:])
        group = self._shuffle_shards or max(num_shards, 1)
        group_starts = np.append(starts[:-1:group], starts[-1])
        return permuted, starts, group_starts


def _places_by_value(values: np.ndarray) -> Iterator[tuple[int, np.ndarray | slice]]:
    """Each value of an array, with the places where it stands."""
    if len(values) and values[0] == values[-1] and (values == values[0]).all():
        yield int(values[0]), slice(None)  # nearly always
        return
    places = np.argsort(values, kind="stable")
    for part in np.split(places, np.flatnonzero(np.diff(values[places])) + 1):
        if len(part):
            yield int(values[part[0]]), part
