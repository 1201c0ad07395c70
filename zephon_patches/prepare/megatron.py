"""Token ids that another tool wrote in Megatron's format, ``.bin`` and ``.idx``, used where they are.

The store of such a source has an index and origins for each of its shards as every store has, but no tokens: the
manifest says which bytes of which ``.bin`` they are. So a pair of any size becomes many shards, cut at ends of
documents from the index alone, and nothing is copied. Building reads every token once, for its hash and to see that
the tokenizer has it.

A document is the union of its sequences. Worked case, ``shard_bytes`` = 8, uint16 tokens::

    lengths    3 1 2 0 5      of the sequences, in tokens
    pointers   0 6 8 12 12    in bytes, and 22 at the end
    documents  0 2 4 5        first sequence of each, and the number of sequences: documents of 4, 2 and 5 tokens
    units      [0, 8) [8, 22) the first document fills 8 bytes; the second ends inside the next 8, the third behind them

Nothing that an index says is believed before the sizes of both files bear it out. Format: ``store/indexed.py``.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from zephon_patches.config import SourceConfig
from zephon_patches.errors import ConfigError, InputError
from zephon_patches.prepare.encoding import EncodedBatch, problem_of_ids
from zephon_patches.prepare.shards import (
    FoundFiles,
    InPlace,
    Piece,
    Skipped,
    check_unchanged,
    file_record,
    hash_range,
    reading_input,
)
from zephon_patches.store.indexed import DTYPES, HEADER, MAGIC, VERSION
from zephon_patches.store.manifest import InputRange

__all__ = ["MegatronInput", "find_pairs"]

_SUFFIXES = (".bin", ".idx")
_LEGACY_MAGIC = b"TNTIDX\x00\x00"
_FLOATS = {6: "float64", 7: "float32"}
_BLOCK_BYTES = 4 << 20
_BLOCK_ENTRIES = 1 << 16
_MAX_DOCUMENT_TOKENS = 2**31 - 1


def find_pairs(path: str, found: FoundFiles) -> FoundFiles | None:
    """The pairs that a source's path names.

    Args:
        path: A ``.bin``, an ``.idx``, what both begin with, a folder or a glob.
        found: The files that match the path.

    Returns:
        Both files of every pair, in the order of their names; None if there is no such file.

    Raises:
        InputError: One file of a pair is missing, or there are files of other kinds too.
    """
    root, files = found
    if not files and any(os.path.isfile(path + suffix) for suffix in _SUFFIXES):
        name = os.path.basename(path)
        root = Path(path).parent
        files = [file_record(root, name + suffix) for suffix in _SUFFIXES if os.path.isfile(path + suffix)]
    pairs = {file.name: file for file in files if file.name.endswith(_SUFFIXES)}
    if not pairs:
        return None
    for file in files:
        if file.name not in pairs:
            raise InputError(
                f"{root / file.name}: beside .bin and .idx files of token ids, and no such file; move it out of the "
                f"source, or name the pairs with a glob such as '{root}/**/*.bin'"
            )
    for name in list(pairs):
        other = name[:-4] + (".idx" if name.endswith(".bin") else ".bin")
        if other not in pairs:
            if not (root / other).is_file():
                raise InputError(f"{root / name}: {root / other} is missing; token ids are read from both together")
            pairs[other] = file_record(root, other)
    return root, [pairs[name] for name in sorted(pairs, key=os.fsencode)]


class MegatronInput:
    """A source of ``.bin`` and ``.idx`` files, used where they are.

    Args:
        source: Has no settings of fields, texts or ends of documents.
        found: As ``find_pairs`` gives it.

    Raises:
        ConfigError: A setting is of sources of texts.
        InputError: An index is none, or of another kind; or two have other dtypes.
    """

    def __init__(self, source: SourceConfig, found: FoundFiles) -> None:
        for key, is_set in (
            ("text_field", source.text_field != "text"),
            ("token_field", bool(source.token_field)),
            ("chat_field", bool(source.chat_field)),
            ("processor", bool(source.processor)),
            ("on_bad_record", source.on_bad_record != "error"),
            ("add_bos", bool(source.add_bos)),
            ("add_eos", bool(source.add_eos)),
        ):
            if is_set:
                raise ConfigError(
                    f"source {source.name!r}: {key} = {getattr(source, key)!r}, but {source.path} holds token ids that "
                    f"are used where they are, as they are; leave {key} out"
                )
        self.name = source.name
        self.path = source.path
        self.add_bos: bool | None = False
        self.add_eos: bool | None = False
        self.has_files = True
        self.version: str | None = None
        self._root, self.files = found
        places = {file.name: place for place, file in enumerate(self.files)}
        # The .bin and .idx of each pair, as places among the files, where they need not be neighbours.
        self._pairs = {place: places[name[:-4] + ".idx"] for name, place in places.items() if name.endswith(".bin")}
        # (file, dtype) of the first pair
        first: tuple[Path, np.dtype] | None = None
        for number in self._pairs:
            with self._index(number) as index:
                dtype = index.dtype
            path = self._root / self.files[number].name
            first = first or (path, dtype)
            if dtype != first[1]:
                raise InputError(
                    f"{path}: holds {dtype.name} and {first[0]} {first[1].name}; a source has one dtype, so make two "
                    "sources of them"
                )
        assert first is not None
        self.in_place: InPlace | None = InPlace(self._root, first[1])

    def missing(self) -> tuple[str, str]:
        raise AssertionError("made of files that are there")

    def recipe(self) -> dict[str, Any]:
        return {"tokens": "in place"}

    def units(self, shard_bytes: int) -> list[list[InputRange]]:
        units = []
        for number in self._pairs:
            self._check_unchanged(number)
            with self._index(number) as index:
                index.check()
                start = 0
                while start < index.total:
                    stop = index.cut(start, shard_bytes)
                    units.append([InputRange(number, start, stop)])
                    start = stop
        return units

    def pieces(self, unit: Sequence[InputRange], shard_bytes: int, skip_records: int) -> Iterator[Piece]:
        assert skip_records == 0 and len(unit) == 1, "a unit is one part of one file, and one piece"
        yield _MegatronPiece(self, unit[0])

    def num_bytes(self, piece: InputRange) -> int:
        return piece.stop - piece.start

    def sample(self, unit: Sequence[InputRange], room: int) -> tuple[Piece, int]:
        piece = unit[0]
        with self._index(piece.file) as index:
            stop = min(index.cut(piece.start, room), piece.stop)
        return _MegatronPiece(self, InputRange(piece.file, piece.start, stop)), stop - piece.start

    def prepare_arguments(self) -> list[str] | None:
        return ["--source", f"{self.name}={os.path.abspath(self.path)}"]

    def check_content(self, ranges: Iterable[InputRange]) -> str | None:
        for piece in ranges:
            path = self._root / self.files[piece.file].name
            if piece.content and hash_range(path, piece.start, piece.stop) != piece.content:
                return str(path)
        return None

    def _index(self, number: int) -> "_Index":
        return _Index(self._root / self.files[self._pairs[number]].name, self.files[number].bytes)

    def _check_unchanged(self, number: int) -> None:
        for place in (number, self._pairs[number]):
            check_unchanged(self._root, self.files[place])


class _MegatronPiece:
    last = True

    def __init__(self, source: MegatronInput, unit: InputRange) -> None:
        self._source = source
        self._unit = unit
        self.ranges: list[InputRange] = []
        self.skipped: list[Skipped] = []

    def encoded(self, largest_id: int) -> Iterator[EncodedBatch]:
        """The tokens, block by block, then the documents' lengths: so one document may have any size."""
        source, number = self._source, self._unit.file
        source._check_unchanged(number)
        with source._index(number) as index:
            content = yield from self._tokens(index, largest_id)
            first, stop = index.documents_of(self._unit.start, self._unit.stop)
            for start in range(first, stop, _BLOCK_ENTRIES):
                lengths = index.document_tokens(start, min(start + _BLOCK_ENTRIES, stop))
                origins = [(number, start - first + i) for i in range(len(lengths))]
                yield EncodedBatch(np.empty(0, index.dtype), lengths, origins, 0)
            is_last = self._unit.stop == index.total
        self.ranges = [InputRange(number, self._unit.start, self._unit.stop, stop - first, content)]
        if is_last:
            place = source._pairs[number]
            size = source.files[place].bytes
            path = source._root / source.files[place].name
            self.ranges.append(InputRange(place, 0, size, 0, hash_range(path, 0, size)))
        source._check_unchanged(number)

    def _tokens(self, index: "_Index", largest_id: int) -> Generator[EncodedBatch, None, str]:
        """The tokens, checked; returns the hash of their bytes."""
        path = self._source._root / self._source.files[self._unit.file].name
        digest = xxhash.xxh3_128()
        with reading_input(path), open(path, "rb") as file:
            file.seek(self._unit.start)
            position = self._unit.start
            while position < self._unit.stop:
                data = file.read(min(_BLOCK_BYTES, self._unit.stop - position))
                if not data or len(data) % index.dtype.itemsize:
                    raise InputError(f"{path}: ends at byte {position + len(data):,}, in the middle of its tokens")
                digest.update(data)
                tokens = np.frombuffer(data, index.dtype)
                if problem_of_ids(tokens, largest_id) is not None:
                    bad = int(np.argmax((tokens < 0) | (tokens > largest_id)))
                    document, place = index.place_of(position + bad * index.dtype.itemsize)
                    raise InputError(
                        f"{path}, document {document:,} (from 0): token id {tokens[bad]} at place {place:,} (from 0), "
                        f"expected 0 to {largest_id}, as the tokenizer has"
                    )
                yield EncodedBatch(tokens, [], [], len(data))
                position += len(data)
        return str(digest.hexdigest())


class _Column:
    """One of an index's arrays, on the disk; ``bisect`` reads a few of its entries."""

    def __init__(self, file: BinaryIO, dtype: str, offset: int, count: int) -> None:
        self._file = file
        self._dtype = np.dtype(dtype)
        self._offset = offset
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> int:
        return int(self.block(place, place + 1)[0])

    def block(self, start: int, stop: int) -> np.ndarray:
        """The entries ``[start, stop)``."""
        self._file.seek(self._offset + start * self._dtype.itemsize)
        data = self._file.read((stop - start) * self._dtype.itemsize)
        if len(data) != (stop - start) * self._dtype.itemsize:
            raise InputError(f"{self._file.name}: cut off while it was read")
        return np.frombuffer(data, self._dtype)


class _Index:
    """An index, opened; its header is checked.

    Args:
        path: Of the ``.idx``.
        total: The size of the ``.bin``, in bytes.

    Raises:
        InputError: It is none, cannot be used, or does not fit the sizes of the files.
    """

    def __init__(self, path: Path, total: int) -> None:
        self._path = path
        self.total = total
        with reading_input(path):
            size = path.stat().st_size
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 -- closed by __exit__
        try:
            self._open(size)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "_Index":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _open(self, size: int) -> None:
        with reading_input(self._path):
            header = self._file.read(HEADER.size)
        if header.startswith(_LEGACY_MAGIC):
            raise self._error("an index of the old kind (TNTIDX), which is not read; make it anew with Megatron-LM")
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise self._error(f"no index of token ids: starts with {header[:9]!r}, expected {MAGIC!r} and a header")
        _, version, code, self.sequences, entries = HEADER.unpack(header)
        if version != VERSION:
            raise self._error(f"version {version} of the index format; version {VERSION} is read")
        if code not in DTYPES:
            kind = f"{_FLOATS[code]}, no integers" if code in _FLOATS else "unknown"
            raise self._error(f"dtype code {code} ({kind}); token ids have one of {sorted(DTYPES)}")
        self.dtype = DTYPES[code]
        self.num_documents = entries - 1
        expected = HEADER.size + 12 * self.sequences + 8 * entries
        if size == expected + self.sequences and self.sequences:
            raise self._error("an index with a mode for each sequence (multimodal data), which is not read")
        if size != expected or entries < 1:
            raise self._error(
                f"{size:,} bytes, but its {self.sequences:,} sequences and {entries:,} document entries take "
                f"{expected:,}; the file is cut off or damaged"
            )
        end = HEADER.size + 4 * self.sequences
        self._lengths = _Column(self._file, "<i4", HEADER.size, self.sequences)
        self._pointers = _Column(self._file, "<i8", end, self.sequences)
        self._documents = _Column(self._file, "<i8", end + 8 * self.sequences, entries)

    def _error(self, text: str) -> InputError:
        return InputError(f"{self._path}: {text}")

    def check(self) -> None:
        """Reads it to its end.

        Raises:
            InputError: It does not describe the whole ``.bin``, sequence by sequence and document by document.
        """
        with reading_input(self._path):
            start = 0  # of the next sequence, in bytes
            for first, stop in _blocks(self.sequences):
                lengths = self._lengths.block(first, stop).astype(np.int64)
                if lengths.min() < 0:
                    place = first + int(np.argmax(lengths < 0))
                    raise self._error(f"sequence {place:,} (from 0) has {self._lengths[place]:,} tokens")
                ends = start + np.cumsum(lengths) * self.dtype.itemsize
                pointers = self._pointers.block(first, stop)
                wrong = np.flatnonzero(pointers != ends - lengths * self.dtype.itemsize)
                if len(wrong):
                    place = first + int(wrong[0])
                    raise self._error(
                        f"sequence {place:,} (from 0) starts at byte {pointers[wrong[0]]:,} of the .bin, and the "
                        "one before ends elsewhere; only sequences without gaps, in their order, are read"
                    )
                start = int(ends[-1])
            if start != self.total:
                raise self._error(
                    f"its sequences take {start:,} bytes, but the .bin has {self.total:,}; one of the two files is cut "
                    "off, damaged or another's"
                )
            before = 0
            for first, stop in _blocks(self.num_documents + 1):
                documents = self._documents.block(first, stop)
                if (first == 0 and documents[0]) or documents[0] < before or (np.diff(documents) < 0).any():
                    raise self._error("its documents do not begin with sequence 0, or are not in order")
                before = int(documents[-1])
            if before != self.sequences:
                raise self._error(
                    f"its documents end with sequence {before:,} of {self.sequences:,}; the file is damaged, or was "
                    "written without the documents' ends"
                )

    def cut(self, start: int, room: int) -> int:
        """The end of the document that fills ``room`` bytes from ``start``, the start of one."""
        if start + room >= self.total:
            return self.total
        return self._byte(self._documents[self._boundary(start + max(room, 1))])

    def documents_of(self, start: int, stop: int) -> tuple[int, int]:
        """The documents in a range of bytes; those without tokens come before others that start there."""
        return self._boundary(start), self.num_documents if stop == self.total else self._boundary(stop)

    def document_tokens(self, first: int, stop: int) -> list[int]:
        """The number of tokens of each document of ``[first, stop)``."""
        documents = self._documents.block(first, stop + 1)
        start, end = int(documents[0]), int(documents[-1])
        pointers = self._pointers.block(start, min(end + 1, self.sequences))
        if end == self.sequences:
            pointers = np.append(pointers, self.total)
        lengths = np.diff(pointers[documents - start]) // self.dtype.itemsize
        if lengths.max(initial=0) > _MAX_DOCUMENT_TOKENS:
            raise self._error(
                f"document {first + int(np.argmax(lengths)):,} (from 0) has {lengths.max():,} tokens; at most 2**31 - "
                "1 can be used"
            )
        return list(map(int, lengths))

    def place_of(self, byte: int) -> tuple[int, int]:
        """The document, and the place in it, of the token at a byte."""
        document = bisect_right(self._documents, byte, key=self._byte) - 1
        return document, (byte - self._byte(self._documents[document])) // self.dtype.itemsize

    def _boundary(self, byte: int) -> int:
        """The first document that starts at a byte or behind it."""
        return bisect_left(self._documents, bisect_left(self._pointers, byte))

    def _byte(self, sequence: int) -> int:
        return self.total if sequence == self.sequences else self._pointers[sequence]


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    for first in range(0, count, _BLOCK_ENTRIES):
        yield first, min(first + _BLOCK_ENTRIES, count)
