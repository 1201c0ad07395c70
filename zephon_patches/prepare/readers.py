"""The input formats: where a file may be cut, and the texts of its records.

One object per suffix. Positions are in the unit of the format: bytes for ``.jsonl`` and ``.txt``, row groups
for ``.parquet``. A record without a text (a blank line) gives None, so that records can be counted.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import orjson

from zephon_patches.errors import InputError

__all__ = ["FORMATS", "Format", "format_of"]

_BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 20


class Format(Protocol):
    """How one kind of file is cut and read."""

    def end(self, path: Path, size: int) -> int:
        """The position behind the last record of a file of ``size`` bytes; 0 if it has none."""

    def advance(self, path: Path, start: int, end: int, room: int) -> tuple[int, int]:
        """Cuts off records from ``start`` until they fill ``room`` bytes: (stop, bytes), at least one record."""

    def bytes_of(self, path: Path, start: int, stop: int) -> tuple[int, int]:
        """The range of the file's bytes that holds the records of a range of positions."""

    def texts(self, path: Path, start: int, stop: int, text_field: str) -> Iterator[str | None]:
        """The text of each record of a range.

        Raises:
            InputError: A record cannot be read; the message names file and record.
        """

    def place(self, path: Path, start: int, record: int) -> str:
        """Where a record of the range from ``start`` on is, for messages; both count from 0, the answer from 1."""


class JsonLines:
    """``.jsonl``: one JSON object a line, lines end in LF (CRLF and a byte order mark are accepted)."""

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

    def texts(self, path: Path, start: int, stop: int, text_field: str) -> Iterator[str | None]:
        with open(path, "rb") as file:
            file.seek(start)
            position, line_in_range = start, 0
            while position < stop:
                line = file.readline()
                if not line:
                    raise InputError(f"{path}: ends at byte {position:,}, before byte {stop:,} that was planned for")
                if position == 0 and line.startswith(_BOM):
                    yield self._text(line[len(_BOM) :], path, start, line_in_range, text_field)
                else:
                    yield self._text(line, path, start, line_in_range, text_field)
                position += len(line)
                line_in_range += 1

    def _text(self, line: bytes, path: Path, start: int, line_in_range: int, text_field: str) -> str | None:
        if not line.strip():
            return None
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise InputError(
                f"{self.place(path, start, line_in_range)}: not a JSON record ({_reason(line)}); the line "
                f"starts {_excerpt(line)}; correct or remove the line"
            ) from None
        return _text_of_record(record, text_field, lambda: self.place(path, start, line_in_range))

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

    def end(self, path: Path, size: int) -> int:
        return size

    def advance(self, path: Path, start: int, end: int, room: int) -> tuple[int, int]:
        return end, end - start

    def bytes_of(self, path: Path, start: int, stop: int) -> tuple[int, int]:
        return start, stop

    def texts(self, path: Path, start: int, stop: int, text_field: str) -> Iterator[str | None]:
        try:
            yield path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: byte {error.start:,} is not UTF-8 ({error.reason}); convert the file") from None

    def place(self, path: Path, start: int, record: int) -> str:
        return str(path)


class Parquet:
    """``.parquet``: one row a record; cut at row groups."""

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

    def texts(self, path: Path, start: int, stop: int, text_field: str) -> Iterator[str | None]:
        import pyarrow

        file = self._open(path)
        columns = file.schema_arrow.names
        if text_field not in columns:
            raise InputError(
                f"{path}: no column {text_field!r}; its columns are {', '.join(map(repr, columns)) or 'none'}; set "
                "text_field of the source"
            )
        record = 0
        batches = file.iter_batches(batch_size=1024, row_groups=list(range(start, stop)), columns=[text_field])
        while True:
            try:
                batch = next(batches, None)
                texts = [] if batch is None else batch.column(0).to_pylist()
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                raise InputError(
                    f"{self.place(path, start, record)} or soon after: cannot be read as parquet ({error})"
                ) from None
            if batch is None:
                return
            for text in texts:
                if not isinstance(text, str):
                    raise InputError(
                        f"{self.place(path, start, record)}: column {text_field!r} holds {_kind(text)}, expected a text"
                    )
                yield text
                record += 1

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


FORMATS: dict[str, Format] = {".jsonl": JsonLines(), ".parquet": Parquet(), ".txt": PlainText()}


def format_of(path: Path) -> Format:
    """The format of a file, by its suffix.

    Raises:
        InputError: The suffix is none of ``FORMATS``.
    """
    try:
        return FORMATS[path.suffix]
    except KeyError:
        raise InputError(
            f"{path}: files of this kind are not read; expected one of {', '.join(FORMATS)}; move it out of the "
            "source, or name the files with a glob such as 'folder/**/*.jsonl'"
        ) from None


def _text_of_record(record: object, text_field: str, place: Callable[[], str]) -> str:
    if not isinstance(record, dict):
        raise InputError(f"{place()}: {_kind(record)}, expected a JSON object with the field {text_field!r}")
    if text_field not in record:
        raise InputError(
            f"{place()}: no field {text_field!r}; its fields are {', '.join(map(repr, record)) or 'none'}; set "
            "text_field of the source"
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise InputError(f"{place()}: field {text_field!r} holds {_kind(text)}, expected a text")
    return text


def _kind(value: object) -> str:
    if value is None:
        return "null"
    numbers = dict.fromkeys((int, float), "a number")
    names = {str: "a text", bool: "true or false", list: "a list", dict: "an object", **numbers}
    return names.get(type(value), type(value).__name__)


def _reason(line: bytes) -> str:
    """Why a line is no JSON. The parser's own text says "line 1" of every line, and of bad bytes not which."""
    try:
        line.decode("utf-8")
        orjson.loads(line.rstrip())  # with its end, a line that was cut off is blamed for that
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1:,} of the line is not UTF-8: {error.reason}"
    except orjson.JSONDecodeError as error:
        return f"{error.msg}, at column {error.colno:,}"
    return "it ends in a character that JSON does not allow there"


def _excerpt(line: bytes) -> str:
    shown = line[:60].decode("utf-8", "replace").rstrip("\r\n")
    return repr(shown) + ("..." if len(line) > 60 else "")
