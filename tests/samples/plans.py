"""Documents for packings: their lengths, and tokens that tell every place of a shard from every other."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from tests import reference

# Of documents, in tokens: many equal ones, empty ones, and some far longer than a row.
lengths_lists = st.lists(st.integers(0, 14) | st.integers(0, 60), max_size=40)


def numbered(lengths: Sequence[int]) -> list[list[int]]:
    """Documents whose tokens are their places in the shard, from 1."""
    documents, first = [], 1
    for length in lengths:
        documents.append(list(range(first, first + length)))
        first += length
    return documents


def as_reference(pieces: np.ndarray, lengths: Sequence[int]) -> list[reference.Piece]:
    """The pieces of a plan, with the document that each is of."""
    starts = np.cumsum(lengths) - lengths
    documents = (np.searchsorted(starts, pieces[:, 0], side="right") - 1).tolist()
    return [reference.Piece(document, *piece) for document, piece in zip(documents, pieces.tolist(), strict=True)]
