"""Pieces of documents, and plans of which pieces make which sample, for packings that keep documents whole.

A document of L tokens has L - 1 labels and takes as many places of a sample: each token but its last is an input,
each but its first a label, and no label is another document's token. One that fits into ``seq_len`` places is one
piece. A longer one is cut into full pieces of ``seq_len`` places and a remainder; a piece starts at the last token of
the one before, so that no label is lost. A document of less than two tokens has no label: it is left out, and
counted.

A piece is a pair: its first token in the shard, and its number of tokens, one more than places. Its document is the
last one that starts at or before its first token.

Worked case, documents of 3, 10, 1 and 5 tokens, ``seq_len`` = 4: the pieces are (0, 3) of document 0; (3, 5), (7, 5)
and (11, 2) of document 1; (14, 5) of document 3. Document 2 is left out.
"""

from typing import NamedTuple

import numpy as np

__all__ = ["Plan", "cut_pieces", "labelled_pieces", "plan_documents"]

# The index holds a document's length as int32.
_MAX = 2**31 - 1


class Plan(NamedTuple):
    """Which pieces of a shard make which sample."""

    starts: np.ndarray
    """int64, shape ``(samples + 1,)``: sample i holds ``pieces[starts[i]:starts[i + 1]]``, at least one"""
    pieces: np.ndarray
    """int64, shape ``(pieces, 2)``: first token and tokens of each; inside a sample in the order of the shard"""
    left_out: int
    """Documents, and pieces, without a label that counts, which are in no sample"""

    def sample(self, number: int) -> np.ndarray:
        """The pieces of a sample: int64, shape ``(pieces of the sample, 2)``, a view."""
        return self.pieces[self.starts[number] : self.starts[number + 1]]

    @property
    def num_samples(self) -> int:
        return len(self.starts) - 1

    @property
    def num_labels(self) -> int:
        """Labels that count, over all samples; by ``num_samples * seq_len``, the fill ratio."""
        return int(self.pieces[:, 1].sum()) - len(self.pieces)


def cut_pieces(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, int]:
    """Cuts the documents of a shard into pieces of at most ``seq_len`` places.

    Args:
        lengths: Integers, shape ``(documents,)``: tokens of each document, not negative.
        seq_len: At least 1.

    Returns:
        The pieces in the order of the shard, int64, shape ``(pieces, 2)``, and how many documents are left out.

    Raises:
        ValueError: A length is negative or above 2**31 - 1, or ``seq_len`` below 1 or above 2**31 - 2.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if not 1 <= seq_len < _MAX:
        raise ValueError(f"seq_len = {seq_len:,}: expected 1 to {_MAX - 1:,}")
    wrong = (lengths < 0) | (lengths > _MAX)
    if wrong.any():
        first = int(np.argmax(wrong))
        raise ValueError(f"document {first:,} has {lengths[first]:,} tokens: expected 0 to {_MAX:,}")
    firsts = np.cumsum(lengths) - lengths
    places = np.maximum(lengths - 1, 0)
    counts = -(-places // seq_len)  # pieces of each document
    left_out = int(np.count_nonzero(counts == 0))
    total = int(counts.sum())
    document = np.repeat(np.arange(len(lengths)), counts)
    inside = (np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
    pieces = np.empty((total, 2), dtype=np.int64)
    pieces[:, 0] = firsts[document] + inside
    pieces[:, 1] = np.minimum(places[document] - inside, seq_len) + 1
    return pieces, left_out


def labelled_pieces(lengths: np.ndarray, seq_len: int, mask: np.ndarray | None) -> tuple[np.ndarray, int]:
    """As ``cut_pieces``, without the pieces none of whose labels counts; these count as left out, too.

    Args:
        mask: Of the shard's tokens, uint8: 1 for those that count as labels; None where all do.
    """
    pieces, left_out = cut_pieces(lengths, seq_len)
    if mask is None:
        return pieces, left_out
    before = np.zeros(len(mask) + 1, dtype=np.int64)
    np.cumsum(mask, out=before[1:])
    counts = before[pieces.sum(axis=1)] - before[pieces[:, 0] + 1]
    return pieces[counts > 0], left_out + int(np.count_nonzero(counts == 0))


def plan_documents(lengths: np.ndarray, seq_len: int, mask: np.ndarray | None = None) -> Plan:
    """One document, or one piece of a long one, in each sample, in the order of the shard; as ``labelled_pieces``."""
    pieces, left_out = labelled_pieces(lengths, seq_len, mask)
    return Plan(np.arange(len(pieces) + 1, dtype=np.int64), pieces, left_out)
