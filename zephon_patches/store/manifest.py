"""The manifest: the file that closes a store, and the record of each shard that it is made of.

A folder without a manifest is an unfinished store, whatever else is in it. The manifest is JSON, and a
function of the input and the settings alone: whoever builds the store, however often it was interrupted,
writes the same bytes. ``docs/store.md`` describes each field.
"""

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from zephon_patches.errors import StoreError
from zephon_patches.keys import canonical_json, fingerprint, fingerprint_of_json
from zephon_patches.store.content import read_whole
from zephon_patches.store.indexed import DTYPES

__all__ = [
    "FORMAT",
    "MANIFEST",
    "SPOTTED",
    "FileRecord",
    "InputRange",
    "Manifest",
    "ShardRecord",
    "read_content",
    "shard_record",
]

FORMAT = 1
MANIFEST = "manifest.json"

SPOTTED = ("bin", "idx", "mask")
"""The files of a shard that are read in training"""

_HASH = re.compile(rb'"hash":"([0-9a-f]{16})",')

# A name is put behind the store's folder, so it must not lead out of it.
_SHARD_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,199}", re.ASCII)
_DTYPES = [dtype.str for dtype in DTYPES.values()]
_MAX_COUNT = 2**60  # no disk holds more; sizes in bytes still fit into 64 bits


@dataclass(frozen=True)
class FileRecord:
    """One input file, as it was when the store was planned."""

    name: str
    """Relative to the source's folder, with / between its parts"""
    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class InputRange:
    """A piece of one input file: half-open, in the unit of its format (bytes, or row groups)."""

    file: int
    """Index into the manifest's files; -1 for records that come from a data set and not from files"""
    start: int
    stop: int
    records: int = 0
    """Records in the piece; 0 in a plan, where they have not been counted"""
    content: str = ""
    """Hash of the piece's bytes; empty in a plan, and where there are no bytes to hash"""


@dataclass(frozen=True)
class ShardRecord:
    """One finished shard."""

    name: str
    documents: int
    tokens: int
    bin: str
    """Hash of ``NAME.bin``, XXH3-64 in hexadecimal, as are the next two"""
    idx: str
    origin: str
    ranges: list[InputRange] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    """Records that were left out, by reason; absent in the file where there are none"""
    mask: str = ""
    """Hash of ``NAME.mask``; absent in the file where all tokens count as labels, and there is no such file"""
    spots: dict[str, str] = field(default_factory=dict)
    """Hash of the spots (``content.py``) of each file in ``SPOTTED``, where there is one; absent in old stores"""

    def to_dict(self) -> dict[str, Any]:
        """Its JSON form."""
        content = asdict(self)
        if not self.skipped:
            del content["skipped"]
        if not self.mask:
            del content["mask"]
        if not self.spots:
            del content["spots"]
        return content


@dataclass(frozen=True)
class Manifest:
    """What a store holds and where it came from."""

    recipe: dict[str, Any]
    """How texts became tokens: the settings that the store's content depends on besides the files"""
    dtype: str
    files: list[FileRecord]
    shards: list[ShardRecord]
    in_place: bool = False
    """Whether the tokens of a shard are the bytes of its first range, where they are; absent in the file if not"""

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def skipped(self) -> dict[str, int]:
        """Records that were left out, by reason."""
        counts: Counter[str] = Counter()
        for shard in self.shards:
            counts.update(shard.skipped)
        return dict(sorted(counts.items()))

    @property
    def key(self) -> str:
        """The name of the folder that a store with this recipe and these files is built in."""
        files = fingerprint([[file.name, file.bytes] for file in self.files])
        return f"{fingerprint(self.recipe)}-{files}"

    @property
    def data_fingerprint(self) -> str:
        """Stands for all tokens, document boundaries and masks, in their order."""
        return fingerprint(
            [[shard.tokens, shard.bin, shard.idx, *([shard.mask] if shard.mask else [])] for shard in self.shards]
        )

    def to_json(self) -> bytes:
        content = {"format": FORMAT, "documents": self.documents, "tokens": self.tokens, **asdict(self)}
        content["shards"] = [shard.to_dict() for shard in self.shards]
        if not self.in_place:
            del content["in_place"]
        # The hash over the rest tells a damaged manifest from a whole one.
        content["hash"] = fingerprint(content)
        return (canonical_json(content) + "\n").encode("ascii")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads the manifest of a store.

        Raises:
            StoreError: There is none, it cannot be read, it is damaged, or a newer version wrote it.
        """
        path, content = folder / MANIFEST, read_content(folder)
        # The hash keeps no one from writing anything: what comes from elsewhere may have a good one.
        try:
            manifest = cls(
                recipe=content["recipe"],
                dtype=content["dtype"],
                files=[FileRecord(**entry) for entry in content["files"]],
                shards=[shard_record(entry) for entry in content["shards"]],
                in_place=content.get("in_place", False),
            )
            manifest._check(content["documents"], content["tokens"])
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"{path}: not what this version writes ({error!r}); remove {folder} to build the store anew"
            ) from None
        return manifest

    def _check(self, documents: Any, tokens: Any) -> None:
        """Raises ValueError where a field has another type or range than the format allows."""
        if not isinstance(self.recipe, dict) or self.dtype not in _DTYPES:
            raise ValueError(f"recipe {self.recipe!r:.60}, dtype {self.dtype!r:.60}")
        for file in self.files:
            name = file.name
            leaves = not isinstance(name, str) or name.startswith("/") or ".." in name.split("/") or "\0" in name
            if leaves or not (_is_count(file.bytes) and type(file.mtime_ns) is int):
                raise ValueError(f"file {file!r:.200}")
        if type(self.in_place) is not bool:
            raise ValueError(f"in_place {self.in_place!r:.60}")
        names = set()
        for shard in self.shards:
            if shard.name in names:
                raise ValueError(f"shard name {shard.name!r:.60} twice")
            names.add(shard.name)
            for piece in shard.ranges:
                if piece.file >= len(self.files):
                    raise ValueError(f"range {piece!r:.200}")
            if self.in_place:
                self._check_in_place(shard)
        if (documents, tokens) != (self.documents, self.tokens):
            raise ValueError(f"{documents!r:.30} documents and {tokens!r:.30} tokens, other than its shards' sums")

    def _check_in_place(self, shard: ShardRecord) -> None:
        itemsize = np.dtype(self.dtype).itemsize
        tokens = shard.ranges[0] if shard.ranges else InputRange(-1, 0, 0)
        inside = tokens.file >= 0 and tokens.stop <= self.files[tokens.file].bytes and tokens.start % itemsize == 0
        if not inside or tokens.stop - tokens.start != shard.tokens * itemsize:
            raise ValueError(f"shard {shard.name} of {shard.tokens:,} tokens in {tokens!r:.200}")


def read_content(folder: Path) -> dict[str, Any]:
    """The manifest's JSON, with the right format and hash; its fields are not looked at.

    Raises:
        StoreError: As ``Manifest.read``.
    """
    path = folder / MANIFEST
    try:
        data = read_whole(path)
        as_written = _hash_as_written(data)
        content = _parsed(data) if as_written else json.loads(data)
    except FileNotFoundError:
        raise StoreError(f"{folder}: no finished token store here ({MANIFEST} is missing)") from None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: damaged, not JSON ({error}); remove {folder} to build the store anew") from None
    if not isinstance(content, dict) or "format" not in content:
        raise StoreError(f"{path}: not a manifest of a token store; remove {folder} to build the store anew")
    if content["format"] != FORMAT:
        raise StoreError(
            f"{path}: format {content['format']}, but this version reads format {FORMAT}; use the version "
            f"that wrote it, or remove {folder} to build the store anew"
        )
    written = content.pop("hash", None)
    try:
        present = as_written or fingerprint(content)
    except (ValueError, RecursionError):  # a damaged number may read as an infinity, which has no hash
        present = None
    if written is None or written != present:
        raise StoreError(f"{path}: damaged, its hash does not match; remove {folder} to build the store anew")
    return content


def _parsed(data: bytes) -> Any:
    """JSON of this version, by the faster parser; it refuses names that are no UTF-8, which the other one reads."""
    try:
        return orjson.loads(data)
    except ValueError:
        return json.loads(data)


def _hash_as_written(data: bytes) -> str | None:
    """The hash in a manifest if it is that of the other bytes: then nothing needs to be written anew to compare."""
    # A quote inside a string has a backslash before it, so this is a key; above it are only "documents", "dtype",
    # "files" and "format", in whose entries no key has the name.
    found = _HASH.search(data)
    if found is None:
        return None
    written = found[1].decode()
    view = memoryview(data)[: -1 if data.endswith(b"\n") else None]
    return written if fingerprint_of_json(view[: found.start()], view[found.end() :]) == written else None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_hash(value: Any) -> bool:
    """Whether it is a hash of a file, or empty."""
    return type(value) is str and len(value) in (0, 16) and value.isascii()


def shard_record(entry: dict[str, Any]) -> ShardRecord:
    """A shard's record from its JSON form.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, RecursionError: It is none; each value is checked.
    """
    record = ShardRecord(**{**entry, "ranges": [InputRange(**piece) for piece in entry["ranges"]]})
    if not isinstance(record.name, str) or not _SHARD_NAME.fullmatch(record.name):
        raise ValueError(f"shard name {record.name!r:.60}")
    sums = (record.bin, record.idx, record.origin, record.mask)
    if not (_is_count(record.documents) and _is_count(record.tokens) and all(map(_is_hash, sums))):
        raise ValueError(f"shard {record!r:.200}")
    if not all(type(reason) is str and _is_count(count) for reason, count in record.skipped.items()):
        raise ValueError(f"skipped records {record.skipped!r:.200}")
    if not all(kind in SPOTTED and _is_hash(spots) for kind, spots in record.spots.items()):
        raise ValueError(f"spots {record.spots!r:.200}")
    for piece in record.ranges:
        counts = (piece.start, piece.stop, piece.records)
        place_is_known = type(piece.file) is int and piece.file >= -1
        if not place_is_known or not all(map(_is_count, counts)) or type(piece.content) is not str:
            raise ValueError(f"range {piece!r:.200}")
    return record
