"""Digests of what a trainer gets: each row's names, types, shapes and bytes, by XXH3-64.

Two of a batch: ``digest`` depends on the order of the rows, ``rows`` does not. So rows that only changed places are
told from rows with other tokens.
"""

from collections.abc import Mapping

import numpy as np
import xxhash

__all__ = ["Digest", "row_digests"]


def row_digests(arrays: Mapping[str, np.ndarray]) -> list[int]:
    """The digest of each row of a batch.

    Args:
        arrays: By name, each of shape ``(rows, ...)``.
    """
    names = sorted(arrays)
    found = []
    for rows in zip(*(arrays[name] for name in names), strict=True):
        digest = xxhash.xxh3_64()
        for name, row in zip(names, rows, strict=True):
            digest.update(f"{name} {row.dtype.str} {row.shape} ".encode())
            digest.update(np.ascontiguousarray(row).data)
        found.append(digest.intdigest())
    return found


class Digest:
    """The digests of rows that are added one after the other."""

    def __init__(self) -> None:
        self._ordered = xxhash.xxh3_64()
        self.total = 0
        """Of the rows' digests, modulo 2**64"""

    def add(self, digests: list[int]) -> None:
        for digest in digests:
            self._ordered.update(digest.to_bytes(8, "little"))
            self.total = (self.total + digest) % 2**64

    @property
    def digest(self) -> str:
        return str(self._ordered.hexdigest())

    @property
    def rows(self) -> str:
        return f"{self.total:016x}"
