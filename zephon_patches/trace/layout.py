"""Which tokens of a shard a sample holds, and which samples hold given tokens, for each packing.

A further packing is a further entry of ``LAYOUTS``: how many samples a shard has, a sample's token ranges, the way
back, and its row as arrays.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from zephon_patches.samples.chunking import num_samples, samples_with, span
from zephon_patches.samples.sequence import IGNORE_INDEX, fill_row
from zephon_patches.store.catalog import Catalog

__all__ = ["LAYOUTS", "Layout"]


class Layout(NamedTuple):
    """How a packing lays the tokens of a shard into samples; all functions take (store, shard, ..., seq_len)."""

    num_samples: Callable[[Catalog, int], np.ndarray]
    """(store, seq_len) -> the samples of each shard, int64, shape (shards,)"""
    spans: Callable[[Catalog, int, int, int], Sequence[tuple[int, int]]]
    """(store, shard, sample, seq_len) -> the token ranges of the sample, in its order"""
    samples: Callable[[Catalog, int, int, int, int], Sequence[int]]
    """(store, shard, start, stop, seq_len) -> the samples that hold any of the tokens [start, stop)"""
    row: Callable[[Catalog, int, int, int], dict[str, np.ndarray]]
    """(store, shard, sample, seq_len) -> what the trainer gets of it: int64 arrays of shape (seq_len,) by name, one of
    them ``labels``"""


def _concat_num_samples(store: Catalog, seq_len: int) -> np.ndarray:
    return num_samples(store.tokens_per_shard, seq_len)


def _concat_spans(store: Catalog, shard: int, sample: int, seq_len: int) -> list[tuple[int, int]]:
    return [span(sample, seq_len, int(store.tokens_per_shard[shard]))]


def _concat_samples(store: Catalog, shard: int, start: int, stop: int, seq_len: int) -> range:
    return samples_with(start, stop, seq_len, int(store.tokens_per_shard[shard]))


def _concat_row(store: Catalog, shard: int, sample: int, seq_len: int) -> dict[str, np.ndarray]:
    start, stop = span(sample, seq_len, int(store.tokens_per_shard[shard]))
    row = np.empty(seq_len + 1, dtype=np.int64)
    labels = fill_row(row, store.tokens(shard, start, stop), 0)
    targets = row[1:].copy()
    targets[labels:] = IGNORE_INDEX
    return {"input": row[:-1], "labels": targets}


LAYOUTS = {"concat": Layout(_concat_num_samples, _concat_spans, _concat_samples, _concat_row)}
