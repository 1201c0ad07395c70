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
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from zephon_patches.samples.pieces import Plan
from zephon_patches.samples.sequence import IGNORE_INDEX, PAD_ID

__all__ = [
    "PackedShard",
    "document_starts",
    "fill_positions",
    "fill_rows",
    "mask_boundaries",
    "mask_labels",
    "packed_shard",
    "piece_starts",
    "row_starts",
]


class PackedShard(NamedTuple):
    """What the rows of a shard are filled from; keep it, for making it takes as long as filling a row.

    Memory views of a shard's tokens and plan, for reading single numbers and copying small parts of them takes half
    as long as with arrays.
    """

    tokens: memoryview
    starts: memoryview
    pieces: memoryview
    """Flat: first token and tokens of the first piece, then of the second, and so on"""


def packed_shard(tokens: np.ndarray, plan: Plan) -> PackedShard:
    """Joins the tokens of a shard, uint16 or int32, and its plan."""
    return PackedShard(tokens.data, plan.starts.data, plan.pieces.reshape(-1).data)


def fill_rows(inputs: np.ndarray, labels: np.ndarray, samples: Sequence[tuple[PackedShard, int]]) -> list[int]:
    """Lays packed samples into rows, one each.

    Args:
        inputs, labels: int64, shape ``(rows, seq_len)``; all of both is overwritten.
        samples: For each row its shard, and the sample's number in it.

    Returns:
        The number of labels that count in each row; those behind them are padding.

    Raises:
        ValueError: A sample does not lie in its shard or its row: the plan is another shard's, or for another row.
    """
    rows, seq_len = inputs.shape
    width = samples[0][0].tokens.itemsize
    # Pieces are put together in their own type, of which copies are small, and converted for all rows at once. Each
    # lies with its first token on the last one of the piece before, which is no input, but a label: it is put back
    # for the labels. Views do not stretch a part that is too short, as arrays do.
    stage = np.empty((rows, seq_len + 1), samples[0][0].tokens.format)
    target = stage.reshape(-1).data
    covered: list[tuple[int, int]] = []
    counts: list[int] = []
    padded: list[int] = []
    start = 0
    for (tokens, starts, pieces), number in samples:
        if tokens.itemsize != width:  # stores with ids of other types in one batch
            return [fill_rows(inputs[i : i + 1], labels[i : i + 1], samples[i : i + 1])[0] for i in range(rows)]
        at = start
        numbers = iter(pieces[2 * starts[number] : 2 * starts[number + 1]].tolist())
        for first, count in zip(numbers, numbers):  # noqa: B905  (takes two at a time)
            if at > start:
                covered.append((at, target[at]))
            target[at : at + count] = tokens[first : first + count]
            at += count - 1
        count = at - start
        if count != seq_len:
            if count > seq_len:
                raise ValueError(f"a sample of {count:,} places for a row of {seq_len:,}")
            padded.append(len(counts))
        counts.append(count)
        start += seq_len + 1
    inputs[...] = stage[:, :-1]
    for at, token in covered:
        target[at] = token
    labels[...] = stage[:, 1:]
    for row in padded:
        inputs[row, counts[row] :] = PAD_ID
        labels[row, counts[row] :] = IGNORE_INDEX
    return counts


def piece_starts(pieces: np.ndarray) -> list[int]:
    """The place of each piece's first input in its row, and of the padding behind the last.

    Args:
        pieces: Of one sample, as ``Plan.sample`` gives them.
    """
    return [0, *np.cumsum(pieces[:, 1] - 1).tolist()]


def row_starts(shard: PackedShard, number: int) -> list[int]:
    """As ``piece_starts``, of a sample of a shard."""
    counts = shard.pieces[2 * shard.starts[number] + 1 : 2 * shard.starts[number + 1] : 2].tolist()
    return list(accumulate((count - 1 for count in counts), initial=0))


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


def mask_labels(labels: np.ndarray, mask: np.ndarray, shard: PackedShard, number: int) -> None:
    """Leaves the labels of a sample that do not count by the mask of its shard out of the loss.

    Args:
        labels: int64, shape ``(seq_len,)``.
        mask: As ``TokenStore.mask`` gives it.
    """
    at = 0
    numbers = iter(shard.pieces[2 * shard.starts[number] : 2 * shard.starts[number + 1]].tolist())
    for first, count in zip(numbers, numbers):  # noqa: B905  (takes two at a time)
        labels[at : at + count - 1][mask[first + 1 : first + count] == 0] = IGNORE_INDEX
        at += count - 1


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
