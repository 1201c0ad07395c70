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

from zephon_patches.keys import hash64

__all__ = ["ROUNDS", "SMALL", "Permutation"]

SMALL = 4096
ROUNDS = 8
MAX_SIZE = 2**62


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
            self._half_bits = np.uint64(half_bits)
            self._mask = np.uint64((1 << half_bits) - 1)
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
        return self._walk(positions, self._forward)

    def inverse(self, elements: np.ndarray) -> np.ndarray:
        """Maps elements back to positions; arguments and result as in a call."""
        if self.size < SMALL:
            return _table(self.size, self._key)[1][elements]
        return self._walk(elements, self._backward)

    def _walk(self, values: np.ndarray, step) -> np.ndarray:  # type: ignore[no-untyped-def]
        out = step(np.asarray(values, dtype=np.int64).astype(np.uint64))
        size = np.uint64(self.size)
        outside = out >= size
        while outside.any():
            out[outside] = step(out[outside])
            outside = out >= size
        return out.astype(np.int64)

    def _forward(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._round_keys:
            left, right = right, left ^ (hash64(key, right) & self._mask)
        return (left << self._half_bits) | right

    def _backward(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half_bits, values & self._mask
        for key in reversed(self._round_keys):
            left, right = right ^ (hash64(key, left) & self._mask), left
        return (left << self._half_bits) | right


# Each entry takes at most 64 KiB; a block of numbers touches few groups at a time.
@lru_cache(maxsize=128)
def _table(size: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    forward = np.argsort(hash64(key, np.arange(size, dtype=np.uint64)), kind="stable").astype(np.int64)
    inverse = np.empty_like(forward)
    inverse[forward] = np.arange(size, dtype=np.int64)
    for array in (forward, inverse):
        array.flags.writeable = False
    return forward, inverse
