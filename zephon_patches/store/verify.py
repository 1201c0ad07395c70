"""Checks a finished store, file by file: sizes, the structure of each index, checksums.

Nothing that a file says is believed before its size bears it out, so damage (or malice) costs an error and no memory:
a size is compared with what the manifest's counts ask for, then the file is read in blocks. The manifest itself is
checked where it is read. Reads every byte once.

Worked case: the manifest says 2 documents and 5 uint16 tokens. Then ``NAME.bin`` has 10 bytes, ``NAME.idx`` 34 + 8 +
16 + 24 = 82, ``NAME.origin`` 32; the lengths are not negative and sum up to 5, the pointers are their running sum
times 2, the documents are 0 1 2; and each file has the checksum in the manifest.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from zephon_patches.store.content import spots_of
from zephon_patches.store.indexed import HEADER, MAGIC, VERSION, code_of, index_bytes
from zephon_patches.store.manifest import Manifest, ShardRecord

__all__ = ["Damage", "verify_store"]

_BLOCK_BYTES = 4 << 20
_BLOCK_ENTRIES = 1 << 18


@dataclass(frozen=True)
class Damage:
    """One damaged file of a store."""

    shard: int
    """Index into the manifest's shards"""
    path: Path
    problem: str


def verify_store(folder: Path, tokens_root: Path | None = None) -> list[Damage]:
    """Compares all files of a finished store with its manifest; writes nothing.

    Args:
        folder: Of the store.
        tokens_root: The folder of the source of a store whose tokens are in place; without it they are not checked.

    Returns:
        The damaged files in the order of the shards, each with its first problem; empty for a sound store.

    Raises:
        StoreError: The manifest is missing, damaged, or of another format.
    """
    manifest = Manifest.read(folder)
    dtype = np.dtype(manifest.dtype)
    damages: list[Damage] = []
    for number, shard in enumerate(manifest.shards):
        if manifest.in_place and tokens_root is not None:
            damages += _in_place(manifest, number, tokens_root)
        sizes = {
            "bin": shard.tokens * dtype.itemsize,
            "idx": index_bytes(shard.documents),
            "origin": 16 * shard.documents,
        }
        if manifest.in_place:
            del sizes["bin"]
        if shard.mask:
            sizes["mask"] = shard.tokens
        for kind, size in sizes.items():
            path = folder / f"{shard.name}.{kind}"
            try:
                problem = _problem(path, kind, size, shard, dtype)
            except OSError as error:
                problem = f"cannot be read ({error.strerror or error})"
            if problem is not None:
                damages.append(Damage(number, path, problem))
    return damages


def _in_place(manifest: Manifest, number: int, root: Path) -> Iterator[Damage]:
    """Damage to what a shard has of the source's files: its tokens, and behind the last ones of a file their index."""
    shard = manifest.shards[number]
    for piece, expected, digest in (
        (shard.ranges[0], shard.bin, xxhash.xxh3_64()),
        *((piece, piece.content, xxhash.xxh3_128()) for piece in shard.ranges[1:]),
    ):
        if piece.file < 0:
            continue
        file = manifest.files[piece.file]
        path = root / file.name
        try:
            problem = _size_problem(path, file.bytes) or _checksum_problem(
                path, expected, digest, piece.start, piece.stop
            )
        except (OSError, ValueError) as error:
            problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        if problem is not None:
            yield Damage(number, path, problem)


def _size_problem(path: Path, size: int) -> str | None:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
        return "is no regular file"
    if status.st_size != size:
        return f"{status.st_size:,} bytes, but the manifest's counts give {size:,}"
    return None


def _problem(path: Path, kind: str, size: int, shard: ShardRecord, dtype: np.dtype) -> str | None:
    if (problem := _size_problem(path, size)) is not None:
        return problem
    if kind == "idx" and (problem := _index_problem(path, shard, dtype)) is not None:
        return problem
    if (problem := _checksum_problem(path, getattr(shard, kind), xxhash.xxh3_64(), 0, size)) is not None:
        return problem
    if kind in shard.spots:
        with open(path, "rb") as file:
            present = spots_of(file.fileno(), size)
        if present != shard.spots[kind]:
            return f"the checksum of its spots is {present}, the manifest's {shard.spots[kind]}"
    return None


def _index_problem(path: Path, shard: ShardRecord, dtype: np.dtype) -> str | None:
    """What is wrong in an index that has the right size."""
    documents = shard.documents
    with open(path, "rb") as file:
        magic, version, code, sequences, entries = HEADER.unpack(file.read(HEADER.size))
    if (magic, version) != (MAGIC, VERSION):
        return f"starts with {magic!r}, version {version}; expected {MAGIC!r}, version {VERSION}"
    if code != code_of(dtype):
        return f"dtype code {code}, but the manifest says {dtype.str}, code {code_of(dtype)}"
    if (sequences, entries) != (documents, documents + 1):
        return f"{sequences:,} sequences and {entries:,} entries, but the manifest says {documents:,} documents"
    pointers_at = HEADER.size + 4 * documents
    documents_at = pointers_at + 8 * documents
    start = 0  # of the block's first document, in tokens
    for first in range(0, documents + 1, _BLOCK_ENTRIES):
        count = min(_BLOCK_ENTRIES, documents - first)
        lengths = _read(path, "<i4", count, HEADER.size + 4 * first).astype(np.int64)
        if count and lengths.min() < 0:
            return f"document {first + int(np.argmax(lengths < 0)):,} has the length {lengths.min():,}"
        ends = start + np.cumsum(lengths)
        if not np.array_equal(_read(path, "<i8", count, pointers_at + 8 * first), (ends - lengths) * dtype.itemsize):
            return "its pointers are not the running sum of its lengths"
        start = int(ends[-1]) if count else start
        # One entry more than documents, in the last block.
        entry_count = min(_BLOCK_ENTRIES, documents + 1 - first)
        entry = _read(path, "<i8", entry_count, documents_at + 8 * first)
        if not np.array_equal(entry, np.arange(first, first + entry_count)):
            return "its documents are not one sequence each"
    if start != shard.tokens:
        return f"its lengths sum up to {start:,} tokens, but the manifest says {shard.tokens:,}"
    return None


def _read(path: Path, dtype: str, count: int, offset: int) -> np.ndarray:
    found = np.fromfile(path, dtype, count, offset=offset)
    if len(found) != count:
        raise OSError(f"cut off while it was read, at byte {os.path.getsize(path):,}")
    return found


def _checksum_problem(path: Path, expected: str, digest: Any, start: int, stop: int) -> str | None:
    with open(path, "rb") as file:
        file.seek(start)
        left = stop - start
        while left > 0 and (block := file.read(min(_BLOCK_BYTES, left))):
            digest.update(block)
            left -= len(block)
    present = digest.hexdigest()
    return None if present == expected else f"its checksum is {present}, the manifest's {expected}"
