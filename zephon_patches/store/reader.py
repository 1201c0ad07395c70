"""Reads a finished store: sizes from the manifest, tokens through memory maps.

Opening reads the manifest and no shard. A shard is mapped when its first token is asked for. The map holds
no file descriptor: with Python's own ``mmap`` (before 3.13) each shard would keep one open, and a source of
1,024 shards would run into the usual limit of 1,024 open files.

A store whose tokens are in place (``docs/store.md``) maps the parts of the source's files that its manifest names.
"""

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from zephon_patches.errors import StoreError
from zephon_patches.store.indexed import HEADER, index_bytes
from zephon_patches.store.manifest import Manifest, ShardRecord

__all__ = ["TokenStore", "map_file", "open_mask"]

# Linux allows a process 65,530 maps; the oldest one goes when there are as many as this.
_MAX_MAPS = 4096

_PROT_READ = 1
_MAP_SHARED = 1
_MAP_FAILED = ctypes.c_void_p(-1).value


class TokenStore:
    """The shards of one source, opened for reading.

    Keeps a few bytes a shard: what the manifest says of files and ranges is left on the disk. Pickles as what it
    keeps, so worker processes read no manifest.

    Args:
        folder: Of the store.
        tokens_root: Of tokens that are in place: the folder of the source that has them; else not needed.

    Attributes:
        tokens_per_shard, documents_per_shard: int64, shape ``(shards,)``.

    Raises:
        StoreError: There is no finished store in the folder.
    """

    def __init__(self, folder: Path, tokens_root: Path | None = None) -> None:
        self.folder = folder
        self._tokens_root = tokens_root
        manifest = self.manifest
        self.num_documents = manifest.documents
        self.num_tokens = manifest.tokens
        self.data_fingerprint = manifest.data_fingerprint
        self.tokens_per_shard = np.array([shard.tokens for shard in manifest.shards], dtype=np.int64)
        self.documents_per_shard = np.array([shard.documents for shard in manifest.shards], dtype=np.int64)
        self._names = [shard.name for shard in manifest.shards]
        self._index_sums = [shard.idx for shard in manifest.shards]
        self._mask_sums = [shard.mask for shard in manifest.shards] if any(s.mask for s in manifest.shards) else None
        self._dtype = np.dtype(manifest.dtype)
        self._maps: dict[int, np.ndarray] = {}
        self._pointers: dict[int, np.ndarray] = {}
        self._masks: dict[int, np.ndarray] = {}
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
        return {**self.__dict__, "_maps": {}, "_pointers": {}, "_masks": {}}

    def tokens(self, shard: int) -> np.ndarray:
        """All tokens of a shard: integers of the manifest's dtype, shape ``(tokens,)``, a read-only view of the file.

        Raises:
            StoreError: The file is missing or has another size than the manifest says, or nobody said where it is.
        """
        mapped = self._maps.get(shard)
        if mapped is None:
            if len(self._maps) >= _MAX_MAPS:
                del self._maps[next(iter(self._maps))]
            mapped = self._maps[shard] = self._map(shard)
        return mapped

    @property
    def itemsize(self) -> int:
        """Bytes of a token."""
        return self._dtype.itemsize

    def record(self, shard: int) -> ShardRecord:
        """What of a shard's record is kept: its name, counts, and the checksums of its index and mask."""
        documents, tokens = int(self.documents_per_shard[shard]), int(self.tokens_per_shard[shard])
        mask = "" if self._mask_sums is None else self._mask_sums[shard]
        return ShardRecord(self._names[shard], documents, tokens, "", self._index_sums[shard], "", mask=mask)

    def mask(self, shard: int) -> np.ndarray | None:
        """Which tokens of a shard count as labels: uint8, shape ``(tokens,)``, a read-only view; None where all do.

        Raises:
            StoreError: The file is missing or has another size than the manifest says.
        """
        if self._mask_sums is None or not self._mask_sums[shard]:
            return None
        found = self._masks.get(shard)
        if found is None:
            if len(self._masks) >= _MAX_MAPS:
                del self._masks[next(iter(self._masks))]
            found = self._masks[shard] = open_mask(self.folder, self.record(shard))
        return found

    def pointers(self, shard: int) -> np.ndarray:
        """Where the documents of a shard start, in bytes: int64, shape ``(documents,)``, a read-only view of the index.

        Raises:
            StoreError: The index is missing or has another size than the manifest says.
        """
        found = self._pointers.get(shard)
        if found is None:
            if len(self._pointers) >= _MAX_MAPS:
                del self._pointers[next(iter(self._pointers))]
            found = self._pointers[shard] = self._map_pointers(shard)
        return found

    def _map_pointers(self, shard: int) -> np.ndarray:
        path, documents = self.folder / f"{self._names[shard]}.idx", int(self.documents_per_shard[shard])
        _check_size(path, index_bytes(documents), f"remove {self.folder} to build the store anew")
        if not documents:
            return np.empty(0, "<i8")
        return np.frombuffer(map_file(path, HEADER.size + 4 * documents, 8 * documents), "<i8")

    def _map(self, shard: int) -> np.ndarray:
        length = int(self.tokens_per_shard[shard]) * self._dtype.itemsize
        path, start, expected = self.folder / f"{self._names[shard]}.bin", 0, length
        again = f"remove {self.folder} to build the store anew"
        if self._files is not None:
            number, start = map(int, self._spans[shard])
            name, expected = self._files[number]
            if self._tokens_root is None:
                raise StoreError(f"{self.folder}: its tokens are in {name} of its source; say in which folder that is")
            path = self._tokens_root / name
            again = f"bring back the file that {self.folder} was built from, or {again}"
        _check_size(path, expected, again)
        return np.frombuffer(map_file(path, start, length), self._dtype) if length else np.empty(0, self._dtype)


def open_mask(folder: Path, shard: ShardRecord) -> np.ndarray:
    """Maps the mask of a shard that has one; as ``TokenStore.mask``."""
    path = folder / f"{shard.name}.mask"
    _check_size(path, shard.tokens, f"zephon-data verify --repair {folder} has it made anew")
    return np.frombuffer(map_file(path, 0, shard.tokens), np.uint8) if shard.tokens else np.empty(0, np.uint8)


def _check_size(path: Path, expected: int, again: str) -> None:
    """Reading a map beyond the end of its file kills the process, so this is checked before."""
    try:
        size = path.stat().st_size
    except (OSError, ValueError) as error:  # a name that no file can have
        raise StoreError(f"{path}: cannot be opened ({_reason(error)}); if it is lost, {again}") from None
    if size != expected:
        raise StoreError(f"{path}: {size:,} bytes, but the manifest says {expected:,}; {again}")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def map_file(path: Path, start: int, size: int) -> memoryview:
    """Maps the bytes ``[start, start + size)`` of a file, one at least, without keeping it open.

    The map goes with the last view of it.

    Raises:
        StoreError: It cannot be opened or mapped.
    """
    before = start % mmap.ALLOCATIONGRANULARITY  # maps begin at pages
    start, size = start - before, size + before
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened ({error.strerror})") from None
    try:
        address = libc.mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, start)
    finally:
        os.close(descriptor)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise StoreError(f"{path}: cannot be mapped into memory ({os.strerror(code)})")
    buffer = (ctypes.c_char * size).from_address(address)
    # Arrays made from the buffer keep it alive, so the map goes when the last of them does.
    finalizer = weakref.finalize(buffer, libc.munmap, address, size)
    finalizer.atexit = False  # at exit other code may still hold arrays; the system frees the map anyway
    return memoryview(buffer).toreadonly()[before:]
