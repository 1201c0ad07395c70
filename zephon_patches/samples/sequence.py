"""What a sample holds: its tokens laid into one row, and how many of its labels count."""

from dataclasses import dataclass

import numpy as np

from zephon_patches.samples.chunking import span

__all__ = ["CONCAT", "IGNORE_INDEX", "PAD_ID", "Sampling", "fill_row"]

# The label that PyTorch's cross entropy leaves out of the loss.
IGNORE_INDEX = -100

# Stands where a row has no token. Any id of the vocabulary would do: its label does not count, and in a
# causal model no place before it sees it.
PAD_ID = 0


@dataclass(frozen=True)
class Sampling:
    """What the samples of a run hold."""

    packing: str = "concat"
    positions: bool = False
    """Whether they have positions that start at 0 at each document"""
    mask_boundaries: bool = False
    """Whether labels that are another document's first token do not count; goes with ``concat``"""


CONCAT = Sampling()


def fill_row(row: np.ndarray, tokens: np.ndarray, sample: int) -> int:
    """Lays one sample of a shard into a row.

    Args:
        row: int64, shape ``(seq_len + 1,)``; all of it is overwritten. ``row[:-1]`` are the inputs, ``row[1:]``
            the labels.
        tokens: Integers, shape ``(tokens of the shard,)``.
        sample: Number of the sample in the shard.

    Returns:
        The number of labels that count, 1 to ``seq_len``; those behind them are padding.
    """
    start, stop = span(sample, len(row) - 1, len(tokens))
    length = stop - start
    row[:length] = tokens[start:stop]
    if length < len(row):
        row[length:] = PAD_ID
    return length - 1
