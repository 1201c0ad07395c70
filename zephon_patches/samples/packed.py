"""Fills rows with packed samples, and says where documents begin in any sample.

A row of pieces holds, for each piece, all its tokens but the last as inputs, and all but the first as labels, in the
same places; then padding. So no label is another document's token, and nothing has to be masked but the padding.

In a ``concat`` sample documents run into each other: the label before a document's first token is that token, and
``mask_boundaries`` leaves it out of the loss, inside a sample and at its end.

Positions count from 0 at each document, at each piece of a long one, at the start of a row, and at the padding. So a
document that goes on in the next sample starts there at 0 again: attention does not reach into the sample before, and
positions stay below ``seq_len``, for which a model's rotary tables are made. A place with position 0 is the first of
what may attend to each other.

Worked case, ``seq_len`` = 6, the pieces with the tokens 1 2 3 and 7 8 9::

    inputs     1  2  7  8     0     0
    labels     2  3  8  9  -100  -100
    positions  0  1  0  1     0     1
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from zephon_patches.errors import StoreError
from zephon_patches.samples.sequence import IGNORE_INDEX, PAD_ID

__all__ = ["document_starts", "fill_pieces", "fill_positions", "mask_boundaries", "piece_starts"]


def fill_pieces(inputs: np.ndarray, labels: np.ndarray, tokens: np.ndarray, pieces: np.ndarray) -> int:
    """Lays the pieces of one sample into a row.

    Args:
        inputs, labels: int64, shape ``(seq_len,)``; all of both is overwritten.
        tokens: uint16 or int32, shape ``(tokens of the shard,)``.
        pieces: ``PIECE``, shape ``(pieces of the sample,)``.

    Returns:
        The number of labels that count; those behind them are padding.

    Raises:
        StoreError: A piece lies outside the shard or the row: the plan is damaged, or another shard's.
    """
    seq_len, num_tokens = len(inputs), len(tokens)
    # The tokens are put together in their own type, whose copies are small, and then converted in one go. Each piece
    # overwrites the last token of the one before, which is no input; then these are put back, which are labels.
    stage = np.empty(seq_len + 1, tokens.dtype)
    source, target = tokens.data, stage.data
    ends = []
    at = 0
    for first, count in zip(pieces["first"].tolist(), pieces["tokens"].tolist(), strict=True):
        stop, end = first + count, at + count
        if first < 0 or count < 2 or stop > num_tokens or end > seq_len + 1:
            raise StoreError(
                f"a sample's piece has the tokens {first:,} to {stop:,} of a shard of {num_tokens:,}, at place {at:,} "
                f"of {seq_len:,}: its plan of packing is damaged, or another shard's; remove it to have it made anew"
            )
        target[at:end] = source[first:stop]
        at = end - 1
        ends.append((at, stop - 1))
    inputs[:at] = stage[:at]
    for end, last in ends:
        target[end] = source[last]
    labels[:at] = stage[1 : at + 1]
    if at < seq_len:
        inputs[at:] = PAD_ID
        labels[at:] = IGNORE_INDEX
    return at


def piece_starts(pieces: np.ndarray) -> list[int]:
    """The place of each piece's first input in its row, and of the padding behind the last.

    Args:
        pieces: ``PIECE``, of one sample.
    """
    return [0, *np.cumsum(pieces["tokens"] - np.int32(1), dtype=np.int64).tolist()]


def document_starts(pointers: np.ndarray, itemsize: int, first: int, stop: int) -> np.ndarray:
    """Where documents begin in a part of a shard. Searches, so a mapped index is not read but for a few entries.

    Args:
        pointers: int64, shape ``(documents,)``: where each document starts, in bytes, as the index has it.
        itemsize: Bytes of a token.
        first, stop: The part, in tokens.

    Returns:
        int64, counted from ``first``: 0 or more, below ``stop - first``; an empty document begins where the next does.
    """
    low = bisect_left(pointers, first * itemsize)
    high = bisect_left(pointers, stop * itemsize, lo=low)
    return np.asarray(pointers[low:high], dtype=np.int64) // itemsize - first


def mask_boundaries(labels: np.ndarray, starts: np.ndarray) -> int:
    """Leaves the labels of a ``concat`` sample that are a document's first token out of the loss.

    Args:
        labels: int64, shape ``(seq_len,)``: label i is token i + 1 of the sample.
        starts: As ``document_starts`` gives them for the sample's tokens, labels included.

    Returns:
        The number of labels that are left out.
    """
    places = np.unique(starts[starts > 0]) - 1
    labels[places] = IGNORE_INDEX
    return len(places)


def fill_positions(positions: np.ndarray, starts: Sequence[int] | np.ndarray) -> None:
    """Counts the places of a row from 0, anew at each start.

    Args:
        positions: int64, shape ``(seq_len,)``; all of it is overwritten.
        starts: Places in ascending order; those outside the row do not count.
    """
    seq_len = len(positions)
    counting = np.arange(seq_len, dtype=np.int64)
    positions[:] = counting
    bounds = [start for start in map(int, starts) if 0 < start < seq_len]
    for start, stop in pairwise([*bounds, seq_len]):
        positions[start:stop] = counting[: stop - start]
