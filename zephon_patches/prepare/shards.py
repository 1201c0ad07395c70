"""Where the documents come from, and how the input is cut into units of work.

Units follow from the files and ``shard_bytes`` alone, never from ranks, workers, cores or timing, so every
builder cuts the same units. A unit may span small files and may end inside a large one, always at a record's end. A
file that cannot be entered in the middle (a compressed one) is a unit of its own, and gives a shard for every
``shard_bytes`` of its decompressed records.

Worked case, ``shard_bytes`` = 100, lines of 40 bytes, files a (60 bytes: lines of 40 and 20) and b (200 bytes)::

    unit 0: a[0:60] b[0:40]      60 + 40 reaches 100
    unit 1: b[40:160]            the line that holds byte 100 of the unit ends at 120
    unit 2: b[160:200]
"""

import fnmatch
import glob
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from zephon_patches.config import SourceConfig
from zephon_patches.errors import InputError
from zephon_patches.prepare.processors import Processor, load_processor, process
from zephon_patches.prepare.readers import (
    BLANK,
    BadRecord,
    Conversation,
    Reading,
    StreamFormat,
    format_of,
    has_lone_surrogate,
    not_an_object,
)
from zephon_patches.store.manifest import FileRecord, InputRange

__all__ = [
    "SKIPPED",
    "Document",
    "DocumentPiece",
    "FileInput",
    "FoundFiles",
    "InPlace",
    "Input",
    "Piece",
    "RecordInput",
    "Skipped",
    "check_unchanged",
    "cut_units",
    "file_record",
    "finds",
    "hash_range",
    "list_files",
    "reading_input",
]

logger = logging.getLogger(__name__)

MIB = 1 << 20
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 16 * MIB, 1024 * MIB
SHARDS_PER_SOURCE = 1024
UNKNOWN_SIZE_SHARD_BYTES = 256 * MIB  # of a data set from a hub

_BLOCK = 4 * MIB

_DATA_SET_FILES = ("state.json", "dataset_info.json", "dataset_dict.json")


Document = str | np.ndarray | Conversation
"""A text, token ids (integers, shape ``(tokens,)``), or what a chat template makes a text of"""

FoundFiles = tuple[Path, list[FileRecord]]
"""A folder, and the files of a source with names relative to it, in their order"""

SKIPPED = "skipped.jsonl"
"""In a store, where records that were left out are listed"""

Skipped = tuple[int, int, str]
"""A record that was left out: the range's file, the record in the range, the reason"""


class Piece(Protocol):
    """The input of one shard: read it once (``Encoder``), then ask what it was."""

    @property
    def ranges(self) -> list[InputRange]:
        """The ranges that were read, with their records counted and their bytes hashed."""

    @property
    def last(self) -> bool:
        """Whether the unit ends with this piece."""

    @property
    def skipped(self) -> list[Skipped]:
        """The records that were left out."""


class DocumentPiece(Piece, Protocol):
    """A piece that gives one document after the other."""

    def __iter__(self) -> Iterator[tuple[tuple[int, int], Document]]:
        """Yields ((range's file, record in the range), document) of each document."""

    def place(self, file: int, record: int) -> str:
        """Where a document is, given as ``__iter__`` gives it, for messages."""

    def reject(self, file: int, record: int, bad: BadRecord) -> None:
        """Takes back the last document, in whose ids the tokenizer's user found a fault: skipped, or an error."""


class InPlace(NamedTuple):
    """Tokens that are used where they are."""

    root: Path
    """Folder that the names of files are relative to"""
    dtype: np.dtype


class Input(Protocol):
    """What a source reads."""

    name: str
    path: str
    add_bos: bool | None
    add_eos: bool | None
    """Whether BOS and EOS stand around its documents; None leaves it to the data's settings"""
    has_files: bool
    """Whether it reads local files; if so and ``files`` is empty, they are gone"""
    in_place: InPlace | None
    """If its files hold the tokens themselves, of which a store takes no copy"""

    @property
    def files(self) -> list[FileRecord]:
        """The files in their order; to find them may mean to download them."""

    @property
    def version(self) -> str | None:
        """What every file's name begins with, and ``/``, if it is known without them: a finished store will do then."""

    def missing(self) -> tuple[str, str]:
        """Why there are no files, and what to do, for messages."""

    def recipe(self) -> dict[str, Any]:
        """The settings of reading that the documents depend on."""

    def units(self, shard_bytes: int) -> list[list[InputRange]]:
        """The units of work."""

    def pieces(self, unit: Sequence[InputRange], shard_bytes: int, skip_records: int) -> Iterator[Piece]:
        """The shards of a unit, from record ``skip_records`` of it on."""

    def num_bytes(self, piece: InputRange) -> int:
        """Bytes of a range of a unit, for telling how far a build is."""

    def sample(self, unit: Sequence[InputRange], room: int) -> tuple[Piece, int]:
        """The first documents of a unit, from about ``room`` bytes of input, and how many bytes those are."""

    def prepare_arguments(self) -> list[str] | None:
        """The arguments with which ``zephon-data prepare`` reads this source; None if it cannot."""

    def check_content(self, ranges: Iterable[InputRange]) -> str | None:
        """The name of a file whose bytes are no longer those that were hashed, or None."""


class FileInput:
    """A source of files.

    Args:
        source: Its path is a file, a folder (all files in it, at any depth, but for names that start with
            '.' or '_') or a glob.
        found: The files, where they are known.

    Raises:
        InputError: A file has a suffix that is not read, or cannot be looked at. No file at all is no error
            here: ``files`` is empty.
    """

    def __init__(self, source: SourceConfig, found: FoundFiles | None = None) -> None:
        self.name = source.name
        self.path = source.path
        self.add_bos, self.add_eos = source.add_bos, source.add_eos
        self.has_files = True
        self.in_place: InPlace | None = None
        self.version: str | None = None
        self._on_bad_record = source.on_bad_record
        self._processor: Processor | None = None
        setting = "token_field" if source.token_field else "chat_field" if source.chat_field else "text_field"
        field = getattr(source, setting)
        self._reading = Reading(field, setting)
        self._needed: str | None = field
        self._settings: dict[str, Any] = {setting: field}
        if setting != "text_field":  # which stay as they are, or have their own; [data]'s settings are of texts
            self.add_bos, self.add_eos = bool(source.add_bos), bool(source.add_eos)
        # What has its default stays out, so that a setting that is added leaves the keys of stores as they are.
        if source.on_bad_record != "error":
            self._settings["on_bad_record"] = source.on_bad_record
        self.prepare_options = [f"--{setting.replace('_', '-')}", field]
        if source.on_bad_record != "error":
            self.prepare_options += ["--on-bad-record", source.on_bad_record]
        if source.processor:
            where = f"source {source.name!r}: processor"
            self._processor, self._settings["processor"] = load_processor(source.processor, where)
            self._needed = None
            self.prepare_options = ["--processor", source.processor, *self.prepare_options[2:]]
        self._root, self.files = list_files(source.path) if found is None else found
        for file in self.files:
            format_of(self._root / file.name)

    def missing(self) -> tuple[str, str]:
        return _no_match(self.path)

    def recipe(self) -> dict[str, Any]:
        return self._settings

    def units(self, shard_bytes: int) -> list[list[InputRange]]:
        return cut_units([(self._root / file.name, file.bytes) for file in self.files], shard_bytes)

    def pieces(self, unit: Sequence[InputRange], shard_bytes: int, skip_records: int) -> Iterator[Piece]:
        if not self._is_streamed(unit[0]):
            assert skip_records == 0, "a unit of parts of files is one piece"
            yield _FilePiece(self, unit)
            return
        records = _LookAhead(self._stream(unit[0], skip_records))
        first = skip_records
        while True:
            piece = _StreamPiece(self, unit[0], records, first, shard_bytes)
            yield piece
            if piece.last:
                return
            first = piece.stop

    def num_bytes(self, piece: InputRange) -> int:
        start, stop = self._bytes_of(piece)
        return stop - start

    def sample(self, unit: Sequence[InputRange], room: int) -> tuple[Piece, int]:
        first = unit[0]
        path = self._path(first)
        reader = format_of(path)
        with reading_input(path):
            if isinstance(reader, StreamFormat):
                records = _LookAhead(self._stream(first, 0))
                return _StreamPiece(self, first, records, 0, room), reader.bytes_of_first(path, room)
            stop, size = reader.advance(path, first.start, first.stop, room)
        return _FilePiece(self, [replace(first, stop=stop)]), size

    def prepare_arguments(self) -> list[str] | None:
        return ["--source", f"{self.name}={os.path.abspath(self.path)}", *self.prepare_options]

    def check_content(self, ranges: Iterable[InputRange]) -> str | None:
        for piece in ranges:
            if piece.content and self._hash(piece) != piece.content:
                return str(self._path(piece))
        return None

    def _path(self, piece: InputRange) -> Path:
        return self._root / self.files[piece.file].name

    def _is_streamed(self, piece: InputRange) -> bool:
        return isinstance(format_of(self._path(piece)), StreamFormat)

    def _bytes_of(self, piece: InputRange) -> tuple[int, int]:
        path = self._path(piece)
        reader = format_of(path)
        if isinstance(reader, StreamFormat):
            return piece.start, piece.stop
        with reading_input(path):
            return reader.bytes_of(path, piece.start, piece.stop)

    def _hash(self, piece: InputRange) -> str:
        return hash_range(self._path(piece), *self._bytes_of(piece))

    def _read(self, piece: InputRange) -> Iterator[Any]:
        """The records of a range."""
        path = self._path(piece)
        reader = format_of(path)
        assert not isinstance(reader, StreamFormat)
        check_unchanged(self._root, self.files[piece.file])
        with reading_input(path):
            yield from reader.records(path, piece.start, piece.stop, self._needed)

    def _stream(self, piece: InputRange, skip: int) -> Iterator[tuple[Any, int]]:
        """The records of a file that is read in one go, and the bytes of each."""
        path = self._path(piece)
        reader = format_of(path)
        assert isinstance(reader, StreamFormat)
        check_unchanged(self._root, self.files[piece.file])
        with reading_input(path):
            yield from reader.stream(path, self._needed, skip)

    def _noun(self, piece: InputRange) -> str:
        return format_of(self._path(piece)).noun

    def _documents(
        self, piece: InputRange, noun: str, record: Any, number: int, place: Callable[[], str], skipped: list[Skipped]
    ) -> Sequence[Document]:
        """The documents of the record with this number of its range; a bad one is added to ``skipped``, or raises."""
        if record is BLANK:
            return []
        found: Sequence[Document] | BadRecord
        if isinstance(record, BadRecord):
            found = record
        elif self._processor is None:
            found = self._reading.documents(record, noun)
        elif not isinstance(record, dict):
            found = not_an_object(record)
        else:
            texts = process(self._processor, record, place)
            found = texts
            if any(has_lone_surrogate(text) for text in texts):
                found = BadRecord("lone surrogate", "the processor gave a text with a lone surrogate")
        if isinstance(found, BadRecord):
            self._reject(found, (piece.file, number), place, skipped)
            return []
        return found

    def _reject(
        self, bad: BadRecord, origin: tuple[int, int], place: Callable[[], str], skipped: list[Skipped]
    ) -> None:
        if self._on_bad_record != "skip":
            raise InputError(f"{place()}: {bad.message}")
        skipped.append((*origin, bad.reason))

    def _place(self, piece: InputRange, number: int) -> str:
        path = self._path(piece)
        with reading_input(path):
            return format_of(path).place(path, piece.start, number)

    def _close(self, piece: InputRange, records: int) -> InputRange:
        closed = replace(piece, records=records, content=self._hash(piece))
        # Last, since hashing reads the bytes a second time: both times they were those of the plan.
        check_unchanged(self._root, self.files[piece.file])
        return closed


class _FilePiece:
    last = True

    def __init__(self, source: FileInput, unit: Sequence[InputRange]) -> None:
        self._source = source
        self._unit = unit
        self.ranges: list[InputRange] = []
        self.skipped: list[Skipped] = []

    def __iter__(self) -> Iterator[tuple[tuple[int, int], Document]]:
        for piece in self._unit:
            noun = self._source._noun(piece)
            record = -1
            for record, found in enumerate(self._source._read(piece)):
                place = partial(self.place, piece.file, record)
                for document in self._source._documents(piece, noun, found, record, place, self.skipped):
                    yield (piece.file, record), document
            self.ranges.append(self._source._close(piece, record + 1))

    def place(self, file: int, record: int) -> str:
        piece = next(piece for piece in self._unit if piece.file == file)  # a unit has one range of a file
        return self._source._place(piece, record)

    def reject(self, file: int, record: int, bad: BadRecord) -> None:
        self._source._reject(bad, (file, record), partial(self.place, file, record), self.skipped)


class _StreamPiece:
    """The next records of a file that is read in one go, from number ``first`` on, until they fill ``room`` bytes."""

    def __init__(self, source: FileInput, unit: InputRange, records: "_LookAhead", first: int, room: int) -> None:
        self._source = source
        self._unit = unit
        self._records = records
        self._first = first
        self._room = room
        self.stop = first
        self.last = False
        self.ranges: list[InputRange] = []
        self.skipped: list[Skipped] = []

    def __iter__(self) -> Iterator[tuple[tuple[int, int], Document]]:
        noun = self._source._noun(self._unit)
        for record, size in self._records:
            number = self.stop - self._first
            place = partial(self.place, self._unit.file, number)
            for document in self._source._documents(self._unit, noun, record, number, place, self.skipped):
                yield (self._unit.file, number), document
            self.stop += 1
            self._room -= size
            if self._room <= 0:
                break
        self.last = not self._records.has_more()
        # Positions inside are numbers of records. The bytes are hashed as a whole, once they were all read.
        self.ranges = [InputRange(self._unit.file, self._first, self.stop, self.stop - self._first)]
        if self.last:
            self.ranges.append(self._source._close(self._unit, 0))

    def place(self, file: int, record: int) -> str:
        return self._source._place(self._unit, self._first + record)

    def reject(self, file: int, record: int, bad: BadRecord) -> None:
        self._source._reject(bad, (file, record), partial(self.place, file, record), self.skipped)


class _LookAhead:
    """An iterator that knows whether it has more: a piece has to say whether it is its unit's last."""

    def __init__(self, items: Iterator[tuple[Any, int]]) -> None:
        self._items = items
        self._next: list[tuple[Any, int]] = []

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        while self.has_more():
            yield self._next.pop()

    def has_more(self) -> bool:
        if not self._next:
            self._next = [item for item in [next(self._items, None)] if item is not None]
        return bool(self._next)


class RecordInput:
    """A source of records that can only be read in their order, such as a data set of a registry.

    It is one unit, cut into shards by the size of the texts.

    Args:
        name: Of the source.
        identity: What the records are, for the recipe: plain data.
        records: Makes a fresh iterator over the records.
        processor: Gives a record's text, several texts, or None.
        folder: The local folder or file that the records come from, if there is one.
    """

    def __init__(
        self,
        name: str,
        identity: dict[str, Any],
        records: Callable[[], Iterable[Any]],
        processor: Processor,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.path = str(folder or name)
        self.add_bos: bool | None = None
        self.add_eos: bool | None = None
        self.has_files = folder is not None
        self.in_place: InPlace | None = None
        self.version: str | None = None
        self._identity = identity
        self._records = records
        self._process = processor
        self._root, self.files = list_files(str(folder)) if folder else (Path(), [])

    def missing(self) -> tuple[str, str]:
        return _no_match(self.path)

    def recipe(self) -> dict[str, Any]:
        return self._identity

    def units(self, shard_bytes: int) -> list[list[InputRange]]:
        return [[InputRange(file=-1, start=0, stop=0)]]

    def pieces(self, unit: Sequence[InputRange], shard_bytes: int, skip_records: int) -> Iterator[Piece]:
        records = self._numbered()
        for _ in range(skip_records):
            next(records, None)
        first = skip_records
        while True:
            piece = _RecordPiece(self, records, first, shard_bytes)
            yield piece
            if piece.last:
                return
            first = piece.stop

    def num_bytes(self, piece: InputRange) -> int:
        return sum(file.bytes for file in self.files)  # the one unit reads them all

    def sample(self, unit: Sequence[InputRange], room: int) -> tuple[Piece, int]:
        # The records' size in their files is not known; that of their texts comes near it, from below.
        return _RecordPiece(self, self._numbered(), 0, room), room

    def prepare_arguments(self) -> list[str] | None:
        return None

    def check_content(self, ranges: Iterable[InputRange]) -> str | None:
        for piece in ranges:
            if piece.file >= 0 and self._hash_file(piece.file) != piece.content:
                return str(self._root / self.files[piece.file].name)
        return None

    def _hash_file(self, number: int) -> str:
        return hash_range(self._root / self.files[number].name, 0, self.files[number].bytes)

    def _file_ranges(self) -> list[InputRange]:
        """Ranges without records, which carry the hashes of the local files."""
        ranges = [InputRange(i, 0, file.bytes, 0, self._hash_file(i)) for i, file in enumerate(self.files)]
        for file in self.files:
            check_unchanged(self._root, file)
        return ranges

    def _numbered(self) -> Iterator[tuple[int, Any]]:
        number = 0
        try:
            for number, record in enumerate(self._records()):
                yield number, record
                number += 1  # where the next one fails
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{self._place(number)}: cannot be read ({error!r})") from error

    def _place(self, number: int) -> str:
        return f"source {self.name!r}, record {number:,} (counted from 0)"

    def _texts(self, number: int, record: Any) -> list[str]:
        return process(self._process, record, lambda: self._place(number))


class _RecordPiece:
    def __init__(self, source: RecordInput, records: Iterator[tuple[int, Any]], first: int, room: int) -> None:
        self._source = source
        self._records = records
        self._first = first
        self._room = room
        self.stop = first
        self.last = False
        self.skipped: list[Skipped] = []

    def __iter__(self) -> Iterator[tuple[tuple[int, int], str]]:
        for number, record in self._records:
            for text in self._source._texts(number, record):
                self._room -= len(text.encode("utf-8", "surrogatepass"))
                yield (-1, number - self._first), text
            self.stop = number + 1
            if self._room <= 0:
                return
        self.last = True

    def place(self, file: int, record: int) -> str:
        return self._source._place(self._first + record)

    def reject(self, file: int, record: int, bad: BadRecord) -> None:
        raise InputError(f"{self.place(file, record)}: {bad.message}")

    @property
    def ranges(self) -> list[InputRange]:
        own = InputRange(-1, self._first, self.stop, self.stop - self._first)
        return [own, *(self._source._file_ranges() if self.last else [])]


def _no_match(path: str) -> tuple[str, str]:
    return f"{path} matches no file", f"correct the source's path (relative paths start at {os.getcwd()})"


def shard_bytes_for(setting: int, total_bytes: int) -> int:
    """``data.shard_bytes``, or its default for a source of this size."""
    if setting or not total_bytes:
        return setting or UNKNOWN_SIZE_SHARD_BYTES
    return min(max(total_bytes // SHARDS_PER_SOURCE, MIN_SHARD_BYTES), MAX_SHARD_BYTES)


def cut_units(files: Sequence[tuple[Path, int]], shard_bytes: int) -> list[list[InputRange]]:
    """Cuts files into units of work.

    Args:
        files: Path and size in bytes, in the order of the source.
        shard_bytes: At least 1.
    """
    units: list[list[InputRange]] = []
    unit: list[InputRange] = []
    room = shard_bytes
    for number, (path, size) in enumerate(files):
        reader = format_of(path)
        if isinstance(reader, StreamFormat):
            units += [*([unit] if unit else []), [InputRange(number, 0, size)]]
            unit, room = [], shard_bytes
            continue
        with reading_input(path):
            start, end = 0, reader.end(path, size)
        while start < end:
            with reading_input(path):
                stop, used = reader.advance(path, start, end, room)
            unit.append(InputRange(number, start, stop))
            start = stop
            room -= used
            if room <= 0:
                units.append(unit)
                unit, room = [], shard_bytes
    return units + ([unit] if unit else [])


def hash_range(path: Path, start: int, stop: int) -> str:
    """XXH3-128 of a file's bytes ``[start, stop)``, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with reading_input(path), open(path, "rb") as file:
        file.seek(start)
        left = stop - start
        while left and (block := file.read(min(_BLOCK, left))):
            digest.update(block)
            left -= len(block)
    return str(digest.hexdigest())


@contextmanager
def reading_input(path: Path) -> Iterator[None]:
    """An error of the system is the input's fault in here, and must not be taken for one of the store's disk.

    Raises:
        InputError: There was one.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def check_unchanged(root: Path, file: FileRecord) -> None:
    """Compares a file with its record.

    Raises:
        InputError: It is gone, or has another size or time.
    """
    path = root / file.name
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(f"{path}: gone while its source was tokenized ({error.strerror})") from None
    if (status.st_size, status.st_mtime_ns) != (file.bytes, file.mtime_ns):
        raise InputError(f"{path}: changed while its source was tokenized; start again when the file is complete")


def list_files(path: str) -> FoundFiles:
    """The files of a path (a file, a folder or a glob); none if nothing matches.

    Raises:
        InputError: A file cannot be looked at.
    """
    with reading_input(Path(path)):
        root, paths = _find(path)
    # The order is that of the names' bytes, whatever the file system lists first.
    paths.sort(key=lambda path: os.fsencode(path.relative_to(root).as_posix()))
    files = []
    seen: dict[tuple[int, int], Path] = {}
    for found in paths:
        files.append(file_record(root, found.relative_to(root).as_posix()))
        with reading_input(found):
            status = found.stat()
        other = seen.setdefault((status.st_dev, status.st_ino), found)
        if other is not found:
            logger.warning("%s and %s are one file, so its documents are read twice", other, found)
    return root, files


def file_record(root: Path, name: str) -> FileRecord:
    """A file as it is now.

    Raises:
        InputError: It cannot be looked at, or has no bytes of its own.
    """
    path = root / name
    with reading_input(path):  # a link that leads nowhere, say
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # its size is 0, and opening a pipe would wait for ever
        raise InputError(f"{path}: no regular file but a pipe, a socket or a device; move it out of the source")
    return FileRecord(name, status.st_size, status.st_mtime_ns)


def _find(path: str) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files of a path (a file, a folder or a glob)."""
    if os.path.isdir(path):
        return Path(path), list(_walk(Path(path), set()))
    if os.path.isfile(path):
        return Path(path).parent, [Path(path)]
    root, _ = _split(path)
    found: set[Path] = set()
    for match in map(Path, glob.glob(path, recursive=True)):
        found.update(_walk(match, set()) if match.is_dir() else [match])
    return root, list(found)


def _split(path: str) -> tuple[Path, tuple[str, ...]]:
    """The folder in which a glob begins, and the glob's parts from there on."""
    parts = Path(path).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed]), parts[fixed:]


def finds(path: str, file: Path) -> bool:
    """Whether a file that need not be there would be one of the files of a path (a folder or a glob)."""
    root, pattern = (Path(path), ()) if os.path.isdir(path) else _split(path)
    base, name = Path(os.path.realpath(root)), Path(os.path.realpath(file))
    return name.is_relative_to(base) and _matches(pattern, name.relative_to(base).parts)


def _matches(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Whether a glob's parts lead to a file, or to a folder around it, which is searched."""
    if not pattern:
        return not any(part.startswith((".", "_")) for part in parts)
    if pattern[0] == "**" and _matches(pattern[1:], parts):
        return True
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    if pattern[0] == "**":
        return _matches(pattern, parts[1:])
    return fnmatch.fnmatch(parts[0], pattern[0]) and _matches(pattern[1:], parts[1:])


def _walk(folder: Path, seen: set[str]) -> Iterator[Path]:
    """All files below a folder, through links too; a link that leads back up is followed once."""
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen = {*seen, real}
    entries = list(folder.iterdir())
    is_data_set = any(entry.name.endswith(".arrow") for entry in entries)
    for entry in entries:
        # Markers and caches such as .DS_Store, ._x and _SUCCESS are no data.
        if entry.name.startswith((".", "_")):
            continue
        # Beside the .arrow files that `datasets` saves to a disk; alone, they are refused as any .json is.
        if entry.name in _DATA_SET_FILES and (is_data_set or entry.name == "dataset_dict.json"):
            continue
        if entry.is_dir():
            yield from _walk(entry, seen)
        else:
            yield entry
