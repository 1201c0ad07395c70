"""The documented hash: keys by path, hashes of numbers, fingerprints of plain data.

The order of the data must be the same on every machine and for ever, so nothing here comes from a
library's random generator. Two published functions are used:

- keys and fingerprints: BLAKE2b (RFC 7693) of canonical JSON, 8 bytes, personalised with ``zephon``;
- hashes of many numbers at once: ``hash64(key, x)`` is output number ``x`` of the SplitMix64 generator
  that starts at ``key`` (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
  OOPSLA 2014), which can be computed for any ``x`` without the ones before.

A key is derived from a path such as ``(seed, source, epoch, "group", 3)``, never by adding: with
``seed + epoch`` one source's epoch 1 could repeat another's epoch 0.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["canonical_json", "derive_key", "fingerprint", "fingerprint_of_json", "hash64", "hash64_of"]

_PERSON = b"zephon"
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ONES = 2**64 - 1

# NumPy takes arrays of no dimension faster than its scalars.
_GAMMA_0D, _MIX_1_0D, _MIX_2_0D, _30, _27, _31 = (
    np.array(value, dtype=np.uint64) for value in (_GAMMA, _MIX_1, _MIX_2, 30, 27, 31)
)


def canonical_json(data: Any) -> str:
    """The one JSON text of plain data: sorted keys, no white space, ASCII only.

    Raises:
        ValueError: ``data`` holds NaN or an infinity.
        TypeError: ``data`` holds something that JSON has no form for.
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _digest(data: Any) -> bytes:
    return _digest_of([canonical_json(data).encode("ascii")])


def _digest_of(parts: Iterable[bytes | memoryview]) -> bytes:
    digest = hashlib.blake2b(digest_size=8, person=_PERSON)
    for part in parts:
        digest.update(part)
    return digest.digest()


def fingerprint(data: Any) -> str:
    """16 hexadecimal digits that stand for plain data; other data gives other digits."""
    return _digest(data).hex()


def fingerprint_of_json(*parts: bytes | memoryview) -> str:
    """The fingerprint of data whose canonical JSON is given, in one part or several."""
    return _digest_of(parts).hex()


def derive_key(*path: int | str) -> int:
    """The key at a path, in ``[0, 2**64)``."""
    return int.from_bytes(_digest(list(path)), "little")


def hash64(
    key: int, values: np.ndarray, out: np.ndarray | None = None, scratch: np.ndarray | None = None
) -> np.ndarray:
    """Hashes each value under a key.

    Args:
        key: In ``[0, 2**64)``.
        values: uint64, any shape.
        out: Gets the hashes, uint64 of the same shape; None makes one.
        scratch: Is written over, uint64 of the same shape, another array than ``out``; None makes one.

    Returns:
        ``out``; for one key, different values have different hashes.
    """
    # Array arithmetic wraps modulo 2**64, as it must here, without a warning. Output number x of the generator is of
    # key + (x + 1) * gamma. For the few values that are usual here, calls and new memory take longer than arithmetic.
    z = np.multiply(values, _GAMMA_0D, np.empty_like(values) if out is None else out)
    np.add(z, np.array((key + _GAMMA) & _ONES, dtype=np.uint64), z)
    shifted = np.right_shift(z, _30, np.empty_like(z) if scratch is None else scratch)
    np.multiply(np.bitwise_xor(z, shifted, z), _MIX_1_0D, z)
    np.multiply(np.bitwise_xor(z, np.right_shift(z, _27, shifted), z), _MIX_2_0D, z)
    return np.bitwise_xor(z, np.right_shift(z, _31, shifted), z)


def hash64_of(key: int, value: int) -> int:
    """``hash64`` of one value: a few of them take less time by themselves than as an array."""
    z = (value * _GAMMA + key + _GAMMA) & _ONES
    z = (z ^ (z >> 30)) * _MIX_1 & _ONES
    z = (z ^ (z >> 27)) * _MIX_2 & _ONES
    return z ^ (z >> 31)
