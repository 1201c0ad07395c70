"""Documents of a piece of input to token ids, batch by batch.

Given token ids pass as they are, once each is found to be one of the tokenizer's.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from zephon_patches.errors import InputError
from zephon_patches.prepare.chat import Rendered
from zephon_patches.prepare.readers import BadRecord, Conversation
from zephon_patches.prepare.shards import DocumentPiece, Piece
from zephon_patches.prepare.tokenizers import TextTokenizer

__all__ = ["EncodedBatch", "EncodedPiece", "encoded_batches", "problem_of_ids"]

NO_LABEL = "no label"
"""Reason for which a conversation in which the assistant says nothing is left out"""

# Documents that go to the tokenizer together: enough for all its threads, little enough for memory.
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 2048, 4 << 20


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


def encoded_batches(piece: Piece, tokenizer: TextTokenizer) -> Iterator[EncodedBatch]:
    """Reads a piece to its end, and encodes its documents.

    Raises:
        InputError: A document cannot be read or tokenized; the message names its place.
    """
    if hasattr(piece, "encoded"):  # no isinstance, which would ask for the ranges before they are read
        yield from cast(EncodedPiece, piece).encoded(tokenizer.largest_id)
        return
    piece = cast(DocumentPiece, piece)
    for origins, documents in _batches(piece, tokenizer):
        texts = [document for document in documents if isinstance(document, str)]
        written = [document for document in documents if isinstance(document, Rendered)]
        if written:
            yield _encode_chats(written, origins, piece, tokenizer)
            continue
        if texts:
            tokens, lengths = _encode(texts, origins, piece, tokenizer)
            size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        else:
            tokens, lengths = np.concatenate(documents), [len(ids) for ids in documents]
            size = tokens.nbytes
        yield EncodedBatch(tokens, lengths, origins, size)


def problem_of_ids(ids: np.ndarray, largest_id: int) -> BadRecord | None:
    """What is wrong with the token ids of a document: the first one that is none of ``[0, largest_id]``."""
    if not len(ids) or (ids.min() >= 0 and ids.max() <= largest_id):
        return None
    place = int(np.argmax((ids < 0) | (ids > largest_id)))
    return BadRecord(
        "bad id", f"token id {ids[place]} at place {place:,} (from 0), expected 0 to {largest_id}, as the tokenizer has"
    )


def _batches(piece: DocumentPiece, tokenizer: TextTokenizer) -> Iterator[tuple[list[tuple[int, int]], list[Any]]]:
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
