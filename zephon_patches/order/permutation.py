"""A keyed permutation of ``[0, size)`` that is evaluated point by point and has an inverse.

Shuffling 10^12 samples must not need 10^12 numbers of memory, so the shuffled position of one sample is
computed from its position alone:

- below ``SMALL`` elements: the stable argsort of the elements' keyed hashes, kept per key. It is as
  uniform as the hash.
- from there on: a Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from
  pseudorandom functions", 1988) on the next even number of bits, with cycle walking (Black and Rogaway,
  "Ciphers with arbitrary finite domains", CT-RSA 2002): a value outside the range is sent through again
  until it falls inside, fewer than 4 times on average. The round function is ``hash64``. This is for
  shuffling, not for secrecy.

Small ranges take the table because a Feistel network on them is far from uniform: with 4 rounds, the
120 permutations of 5 elements came up with very different frequencies.

Worked case: ``Permutation(5, key=0)`` sorts the five hashes of 0..4 under key 0; if the third smallest
hash is that of element 1, then position 2 maps to 1, and the inverse of 1 is 2.
"""

from functools import lru_cache

import numpy as np

from zephon_patches.keys import hash64, hash64_of

__all__ = ["ROUNDS", "SMALL", "Permutation"]

SMALL = 4096
ROUNDS = 8
MAX_SIZE = 2**62

# Values that take less time one by one than as an array.
_FEW = 12


class Permutation:
    """A permutation of ``[0, size)``, the same for the same size and key on every machine.

    Args:
        size: At least 0 and at most 2**62.
        key: In ``[0, 2**64)``.
    """

    def __init__(self, size: int, key: int) -> None:
        assert 0 <= size <= MAX_SIZE, size
        self.size = size
        self._key = key
        if size >= SMALL:
            half_bits = ((size - 1).bit_length() + 1) // 2
            self._half_bits = np.array(half_bits, dtype=np.uint64)
            self._mask = np.array((1 << half_bits) - 1, dtype=np.uint64)
            self._round_keys = [int(k) for k in hash64(key, np.arange(ROUNDS, dtype=np.uint64))]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Maps positions to elements.

        Args:
            positions: int64, in ``[0, size)``, any shape.

        Returns:
            int64, the same shape, in ``[0, size)``.
        """
        if self.size < SMALL:
            return _table(self.size, self._key)[0][positions]
        return self._walk(positions, backwards=False)

    def inverse(self, elements: np.ndarray) -> np.ndarray:
        """Maps elements back to positions; arguments and result as in a call."""
        if self.size < SMALL:
            return _table(self.size, self._key)[1][elements]
        return self._walk(elements, backwards=True)

    def _walk(self, values: np.ndarray, backwards: bool) -> np.ndarray:
        out = self._send(np.asarray(values, dtype=np.int64).astype(np.uint64).ravel(), backwards)
        size = np.uint64(self.size)
        outside = np.flatnonzero(out >= size)
        walking = out[outside]
        while len(outside) > _FEW:
            walking = self._send(walking, backwards)
            out[outside] = walking
            still = walking >= size
            outside, walking = outside[still], walking[still]
        for place, value in zip(outside.tolist(), walking.tolist(), strict=True):
            while value >= self.size:
                value = self._send_one(value, backwards)
            out[place] = value
        return out.astype(np.int64).reshape(np.shape(values))

    # Backwards through the network is forwards with its halves swapped and its keys reversed.

    def _send(self, values: np.ndarray, backwards: bool) -> np.ndarray:
        left, right = values >> self._half_bits, values & self._mask
        if backwards:
            left, right = right, left
        hashed, scratch = np.empty_like(left), np.empty_like(left)
        for key in self._round_keys[:: -1 if backwards else 1]:
            np.bitwise_xor(left, np.bitwise_and(hash64(key, right, hashed, scratch), self._mask, hashed), left)
            left, right = right, left
        if backwards:
            left, right = right, left
        return (left << self._half_bits) | right

    def _send_one(self, value: int, backwards: bool) -> int:
        half_bits, mask = int(self._half_bits), int(self._mask)
        left, right = value >> half_bits, value & mask
        if backwards:
            left, right = right, left
        for key in self._round_keys[:: -1 if backwards else 1]:
            left, right = right, left ^ (hash64_of(key, right) & mask)
        if backwards:
            left, right = right, left
        return (left << half_bits) | right


# Each entry takes at most 64 KiB; a block of numbers touches few groups at a time.
@lru_cache(maxsize=128)
def _table(size: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    forward = np.argsort(hash64(key, np.arange(size, dtype=np.uint64)), kind="stable").astype(np.int64)
    inverse = np.empty_like(forward)
    inverse[forward] = np.arange(size, dtype=np.int64)
    for array in (forward, inverse):
        array.flags.writeable = False
    return forward, inverse
