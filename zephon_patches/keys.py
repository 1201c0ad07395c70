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

__all__ = ["canonical_json", "derive_key", "fingerprint", "fingerprint_of_json", "hash64"]

_PERSON = b"zephon"
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


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


def hash64(key: int, values: np.ndarray) -> np.ndarray:
    """Hashes each value under a key.

    Args:
        key: In ``[0, 2**64)``.
        values: uint64, any shape.

    Returns:
        uint64, the same shape; for one key, different values have different hashes.
    """
    # Array arithmetic wraps modulo 2**64, as it must here, without a warning.
    z = (values + np.uint64(1)) * _GAMMA + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
