"""Documents of a piece of input to token ids, batch by batch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zephon_patches.errors import InputError
from zephon_patches.prepare.shards import Piece
from zephon_patches.prepare.tokenizers import TextTokenizer

__all__ = ["EncodedBatch", "encoded_batches"]

# Documents that go to the tokenizer together: enough for all its threads, little enough for memory.
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 2048, 4 << 20


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


def encoded_batches(piece: Piece, tokenizer: TextTokenizer) -> Iterator[EncodedBatch]:
    """Reads a piece to its end, and encodes its documents.

    Raises:
        InputError: A document cannot be read or tokenized; the message names its place.
    """
    for origins, texts in _batches(piece):
        tokens, lengths = _encode(texts, origins, piece, tokenizer)
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        yield EncodedBatch(tokens, lengths, origins, size)


def _batches(piece: Piece) -> Iterator[tuple[list[tuple[int, int]], list[str]]]:
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
