"""Reads a finished store: sizes from the manifest, tokens through memory maps.

Opening reads the manifest and no shard. A shard is mapped when its first token is asked for. The map holds
no file descriptor: with Python's own ``mmap`` (before 3.13) each shard would keep one open, and a source of
1,024 shards would run into the usual limit of 1,024 open files.

A store whose tokens are in place (``docs/store.md``) maps the parts of the source's files that its manifest names.

A file is compared with the manifest once, when a process maps it: its size and its spots (``content.py``), or all of
its bytes. Rows are read without looking again.
"""

import ctypes
import mmap
import os
import shlex
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from zephon_patches.config import Verify
from zephon_patches.errors import StoreError
from zephon_patches.store.content import check_size, checksum_of, spots_of
from zephon_patches.store.indexed import HEADER, index_bytes
from zephon_patches.store.manifest import SPOTTED, Manifest, ShardRecord

__all__ = ["TokenStore", "compare_index", "map_file", "open_mask"]

# Maps that all stores of a process keep together. Linux allows it 65,530, and libraries and plans have some, too.
_MAX_MAPS = 40_960

_PROT_READ = 1
_MAP_SHARED = 1
_MAP_FAILED = ctypes.c_void_p(-1).value


class _Views(dict[int, np.ndarray]):
    """Views of a store's files, by shard. Where one more would be too many, the oldest of any store goes."""

    def keep(self, shard: int, view: np.ndarray) -> np.ndarray:
        while len(_kept) >= _MAX_MAPS:
            views, oldest = _kept.popleft()
            if (others := views()) is not None:
                others.pop(oldest, None)
        self[shard] = view
        _kept.append((weakref.ref(self), shard))
        return view


_kept: deque[tuple[weakref.ref[_Views], int]] = deque()


class TokenStore:
    """The shards of one source, opened for reading.

    Keeps a few bytes a shard: what the manifest says of files and ranges is left on the disk. Pickles as what it
    keeps, so worker processes read no manifest.

    Args:
        folder: Of the store.
        tokens_root: Of tokens that are in place: the folder of the source that has them; else not needed.

    Attributes:
        tokens_per_shard, documents_per_shard: int64, shape ``(shards,)``.
        key: The name that the folder has where it was built.
        verify: What is compared when a file is first mapped: "size" (and spots), or "checksum".

    Raises:
        StoreError: There is no finished store in the folder.
    """

    def __init__(self, folder: Path, tokens_root: Path | None = None) -> None:
        self.folder = folder
        self.verify: Verify = "size"
        self._tokens_root = tokens_root
        manifest = self.manifest
        self.num_documents = manifest.documents
        self.num_tokens = manifest.tokens
        self.data_fingerprint = manifest.data_fingerprint
        self.tokens_per_shard = np.array([shard.tokens for shard in manifest.shards], dtype=np.int64)
        self.documents_per_shard = np.array([shard.documents for shard in manifest.shards], dtype=np.int64)
        self.key = manifest.key
        # Bytes in arrays take a fifth of the memory of lists of strings, and workers no copy.
        self._names = np.array([shard.name for shard in manifest.shards], dtype=np.bytes_)
        self._sums = _by_kind(manifest.shards, getattr)
        self._spots = _by_kind(manifest.shards, lambda shard, kind: shard.spots.get(kind, ""))
        self._dtype = np.dtype(manifest.dtype)
        self._maps, self._pointers, self._masks = _Views(), _Views(), _Views()
        self._files: list[tuple[str, int]] | None = None  # name and size of files with tokens in place
        if manifest.in_place:
            self._files = [(file.name, file.bytes) for file in manifest.files]
            spans = [(shard.ranges[0].file, shard.ranges[0].start) for shard in manifest.shards]
            self._spans = np.array(spans, dtype=np.int64).reshape(-1, 2)

    @property
    def manifest(self) -> Manifest:
        """The whole manifest, read anew."""
        return Manifest.read(self.folder)

    @property
    def skipped(self) -> dict[str, int]:
        """Records that were left out, by reason."""
        return self.manifest.skipped

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": _Views(), "_pointers": _Views(), "_masks": _Views()}

    def tokens(self, shard: int) -> np.ndarray:
        """All tokens of a shard: integers of the manifest's dtype, shape ``(tokens,)``, a read-only view of the file.

        Raises:
            StoreError: The file is missing or other than the manifest says, or nobody said where it is.
        """
        mapped = self._maps.get(shard)
        return self._maps.keep(shard, self._map(shard)) if mapped is None else mapped

    @property
    def itemsize(self) -> int:
        """Bytes of a token."""
        return self._dtype.itemsize

    def record(self, shard: int) -> ShardRecord:
        """What of a shard's record is kept: its name, counts, and the hashes of the files that are read."""
        documents, tokens = int(self.documents_per_shard[shard]), int(self.tokens_per_shard[shard])
        bin_, idx, mask = (self._sums[kind][shard].decode() if kind in self._sums else "" for kind in SPOTTED)
        spots = {kind: hashes[shard].decode() for kind, hashes in self._spots.items() if hashes[shard]}
        return ShardRecord(self._names[shard].decode(), documents, tokens, bin_, idx, "", mask=mask, spots=spots)

    def mask(self, shard: int) -> np.ndarray | None:
        """Which tokens of a shard count as labels: uint8, shape ``(tokens,)``, a read-only view; None where all do.

        Raises:
            StoreError: The file is missing or other than the manifest says.
        """
        if "mask" not in self._sums or not self._sums["mask"][shard]:
            return None
        found = self._masks.get(shard)
        if found is None:
            found = self._masks.keep(shard, open_mask(self.folder, self.record(shard), self.verify))
        return found

    def pointers(self, shard: int) -> np.ndarray:
        """Where the documents of a shard start, in bytes: int64, shape ``(documents,)``, a read-only view of the index.

        Raises:
            StoreError: The index is missing or other than the manifest says.
        """
        found = self._pointers.get(shard)
        return self._pointers.keep(shard, self._map_pointers(shard)) if found is None else found

    def _map_pointers(self, shard: int) -> np.ndarray:
        record = self.record(shard)
        size, part = index_bytes(record.documents), (HEADER.size + 4 * record.documents, 8 * record.documents)
        return np.frombuffer(_map_whole(self.folder, record, "idx", size, part, self.verify), "<i8")

    def _map(self, shard: int) -> np.ndarray:
        length, record = int(self.tokens_per_shard[shard]) * self._dtype.itemsize, self.record(shard)
        if self._files is None:
            return np.frombuffer(_map_whole(self.folder, record, "bin", length, (0, length), self.verify), self._dtype)
        number, start = map(int, self._spans[shard])
        name, size = self._files[number]
        if self._tokens_root is None:
            raise StoreError(f"{self.folder}: its tokens are in {name} of its source; say in which folder that is")
        with _opened(
            self._tokens_root / name,
            size,
            f"bring back the file that {self.folder} was built from, or remove {self.folder} to build the store anew",
        ) as file:
            if self.verify == "checksum":
                file.compare(record.bin, start, length)
            return np.frombuffer(file.map(start, length), self._dtype)


def _by_kind(shards: list[ShardRecord], hash_of: Callable[[ShardRecord, str], str]) -> dict[str, np.ndarray]:
    """A hash of each shard, 16 bytes of ASCII or none, for each kind of file that any of them has."""
    found = {kind: np.array([hash_of(shard, kind) for shard in shards], dtype="S16") for kind in SPOTTED}
    return {kind: hashes for kind, hashes in found.items() if (hashes != b"").any()}


def open_mask(folder: Path, shard: ShardRecord, verify: Verify = "size") -> np.ndarray:
    """Maps the mask of a shard that has one; as ``TokenStore.mask``."""
    return np.frombuffer(_map_whole(folder, shard, "mask", shard.tokens, (0, shard.tokens), verify), np.uint8)


def compare_index(folder: Path, shard: ShardRecord) -> None:
    """Compares all bytes of a shard's index with the manifest.

    Raises:
        StoreError: They are others, or missing.
    """
    with _opened(folder / f"{shard.name}.idx", index_bytes(shard.documents), _made_anew(folder)) as file:
        file.compare(shard.idx, 0, index_bytes(shard.documents))


def _made_anew(folder: Path) -> str:
    return f"zephon-data verify --repair {shlex.quote(str(folder))} lets the next start make it anew"


def _map_whole(
    folder: Path, shard: ShardRecord, kind: str, size: int, part: tuple[int, int], verify: Verify
) -> memoryview:
    """Maps a part (start and size) of a file of a shard, when the whole file is what the manifest says."""
    with _opened(folder / f"{shard.name}.{kind}", size, _made_anew(folder)) as file:
        if verify == "checksum":
            file.compare(getattr(shard, kind), 0, size)
        elif kind in shard.spots:
            file.compare_spots(shard.spots[kind])
        return file.map(*part)


class _OpenFile:
    """A file of the size that the manifest says. What is mapped is what was compared, whoever renames meanwhile."""

    def __init__(self, path: Path, descriptor: int, size: int, again: str) -> None:
        self._path, self._descriptor, self._size, self._again = path, descriptor, size, again

    def compare(self, expected: str, start: int, size: int) -> None:
        part = "" if size == self._size else f" from byte {start:,} to {start + size:,}"
        self._compare(f"checksum{part}", expected, lambda: checksum_of(self._descriptor, start, size))

    def compare_spots(self, expected: str) -> None:
        self._compare("spots' checksum", expected, lambda: spots_of(self._descriptor, self._size))

    def map(self, start: int, size: int) -> memoryview:
        return _mapped(self._path, self._descriptor, start, size) if size else memoryview(b"")

    def _compare(self, name: str, expected: str, checksum: Callable[[], str]) -> None:
        try:
            present = checksum()
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be read ({_reason(error)}); {self._again}") from None
        if present != expected:
            raise StoreError(
                f"{self._path}: damaged, or another file in its place: its {name} is {present}, but the manifest says "
                f"{expected}; {self._again}"
            )


@contextmanager
def _opened(path: Path, size: int, again: str) -> Iterator[_OpenFile]:
    """Opens a file and compares its size: reading a map beyond the end of its file kills the process."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    except (OSError, ValueError) as error:  # a name that no file can have
        raise StoreError(f"{path}: cannot be opened ({_reason(error)}); if it is lost, {again}") from None
    try:
        problem = check_size(descriptor, size)
        if problem is not None:
            raise StoreError(f"{path}: {problem}; {again}")
        yield _OpenFile(path, descriptor, size, again)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def map_file(path: Path, start: int, size: int) -> memoryview:
    """Maps the bytes ``[start, start + size)`` of a file, one at least, without keeping it open.

    The map goes with the last view of it.

    Raises:
        StoreError: It cannot be opened or mapped.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened ({error.strerror})") from None
    try:
        return _mapped(path, descriptor, start, size)
    finally:
        os.close(descriptor)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _mapped(path: Path, descriptor: int, start: int, size: int) -> memoryview:
    before = start % mmap.ALLOCATIONGRANULARITY  # maps begin at pages
    start, size = start - before, size + before
    libc = _libc()
    address = libc.mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, start)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise StoreError(f"{path}: cannot be mapped into memory ({os.strerror(code)})")
    buffer = (ctypes.c_char * size).from_address(address)
    # Arrays made from the buffer keep it alive, so the map goes when the last of them does.
    finalizer = weakref.finalize(buffer, libc.munmap, address, size)
    finalizer.atexit = False  # at exit other code may still hold arrays; the system frees the map anyway
    return memoryview(buffer).toreadonly()[before:]
