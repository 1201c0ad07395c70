"""Documents of a piece of input to token ids, batch by batch, by a fast engine that is watched, or by the reference."""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zephon_patches.errors import InputError
from zephon_patches.prepare.exactness import (
    DISTRUSTED,
    EngineDistrusted,
    Sampling,
    compare,
    describe,
    distrust,
    is_distrusted,
)
from zephon_patches.prepare.shards import Piece
from zephon_patches.prepare.tokenizers import TextTokenizer

__all__ = ["EncodedBatch", "Encoder"]

logger = logging.getLogger(__name__)

# Documents that go to the tokenizer together: enough for all its threads, little enough for memory.
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 2048, 4 << 20


_Batch = tuple[list[tuple[int, int]], list[str]]  # origins and texts of some documents


class EncodedBatch(NamedTuple):
    """Some documents, one after the other."""

    tokens: np.ndarray
    """uint32, shape ``(sum of lengths,)``"""
    lengths: Sequence[int]
    """Tokens of each document"""
    origins: Sequence[tuple[int, int]]
    """(range's file, record in the range) of each document"""
    text_bytes: int
    """Size of the texts in UTF-8"""


class Encoder:
    """Encodes the documents of a store that is built.

    Args:
        tokenizer: Its settings say which engine is wanted, and whether every document is compared.
        store: Folder of the store; None for an estimate, for which nothing is compared.
        name: Of the source, for messages.
    """

    def __init__(self, tokenizer: TextTokenizer, store: Path | None, name: str) -> None:
        self._reference = tokenizer
        self._store = store
        self._name = name
        self._fast: TextTokenizer | None = None
        self._loaded = False

    def load(self) -> None:
        """Loads the engine, which may take seconds, and compares it on nasty texts; left out, it is done when needed.

        Raises:
            ConfigError: An engine was asked for by its name and cannot serve.
        """
        if self._loaded:
            return
        self._loaded = True
        if self._store is not None and is_distrusted(self._store):
            return
        self._fast = self._reference.fast()
        if self._fast is not None:
            try:
                self._compare(self._reference.nasty_texts())
            except EngineDistrusted:
                self._fast = None

    @property
    def is_proven(self) -> bool:
        """Whether its ids are the reference's for certain: all of them are, or are compared."""
        return self._fast is None or self._reference.exact

    def check_trusted(self) -> None:
        """To be called before a shard counts as finished.

        Raises:
            EngineDistrusted: Another builder of the store found its engine to differ.
        """
        if self._fast is not None and not self.is_proven and self._store is not None and is_distrusted(self._store):
            logger.info("source %r: another builder found %s to differ", self._name, self._fast.engine_name)
            raise EngineDistrusted(self._fast.engine_name)

    def batches(self, piece: Piece) -> Iterator[EncodedBatch]:
        """Reads a piece to its end, and encodes its documents.

        Raises:
            InputError: A document cannot be read or tokenized; the message names its place.
            EngineDistrusted: The engine differed from the reference. Nothing of it may be used, from this piece or
                another; an ``Encoder`` that is made anew uses the reference.
        """
        self.load()
        sampling = Sampling(self._compare)
        batches = _batches(piece)
        batch = next(batches, None)
        # While one batch is encoded, which needs no Python, the next one is read.
        with ThreadPoolExecutor(1, thread_name_prefix="encoder") as thread:
            while batch is not None:
                encoded = thread.submit(self._encode, batch, piece, sampling)
                batch = next(batches, None)
                yield encoded.result()
        sampling.finish()

    def _encode(self, batch: _Batch, piece: Piece, sampling: Sampling) -> EncodedBatch:
        origins, texts = batch
        if self._fast is None:
            tokens, lengths = _encode(texts, origins, piece, self._reference)
        else:
            try:
                tokens, lengths = self._fast.encode_batch(texts)
            except Exception:
                _encode(texts, origins, piece, self._reference)  # a text that cannot be encoded is no fault of it
                self._compare(texts)
                raise
            if self._reference.exact:
                expected = _encode(texts, origins, piece, self._reference)
                self._compare(texts, (tokens, lengths), expected)
            else:
                sampling.look(texts, tokens, lengths)
        return EncodedBatch(tokens, lengths, origins, sum(map(_size, texts)))

    def _compare(self, texts: Sequence[str], *encoded: Any) -> None:
        """As ``compare``; a difference is told to all builders and users, and raised."""
        if self._store is None:
            return
        assert self._fast is not None
        report = compare(self._fast, self._reference, texts, *encoded)
        if report is not None:
            distrust(self._store, report)
            logger.warning(
                "source %r: %s. The whole store is tokenized by %s, which takes longer, and what the other engine made "
                "of it is made again (%s says so to all its builders). Please report the difference to the engine's "
                "authors",
                self._name,
                describe(report),
                self._reference.engine_name,
                self._store / DISTRUSTED,
            )
            raise EngineDistrusted(self._fast.engine_name)


def _batches(piece: Piece) -> Iterator[_Batch]:
    origins: list[tuple[int, int]] = []
    texts: list[str] = []
    characters = 0
    for origin, text in piece:
        origins.append(origin)
        texts.append(text)
        characters += len(text)
        if len(texts) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield origins, texts
            origins, texts, characters = [], [], 0
    if texts:
        yield origins, texts


def _encode(
    texts: list[str], origins: list[tuple[int, int]], piece: Piece, tokenizer: TextTokenizer
) -> tuple[np.ndarray, list[int]]:
    try:
        return tokenizer.encode_batch(texts)
    except Exception as error:
        # Which one was it? Batches hide it, and users need the place.
        for text, (file, record) in zip(texts, origins, strict=True):
            try:
                tokenizer.encode_batch([text])
            except Exception as single:
                raise InputError(
                    f"{piece.place(file, record)}: cannot be tokenized ({single}); the text starts {text[:60]!r}"
                ) from single
        raise InputError(f"the tokenizer failed ({error})") from error


def _size(text: str) -> int:
    """In UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
