"""The input formats: where a file may be cut, and its records.

One object per suffix. Positions are in the unit of the format: bytes for ``.jsonl`` and ``.txt``, row groups
for ``.parquet``. A blank line gives ``BLANK``, so that records can be counted; a line that is no record gives a
``BadRecord``, so that one can be skipped. A record is a dict of its fields; ``Reading`` makes texts of it.

Compressed files and those of Arrow are not entered in the middle: their records come one after the other, each
with the bytes that it takes when decompressed, by which the file is cut into shards.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np
import orjson
import zstandard

from zephon_patches.errors import InputError

__all__ = [
    "BLANK",
    "FORMATS",
    "BadRecord",
    "Format",
    "Reading",
    "StreamFormat",
    "format_of",
    "has_lone_surrogate",
    "not_an_object",
]

_BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 20

BLANK: Any = object()  # not None, which a line `null` gives
_MISSING: Any = object()


@dataclass(frozen=True)
class BadRecord:
    """A record that gives no document."""

    reason: str
    """One of a few, by which skipped records are counted"""
    message: str
    """What is wrong with it; without its place"""


class Format(Protocol):
    """How one kind of file is cut and read."""

    noun: str
    """What a part of a record is called"""

    def end(self, path: Path, size: int) -> int:
        """The position behind the last record of a file of ``size`` bytes; 0 if it has none."""

    def advance(self, path: Path, start: int, end: int, room: int) -> tuple[int, int]:
        """Cuts off records from ``start`` until they fill ``room`` bytes: (stop, bytes), at least one record."""

    def bytes_of(self, path: Path, start: int, stop: int) -> tuple[int, int]:
        """The range of the file's bytes that holds the records of a range of positions."""

    def records(self, path: Path, start: int, stop: int, text_field: str | None) -> Iterator[Any]:
        """The records of a range; a ``BadRecord`` for what is none, ``BLANK`` for a blank line.

        Args:
            text_field: The only field that is needed; None for all.

        Raises:
            InputError: The file cannot be read on from somewhere; the message names file and record.
        """

    def place(self, path: Path, start: int, record: int) -> str:
        """Where a record of the range from ``start`` on is, for messages; both count from 0, the answer from 1."""


@runtime_checkable
class StreamFormat(Protocol):
    """How one kind of file is read that cannot be entered in the middle."""

    noun: str

    def stream(self, path: Path, text_field: str | None, skip: int) -> Iterator[tuple[Any, int]]:
        """The records from number ``skip`` on as ``Format.records`` gives them, and each one's bytes, decompressed."""

    def bytes_of_first(self, path: Path, room: int) -> int:
        """About how many bytes of the file hold its first ``room`` bytes of records."""

    def place(self, path: Path, start: int, record: int) -> str:
        """As ``Format.place``; ``start`` is 0."""


def not_an_object(record: Any, wanted: str = "") -> BadRecord:
    return BadRecord("not an object", f"{_kind(record)}, expected a JSON object{wanted}")


def has_lone_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def field_of(record: dict[str, Any], name: str) -> Any:
    """The field of a record; ``a.b`` is field ``b`` in the object ``a``, unless there is a field ``a.b``.

    Returns:
        ``_MISSING`` if there is none, None if it or an object on the way is null.
    """
    if name in record:
        return record[name]
    for outer, inner in _splits(name):
        if outer in record:
            value = record[outer]
            if value is None:
                return None
            found = field_of(value, inner) if isinstance(value, dict) else _MISSING
            if found is not _MISSING:
                return found
    return _MISSING


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """The ways to take a dotted name apart, the longest first part first."""
    dot = len(name)
    while (dot := name.rfind(".", 0, dot)) > 0:
        yield name[:dot], name[dot + 1 :]


@dataclass(frozen=True)
class Reading:
    """How the document of a record is found.

    Args:
        field: Its name, dotted or not.
        setting: The source's setting that names it: ``token_field`` if it holds token ids, else ``text_field``.
    """

    field: str
    setting: str = "text_field"

    def documents(self, record: Any, noun: str) -> list[str | np.ndarray] | BadRecord:
        """The documents of a record that is neither blank nor bad: a text, or integers of shape ``(tokens,)``."""
        if not isinstance(record, dict):
            return not_an_object(record, f" with the field {self.field!r}")
        value = field_of(record, self.field)
        if value is _MISSING:
            return BadRecord(
                "no field",
                f"no {noun} {self.field!r}; its {noun}s are {', '.join(map(repr, record)) or 'none'}; set "
                f"{self.setting} of the source",
            )
        name = f"{noun} {self.field!r}"
        if self.setting == "token_field":
            ids = _token_ids(value, name)
            return ids if isinstance(ids, BadRecord) else [ids]
        if not isinstance(value, str):
            return BadRecord("wrong type", f"{name} holds {_kind(value)}, expected a text")
        return [value]


def _token_ids(value: Any, name: str) -> np.ndarray | BadRecord:
    """A field's token ids as integers; whether the tokenizer has them is asked elsewhere."""
    if isinstance(value, np.ndarray):  # of Arrow: integers, without nulls
        return value
    if not isinstance(value, list):
        return BadRecord("wrong type", f"{name} holds {_kind(value)}, expected a list of token ids")
    if set(map(type, value)) <= {int}:  # `isinstance` takes true and false for numbers
        try:
            return np.array(value, dtype=np.int64)
        except OverflowError:
            return np.array(value, dtype=np.uint64)  # the parser gives no larger ones
    place, wrong = next((place, item) for place, item in enumerate(value) if type(item) is not int)
    shown = f"{wrong!r:.40}" if isinstance(wrong, str | float) else _kind(wrong)
    return BadRecord("wrong type", f"{name} holds {shown} at place {place:,} (from 0), expected token ids")


class JsonLines:
    """``.jsonl``: one JSON object a line, lines end in LF (CRLF and a byte order mark are accepted)."""

    noun = "field"

    def end(self, path: Path, size: int) -> int:
        return size

    def advance(self, path: Path, start: int, end: int, room: int) -> tuple[int, int]:
        if end - start <= room:
            return end, end - start
        with open(path, "rb") as file:
            # The line that holds byte start + room - 1 is the last of the piece.
            position = start + max(room, 1) - 1
            file.seek(position)
            while block := file.read(_BLOCK):
                found = block.find(b"\n")
                if found >= 0:
                    stop = position + found + 1
                    return stop, stop - start
                position += len(block)
        return end, end - start

    def bytes_of(self, path: Path, start: int, stop: int) -> tuple[int, int]:
        return start, stop

    def records(self, path: Path, start: int, stop: int, text_field: str | None) -> Iterator[Any]:
        with open(path, "rb", buffering=_BLOCK) as file:
            file.seek(start)
            position = start
            while position < stop:
                line = file.readline()
                if not line:
                    raise InputError(f"{path}: ends at byte {position:,}, before byte {stop:,} that was planned for")
                yield _record_of_line(line, first=position == 0)
                position += len(line)

    def place(self, path: Path, start: int, record: int) -> str:
        # The lines before the range are counted only now that they are needed.
        line = record + 1
        with open(path, "rb") as file:
            left = start
            while left and (block := file.read(min(_BLOCK, left))):
                line += block.count(b"\n")
                left -= len(block)
        return f"{path}, line {line:,}"


class PlainText:
    """``.txt``: the whole file is one document, in UTF-8; an empty file is none."""

    noun = "field"

    def end(self, path: Path, size: int) -> int:
        return size

    def advance(self, path: Path, start: int, end: int, room: int) -> tuple[int, int]:
        return end, end - start

    def bytes_of(self, path: Path, start: int, stop: int) -> tuple[int, int]:
        return start, stop

    def records(self, path: Path, start: int, stop: int, text_field: str | None) -> Iterator[Any]:
        yield _record_of_text(path.read_bytes(), text_field)

    def place(self, path: Path, start: int, record: int) -> str:
        return str(path)


class Parquet:
    """``.parquet``: one row a record; cut at row groups."""

    noun = "column"

    def end(self, path: Path, size: int) -> int:
        return int(self._open(path).num_row_groups)

    def advance(self, path: Path, start: int, end: int, room: int) -> tuple[int, int]:
        metadata = self._open(path).metadata
        stop = start
        used = 0
        while stop < end and used < max(room, 1):
            first, last = self._row_group_bytes(metadata.row_group(stop))
            used += last - first
            stop += 1
        return stop, used

    def bytes_of(self, path: Path, start: int, stop: int) -> tuple[int, int]:
        metadata = self._open(path).metadata
        spans = [self._row_group_bytes(metadata.row_group(group)) for group in range(start, stop)]
        return min(first for first, _ in spans), max(last for _, last in spans)

    def records(self, path: Path, start: int, stop: int, text_field: str | None) -> Iterator[Any]:
        import pyarrow

        file = self._open(path)
        columns = file.schema_arrow.names
        if text_field is not None and not _has_field(file.schema_arrow, text_field):
            raise _no_column(path, columns, text_field)
        wanted = None if text_field is None else [text_field]  # of a struct, this reads the one part
        batches = file.iter_batches(batch_size=1024, row_groups=list(range(start, stop)), columns=wanted)
        record = 0
        while True:
            try:
                batch = next(batches, None)
                rows = [] if batch is None else _rows(batch, text_field)
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                raise InputError(
                    f"{self.place(path, start, record)} or soon after: cannot be read as parquet ({error})"
                ) from None
            if batch is None:
                return
            yield from rows
            record += len(rows)

    def place(self, path: Path, start: int, record: int) -> str:
        metadata = self._open(path).metadata
        row = sum(metadata.row_group(group).num_rows for group in range(start)) + record
        return f"{path}, row {row + 1:,}"

    @staticmethod
    def _open(path: Path) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise InputError(f"{path}: cannot be read as parquet ({error})") from None

    @staticmethod
    def _row_group_bytes(row_group: Any) -> tuple[int, int]:
        starts, stops = [], []
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            start = column.data_page_offset
            if column.dictionary_page_offset is not None:
                start = min(start, column.dictionary_page_offset)
            starts.append(start)
            stops.append(start + column.total_compressed_size)
        return min(starts, default=0), max(stops, default=0)  # a table may have rows and no columns


class JsonLinesStream:
    """``.jsonl.gz`` and the like: as ``JsonLines``, of decompressed bytes."""

    noun = "field"

    def __init__(self, compression: "Compression") -> None:
        self._compression = compression

    def stream(self, path: Path, text_field: str | None, skip: int) -> Iterator[tuple[Any, int]]:
        number = 0
        with self._compression.reading(path, lambda: self.place(path, 0, number)) as file:
            while line := file.readline():
                if number >= skip:
                    yield _record_of_line(line, first=number == 0), len(line)
                number += 1

    def bytes_of_first(self, path: Path, room: int) -> int:
        return self._compression.bytes_of_first(path, room)

    def place(self, path: Path, start: int, record: int) -> str:
        return f"{path}, line {record + 1:,}"


class PlainTextStream:
    """``.txt.gz`` and the like: as ``PlainText``."""

    noun = "field"

    def __init__(self, compression: "Compression") -> None:
        self._compression = compression

    def stream(self, path: Path, text_field: str | None, skip: int) -> Iterator[tuple[Any, int]]:
        with self._compression.reading(path, lambda: str(path)) as file:
            data = file.read()
        if data and not skip:
            yield _record_of_text(data, text_field), len(data)

    def bytes_of_first(self, path: Path, room: int) -> int:
        return path.stat().st_size

    def place(self, path: Path, start: int, record: int) -> str:
        return str(path)


class Arrow:
    """``.arrow``: Arrow's IPC, in both its forms; one row a record, cut at the ends of record batches.

    The form with a footer holds the other one behind 8 bytes, so both are read as a stream. A batch's bytes in the
    file are counted with its last row.
    """

    noun = "column"

    _MAGIC = b"ARROW1"
    _END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream; the format would allow to leave it out

    def stream(self, path: Path, text_field: str | None, skip: int) -> Iterator[tuple[Any, int]]:
        import pyarrow
        import pyarrow.ipc

        number = 0
        try:
            with pyarrow.OSFile(str(path)) as file:
                start = self._start(path, file)
                reader = pyarrow.ipc.open_stream(file)
                columns = reader.schema.names
                if text_field is not None and not _has_field(reader.schema, text_field):
                    raise _no_column(path, columns, text_field)
                needed = None if text_field is None else [c for c in columns if (text_field + ".").startswith(c + ".")]
                while (batch := self._next(reader)) is not None:
                    stop = file.tell()
                    rows = [] if number + batch.num_rows <= skip else _rows(_select(batch, needed), text_field)
                    for row, record in enumerate(rows, start=1):
                        if number + row > skip:
                            yield record, stop - start if row == len(rows) else 0
                    number += batch.num_rows
                    start = stop
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise InputError(
                f"{self.place(path, 0, number)} or soon after: cannot be read as Arrow ({error})"
            ) from None

    def bytes_of_first(self, path: Path, room: int) -> int:
        return min(room, path.stat().st_size)

    def place(self, path: Path, start: int, record: int) -> str:
        return f"{path}, row {record + 1:,}"

    def _start(self, path: Path, file: Any) -> int:
        """Goes to the start of the stream, after a look at the end: without it, what was cut off is not noticed."""
        size, end = file.size(), len(self._END)
        with_footer = file.read(len(self._MAGIC)) == self._MAGIC
        tail = self._MAGIC if with_footer else self._END
        file.seek(max(size - len(tail), 0))
        if size <= end or file.read() != tail:
            raise InputError(f"{path}: cut off, or no Arrow file, since its end is missing; copy the file again")
        start = end if with_footer else 0
        file.seek(start)
        return start

    @staticmethod
    def _next(reader: Any) -> Any:
        try:
            return reader.read_next_batch()
        except StopIteration:
            return None


def _no_column(path: Path, columns: list[str], text_field: str) -> InputError:
    return InputError(
        f"{path}: no column {text_field!r}; its columns are {', '.join(map(repr, columns)) or 'none'}; set "
        "text_field of the source"
    )


def _select(batch: Any, columns: list[str] | None) -> Any:
    return batch if columns is None else batch.select(columns)


class Compression:
    """How one kind of compressed file is opened; all its members or frames are read, to the file's end."""

    def __init__(self, name: str, opener: Callable[[BinaryIO], BinaryIO], errors: tuple[type[Exception], ...]) -> None:
        self._name = name
        self._open = opener
        self._errors = errors

    @contextmanager
    def reading(self, path: Path, place: Callable[[], str]) -> Iterator[BinaryIO]:
        """The decompressed bytes.

        Args:
            place: Where the reading is, for messages.

        Raises:
            InputError: The file is damaged or ends too early.
        """
        with open(path, "rb") as raw, self._reading(raw, path, place) as file:
            yield file

    @contextmanager
    def _reading(self, raw: BinaryIO, path: Path, place: Callable[[], str]) -> Iterator[BinaryIO]:
        if not raw.read(1):
            raise InputError(f"{path}: empty, so it is no {self._name} file; copy it again")
        raw.seek(0)
        try:
            yield self._open(raw)
        except self._errors as error:
            raise InputError(
                f"{place()} or soon after: the {self._name} data is damaged or cut off, near byte {raw.tell():,} "
                f"of {path.stat().st_size:,} ({error}); copy the file again"
            ) from None

    def bytes_of_first(self, path: Path, room: int) -> int:
        """About how many compressed bytes give ``room`` decompressed ones."""
        with open(path, "rb") as raw, self._reading(raw, path, lambda: str(path)) as file:
            left = room
            while left > 0 and (block := file.read(min(left, _BLOCK))):
                left -= len(block)
            return raw.tell()


class _ZstdFile(io.RawIOBase):
    """Decompresses all frames of a file. The library's own reader takes a frame that is cut off for the end."""

    # Of compressed bytes. Small, since a block decompresses into memory as a whole, and zeros by a factor of 30,000.
    _CHUNK = 1 << 13
    _WINDOW = 1 << 31  # as `zstd --long=31` makes

    def __init__(self, source: BinaryIO) -> None:
        self.source = source
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=self._WINDOW)
        self._frame: Any = None
        self._left = b""  # compressed bytes behind a frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._left or self.source.read(self._CHUNK)
            self._left = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("the file ends inside a frame")
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._ready = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._left = self._frame.unused_data
                self._frame = None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def _open_gzip(raw: BinaryIO) -> Any:
    return gzip.GzipFile(fileobj=raw, mode="rb")


def _open_zstd(raw: BinaryIO) -> Any:
    return io.BufferedReader(_ZstdFile(raw), _BLOCK)


_GZIP = Compression("gzip", _open_gzip, (EOFError, zlib.error, gzip.BadGzipFile))
_ZSTD = Compression("zstd", _open_zstd, (EOFError, zstandard.ZstdError))

FORMATS: dict[str, Format | StreamFormat] = {
    ".jsonl": JsonLines(),
    ".parquet": Parquet(),
    ".txt": PlainText(),
    ".arrow": Arrow(),
    ".jsonl.gz": JsonLinesStream(_GZIP),
    ".jsonl.zst": JsonLinesStream(_ZSTD),
    ".json.gz": JsonLinesStream(_GZIP),
    ".json.zst": JsonLinesStream(_ZSTD),
    ".txt.gz": PlainTextStream(_GZIP),
    ".txt.zst": PlainTextStream(_ZSTD),
}


def format_of(path: Path) -> Format | StreamFormat:
    """The format of a file, by the longest suffix that is known.

    Raises:
        InputError: The suffix is none of ``FORMATS``.
    """
    suffixes = [suffix for suffix in FORMATS if path.name.endswith(suffix) and path.name != suffix]
    if suffixes:
        return FORMATS[max(suffixes, key=len)]
    advice = "move it out of the source, or name the files with a glob such as 'folder/**/*.jsonl'"
    if path.suffix == ".json":
        advice = "if each line is a JSON object, name it .jsonl (a JSON text over several lines has to be converted)"
    raise InputError(f"{path}: files of this kind are not read; expected one of {', '.join(FORMATS)}; {advice}")


def _record_of_line(line: bytes, first: bool) -> Any:
    """The record of a line."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        if first and line.startswith(_BOM):
            return _record_of_line(line[len(_BOM) :], first=False)
        if not line.strip():
            return BLANK
        reason, detail = _why_no_json(line)
        return BadRecord(
            reason, f"not a JSON record ({detail}); the line starts {_excerpt(line)}; correct or remove the line"
        )


def _record_of_text(data: bytes, text_field: str | None) -> Any:
    try:
        return {text_field or "text": data.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        return BadRecord("not UTF-8", f"byte {error.start:,} is not UTF-8 ({error.reason}); convert the file")


def _has_field(schema: Any, name: str) -> bool:
    """Whether rows of an Arrow schema, or values of a struct, have what ``field_of`` looks up."""
    import pyarrow

    if name in schema.names:
        return True
    fields = {field.name: field.type for field in schema}
    return any(
        outer in fields
        and pyarrow.types.is_struct(fields[outer])
        and _has_field(pyarrow.schema(list(fields[outer])), inner)
        for outer, inner in _splits(name)
    )


def _rows(batch: Any, field: str | None) -> list[Any]:
    """The rows of an Arrow batch, of which ``field`` is needed, or all."""
    ids = None if field is None else _integer_lists(batch, field)
    if ids is not None:
        return [{field: row} for row in ids]
    try:
        rows: list[Any] = batch.to_pylist()
        return rows
    except UnicodeDecodeError:
        return [_row(batch.slice(row, 1)) for row in range(batch.num_rows)]


def _integer_lists(batch: Any, field: str) -> list[np.ndarray | None] | None:
    """The values of a column of integer lists, as views of Arrow's own memory; None if ``field`` is something else.

    Integers of a list that is null, or a list with nulls in it, are told by the slow way, which says where.
    """
    import pyarrow.compute
    from pyarrow import types

    column = _column(batch, field)
    kind = None if column is None else column.type
    if kind is None or not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return None
    if not types.is_integer(kind.value_type) or pyarrow.compute.list_flatten(column).null_count:
        return None
    if types.is_fixed_size_list(kind):
        bounds = (np.arange(len(column) + 1) + column.offset) * kind.list_size
    else:
        bounds = column.offsets.to_numpy()
    # Values in front of a slice, and behind null lists, are there too: the offsets go around them.
    values = _without_nulls(column.values)
    rows: list[np.ndarray | None] = [values[a:b] for a, b in pairwise(bounds.tolist())]
    if column.null_count:
        for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)):
            rows[row] = None
    return rows


def _without_nulls(values: Any) -> np.ndarray:
    """An Arrow array of integers as it lies in memory; what stands where it has nulls does not matter."""
    dtype = np.dtype(values.type.to_pandas_dtype())
    if not len(values):
        return np.empty(0, dtype)
    return np.frombuffer(values.buffers()[1], dtype, len(values), values.offset * dtype.itemsize)


def _column(batch: Any, name: str) -> Any:
    """What ``field_of`` would find in each row, as one Arrow array; None if there is no such column."""
    import pyarrow.compute

    names = batch.schema.names if hasattr(batch, "schema") else [field.name for field in batch.type]
    if name in names:
        place = names.index(name)
        return batch.column(place) if hasattr(batch, "schema") else pyarrow.compute.struct_field(batch, [place])
    for outer, inner in _splits(name):
        if outer in names:
            column = _column(batch, outer)
            if pyarrow.types.is_struct(column.type) and (found := _column(column, inner)) is not None:
                return found
    return None


def _row(batch: Any) -> Any:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRecord("not UTF-8", f"byte {error.start:,} of a text is not UTF-8 ({error.reason})")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    numbers = dict.fromkeys((int, float), "a number")
    names = {str: "a text", bool: "true or false", list: "a list", np.ndarray: "a list", dict: "an object", **numbers}
    return names.get(type(value), type(value).__name__)


def _why_no_json(line: bytes) -> tuple[str, str]:
    """Why a line is no JSON. The parser's own text says "line 1" of every line, and of bad bytes not which."""
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return "not UTF-8", f"byte {error.start + 1:,} of the line is not UTF-8: {error.reason}"
    try:
        orjson.loads(line.rstrip())  # with its end, a line that was cut off is blamed for that
    except orjson.JSONDecodeError as error:
        return _strictness(line), f"{error.msg}, at column {error.colno:,}"
    return "not JSON", "it ends in a character that JSON does not allow there"


def _strictness(line: bytes) -> str:
    """Tells lone surrogates from what is no JSON at all, by a parser that lets them through."""
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "lone surrogate"
    except (ValueError, RecursionError):
        pass
    return "not JSON"


def _excerpt(line: bytes) -> str:
    shown = line[:60].decode("utf-8", "replace").rstrip("\r\n")
    return repr(shown) + ("..." if len(line) > 60 else "")
