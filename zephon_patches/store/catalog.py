"""What a store's files say without its tokens: which document is where, from which record, and back.

For looking at single documents of large stores: the manifest is read once, lean, as plain data (a store of 10^5 shards
in a fraction of a second), and of a shard only what is asked for. Nothing is written.

A document's record in its file is counted as ``docs/store.md`` says: the record in the shard's range of the file, plus
the records of all ranges of that file in the shards before.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zephon_patches.errors import StoreError
from zephon_patches.keys import fingerprint
from zephon_patches.store.indexed import HEADER
from zephon_patches.store.manifest import ShardRecord, read_content, shard_record

__all__ = ["Catalog", "DocumentPlace"]


# Shards from which on there are so many small objects, all of which stay, that the collector's going over them takes
# longer than all else, at the end of the process too.
_MANY = 10_000


class DocumentPlace(NamedTuple):
    """A document of a store."""

    shard: int
    document: int
    """In the shard"""
    start: int
    """Its first token in the shard"""
    stop: int


class Catalog:
    """The shards of one source, as far as their manifest, indexes and origins tell.

    Args:
        folder: Of the store.
        tokens_root: Of tokens that are in place: the folder of the source that has them.

    Attributes:
        tokens_per_shard: int64, shape ``(shards,)``.
        files: As in the manifest.

    Raises:
        StoreError: There is no finished store in the folder.
    """

    def __init__(self, folder: Path, tokens_root: Path | None = None) -> None:
        self.folder = folder
        self._tokens_root = tokens_root
        with _no_collections():
            content = read_content(folder)
        try:
            self._shards: list[dict[str, Any]] = content["shards"]
            self.files: list[dict[str, Any]] = content["files"]
            self.recipe: dict[str, Any] = content["recipe"]
            self.num_documents, self.num_tokens = int(content["documents"]), int(content["tokens"])
            self.in_place = bool(content.get("in_place", False))
            self._dtype = np.dtype(content["dtype"])
            self.tokens_per_shard = np.array([shard["tokens"] for shard in self._shards], dtype=np.int64)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StoreError(f"{folder}: its manifest is not what this version writes ({error!r})") from None
        if len(self._shards) >= _MANY:
            gc.freeze()
        self._layout = lru_cache(maxsize=64)(self._read_layout)

    @cached_property
    def data_fingerprint(self) -> str:
        """As ``Manifest.data_fingerprint``."""
        return fingerprint(
            [
                [shard["tokens"], shard["bin"], shard["idx"], *([shard["mask"]] if shard.get("mask") else [])]
                for shard in self._shards
            ]
        )

    @property
    def skipped(self) -> dict[str, int]:
        """As ``Manifest.skipped``."""
        counts: Counter[str] = Counter()
        for shard in self._shards:
            counts.update(shard.get("skipped", {}))
        return dict(sorted(counts.items()))

    def record(self, shard: int) -> ShardRecord:
        """The manifest's record of a shard.

        Raises:
            StoreError: It is damaged.
        """
        try:
            return shard_record(self._shards[shard])
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise StoreError(f"{self.folder}: shard {shard:,} in its manifest is damaged ({error!r})") from None

    def documents(self, shard: int, start: int, stop: int) -> list[DocumentPlace]:
        """The documents that have any of the tokens ``[start, stop)`` of a shard, in order."""
        ends = self._layout(shard)[0]
        first = int(np.searchsorted(ends, start, side="right"))  # steps over documents without tokens
        last = int(np.searchsorted(ends, stop, side="left"))
        places = [_place(shard, ends, document) for document in range(first, min(last, len(ends) - 1) + 1)]
        return [place for place in places if place.start < place.stop]

    def origin(self, shard: int, document: int) -> tuple[str, int]:
        """Where a document comes from: the file's name as in the manifest, and the record in it, from 0.

        The name is empty where the records come from a registered data set.
        """
        file, record = self._layout(shard)[1][document].tolist()
        return self.files[file]["name"] if file >= 0 else "", self._records_before(shard, file) + record

    def find(self, file: int, record: int) -> list[DocumentPlace]:
        """The documents of a record of a file; none if it gave none.

        Raises:
            StoreError: The file has fewer records.
        """
        shards, files, records = self._ranges
        chosen = np.flatnonzero(files == file)
        ends = np.cumsum(records[chosen])
        place = int(np.searchsorted(ends, record, side="right"))
        if place == len(chosen):
            count = int(ends[-1]) if len(ends) else 0
            raise StoreError(
                f"{self.files[file]['name']} has {count:,} records, counted from 0, and no record {record:,} "
                f"({self.folder})"
            )
        return self._find_in(int(shards[chosen[place]]), file, record - int(ends[place] - records[chosen[place]]))

    def tokens(self, shard: int, start: int, stop: int) -> np.ndarray:
        """The tokens ``[start, stop)`` of a shard, of the manifest's dtype.

        Raises:
            StoreError: The file is missing or too short.
        """
        offset, record = 0, self.record(shard)
        path = self.folder / f"{record.name}.bin"
        if self.in_place:
            if self._tokens_root is None:
                raise StoreError(f"{self.folder}: its tokens are in place; say in which folder that is")
            piece = record.ranges[0]
            path, offset = self._tokens_root / self.files[piece.file]["name"], piece.start
        return _read(path, self._dtype, stop - start, offset + start * self._dtype.itemsize)

    def _find_in(self, shard: int, file: int, record: int) -> list[DocumentPlace]:
        ends, origins = self._layout(shard)
        found = np.flatnonzero((origins[:, 0] == file) & (origins[:, 1] == record)).tolist()
        return [_place(shard, ends, document) for document in found]

    def _records_before(self, shard: int, file: int) -> int:
        """Records of a file in the shards before one."""
        shards, files, records = self._ranges
        return int(records[(files == file) & (shards < shard)].sum())

    @cached_property
    def _ranges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of every range of every shard: the shard, the file, and its records; int64, shape ``(ranges,)`` each."""
        ranges = [(number, piece) for number, shard in enumerate(self._shards) for piece in shard["ranges"]]
        shards = np.array([number for number, _ in ranges], dtype=np.int64)
        files, records = (np.array([piece[key] for _, piece in ranges], dtype=np.int64) for key in ("file", "records"))
        return shards, files, records

    def _read_layout(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Where each document of a shard ends, (documents,), and its file and record in the range, (documents, 2)."""
        record = self.record(shard)
        lengths = _read(self.folder / f"{record.name}.idx", np.dtype("<i4"), record.documents, HEADER.size)
        origins = _read(self.folder / f"{record.name}.origin", np.dtype("<i8"), 2 * record.documents, 0)
        ends = np.cumsum(lengths, dtype=np.int64)
        if (len(ends) and int(ends[-1]) != record.tokens) or not -1 <= int(origins[::2].max(initial=-1)) < len(
            self.files
        ):
            raise StoreError(f"{self.folder}: shard {record.name} is damaged; zephon-data verify finds all damage")
        return ends, origins.reshape(-1, 2)


def _place(shard: int, ends: np.ndarray, document: int) -> DocumentPlace:
    return DocumentPlace(shard, document, int(ends[document - 1]) if document else 0, int(ends[document]))


def _read(path: Path, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
    try:
        found = np.fromfile(path, dtype, count, offset=offset)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"{path}: cannot be read ({reason}); zephon-data verify finds all damage") from None
    if len(found) != count:
        raise StoreError(f"{path}: cut off; zephon-data verify finds all damage")
    return found


@contextmanager
def _no_collections() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
