"""Documents of a piece of input to token ids, batch by batch, by a fast engine that is watched, or by the reference.

Given token ids pass as they are, once each is found to be one of the tokenizer's.
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

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
from zephon_patches.prepare.readers import BadRecord, Conversation
from zephon_patches.prepare.rendered import Rendered
from zephon_patches.prepare.shards import DocumentPiece, Piece
from zephon_patches.prepare.tokenizers import TextTokenizer

__all__ = ["EncodedBatch", "EncodedPiece", "Encoder", "problem_of_ids"]

logger = logging.getLogger(__name__)

NO_LABEL = "no label"
"""Reason for which a conversation in which the assistant says nothing is left out"""

# Documents that go to the tokenizer together: enough for all its threads, little enough for memory.
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 2048, 4 << 20


_Batch = tuple[list[tuple[int, int]], list[Any]]  # origins, and texts, written conversations or ids


class EncodedBatch(NamedTuple):
    """Some documents, one after the other."""

    tokens: np.ndarray
    """Integers, shape ``(sum of lengths,)``"""
    lengths: Sequence[int]
    """Tokens of each document"""
    origins: Sequence[tuple[int, int]]
    """(range's file, record in the range) of each document"""
    text_bytes: int
    """Size of the texts in UTF-8, or of given ids in memory"""
    mask: np.ndarray | None = None
    """uint8, shape ``(sum of lengths,)``: 1 for tokens that count as labels, else 0; None where all do"""


class EncodedPiece(Piece, Protocol):
    """A piece of token ids that says itself what its batches are."""

    def encoded(self, largest_id: int) -> Iterator[EncodedBatch]:
        """Batches; tokens may come before the lengths of their documents.

        Raises:
            InputError: An id is none of ``[0, largest_id]``; the message names its place.
        """


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
        if hasattr(piece, "encoded"):  # no isinstance, which would ask for the ranges before they are read
            yield from cast(EncodedPiece, piece).encoded(self._reference.largest_id)
            return
        piece = cast(DocumentPiece, piece)
        sampling = Sampling(self._compare)
        batches = _batches(piece, self._reference)
        batch = next(batches, None)
        # While one batch is encoded, which needs no Python, the next one is read.
        with ThreadPoolExecutor(1, thread_name_prefix="encoder") as thread:
            while batch is not None:
                encoded = thread.submit(self._encode, batch, piece, sampling)
                batch = next(batches, None)
                yield encoded.result()
        sampling.finish()

    def _encode(self, batch: _Batch, piece: DocumentPiece, sampling: Sampling) -> EncodedBatch:
        origins, documents = batch
        if isinstance(documents[0], np.ndarray):
            tokens, lengths = np.concatenate(documents), [len(ids) for ids in documents]
            return EncodedBatch(tokens, lengths, origins, tokens.nbytes)
        if isinstance(documents[0], Rendered):  # of which the place of each token is needed, which the reference tells
            return _encode_chats(documents, origins, piece, self._reference)
        texts = cast(list[str], documents)
        self.load()
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


def problem_of_ids(ids: np.ndarray, largest_id: int) -> BadRecord | None:
    """What is wrong with the token ids of a document: the first one that is none of ``[0, largest_id]``."""
    if not len(ids) or (ids.min() >= 0 and ids.max() <= largest_id):
        return None
    place = int(np.argmax((ids < 0) | (ids > largest_id)))
    return BadRecord(
        "bad id", f"token id {ids[place]} at place {place:,} (from 0), expected 0 to {largest_id}, as the tokenizer has"
    )


def _batches(piece: DocumentPiece, tokenizer: TextTokenizer) -> Iterator[_Batch]:
    """Documents that are encoded together: texts, written conversations, or given ids with all that belongs to them."""
    origins: list[tuple[int, int]] = []
    documents: list[Any] = []
    size = 0
    for origin, document in piece:
        if isinstance(document, np.ndarray):
            problem = problem_of_ids(document, tokenizer.largest_id)
            if problem is not None:
                piece.reject(*origin, problem)
                continue
            document = tokenizer.complete(document.astype(np.uint32))
        item: Any = document
        if isinstance(document, Conversation):
            item = tokenizer.chat_template().render(document.messages, document.name)
            if isinstance(item, BadRecord):
                piece.reject(*origin, item)
                continue
        origins.append(origin)
        documents.append(item)
        size += len(item.text if isinstance(item, Rendered) else item)
        if len(documents) >= _BATCH_DOCUMENTS or size >= _BATCH_CHARACTERS:
            yield origins, documents
            origins, documents, size = [], [], 0
    if documents:
        yield origins, documents


def _encode_chats(
    chats: list[Rendered], origins: list[tuple[int, int]], piece: DocumentPiece, tokenizer: TextTokenizer
) -> EncodedBatch:
    """The ids of the whole texts, and a mask of the tokens that lie in what the assistant says.

    A conversation in which no such token is a label is left out, and counted.
    """
    ids, masks, kept = [], [], []
    for chat, origin, (tokens, offsets) in zip(
        chats, origins, tokenizer.encode_rendered([chat.text for chat in chats]), strict=True
    ):
        mask = _inside(offsets, chat.spans)
        if not mask[1:].any():
            piece.skipped.append((*origin, NO_LABEL))
            continue
        ids.append(tokens)
        masks.append(mask)
        kept.append(origin)
    size = sum(len(chat.text.encode("utf-8")) for chat in chats)
    empty = [np.empty(0, dtype=np.uint32)], [np.empty(0, dtype=np.uint8)]
    tokens, mask = np.concatenate(ids or empty[0]), np.concatenate(masks or empty[1])
    return EncodedBatch(tokens, [len(each) for each in ids], kept, size, mask)


def _inside(offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """Which tokens lie wholly in one of the spans: uint8, shape ``(tokens,)``."""
    starts, stops = offsets.T
    # Tokens of white space may have their characters trimmed off: they belong to where they end.
    starts = np.where(starts == stops, starts - 1, starts)
    inside = np.zeros(len(offsets), dtype=np.uint8)
    for start, stop in spans:
        inside |= (starts >= start) & (stops <= stop)
    return inside


def _encode(
    texts: list[str], origins: list[tuple[int, int]], piece: DocumentPiece, tokenizer: TextTokenizer
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
