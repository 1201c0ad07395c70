"""Which tokens of a shard a sample holds, which samples hold given tokens, and a sample's row, for each packing.

Nothing is made here: the plans of a packing have to be there. Rows are laid out in the plainest way, apart from the
loader's, whose speed does not matter here.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from zephon_patches.errors import StoreError
from zephon_patches.samples.chunking import num_samples, samples_with, span
from zephon_patches.samples.packed import fill_positions, mask_boundaries, piece_starts
from zephon_patches.samples.pieces import Plan
from zephon_patches.samples.plan_file import open_plan
from zephon_patches.samples.plan_list import PlanList, read_list
from zephon_patches.samples.sequence import IGNORE_INDEX, PAD_ID, Sampling
from zephon_patches.store.catalog import Catalog
from zephon_patches.store.reader import open_mask

__all__ = ["Layout", "layout_of"]

_KEPT_PLANS = 64


class Layout(Protocol):
    """How a packing lays the tokens of one store's shards into samples."""

    samples_per_shard: np.ndarray
    """int64, shape ``(shards,)``"""
    plans: PlanList | None
    """What is known of its plans; None for a packing without any"""

    def spans(self, shard: int, sample: int) -> Sequence[tuple[int, int]]:
        """The token ranges ``[start, stop)`` of a sample, in its order."""

    def samples(self, shard: int, start: int, stop: int) -> Sequence[int]:
        """The samples that hold any of the tokens ``[start, stop)``."""

    def row(self, shard: int, sample: int) -> dict[str, np.ndarray]:
        """What the trainer gets of a sample: int64, shape ``(seq_len,)``, by name, one of them ``labels``."""


def layout_of(store: Catalog, seq_len: int, sampling: Sampling) -> Layout:
    """The layout of a store's samples.

    Raises:
        StoreError: The packing has plans, and they are not there.
    """
    return _Chunks(store, seq_len, sampling) if sampling.packing == "concat" else _Pieces(store, seq_len, sampling)


class _Chunks:
    """``concat``: one range of the shard in each sample."""

    plans: PlanList | None = None

    def __init__(self, store: Catalog, seq_len: int, sampling: Sampling) -> None:
        self._store, self._seq_len, self._sampling = store, seq_len, sampling
        self.samples_per_shard = num_samples(store.tokens_per_shard, seq_len)

    def spans(self, shard: int, sample: int) -> list[tuple[int, int]]:
        return [span(sample, self._seq_len, int(self._store.tokens_per_shard[shard]))]

    def samples(self, shard: int, start: int, stop: int) -> range:
        return samples_with(start, stop, self._seq_len, int(self._store.tokens_per_shard[shard]))

    def row(self, shard: int, sample: int) -> dict[str, np.ndarray]:
        [(start, stop)] = self.spans(shard, sample)
        tokens = self._store.tokens(shard, start, stop)
        row = _row(self._seq_len, [tokens])
        if len(tokens) <= self._seq_len:  # the shard's last sample: its last token is an input without a label
            row["input"][len(tokens) - 1] = tokens[-1]
        if self._sampling.mask_boundaries or self._sampling.positions:
            places = self._store.documents(shard, start, stop)
            starts = np.array([place.start - start for place in places if place.start >= start], dtype=np.int64)
            if self._sampling.mask_boundaries:
                mask_boundaries(row["labels"], starts)
            if self._sampling.positions:
                row["positions"] = np.empty(self._seq_len, dtype=np.int64)
                fill_positions(row["positions"], [*starts.tolist(), stop - start])
        return row


class _Pieces:
    """``best_fit`` and ``document``: by a plan, some pieces of documents in each sample."""

    def __init__(self, store: Catalog, seq_len: int, sampling: Sampling) -> None:
        self._store, self._seq_len, self._sampling = store, seq_len, sampling
        try:
            plans = read_list(store, sampling.packing, seq_len)
        except StoreError as error:
            raise StoreError(
                f"{error}; the plans of packing {sampling.packing} are made by zephon-data prepare with the training "
                f"config, or with --packing {sampling.packing} --seq-len {seq_len}"
            ) from None
        self.plans: PlanList | None = plans
        self.samples_per_shard = plans.samples
        self._plan = lru_cache(maxsize=_KEPT_PLANS)(self._open_plan)

    def spans(self, shard: int, sample: int) -> list[tuple[int, int]]:
        return [(first, first + tokens) for first, tokens in self._plan(shard).sample(sample).tolist()]

    def samples(self, shard: int, start: int, stop: int) -> list[int]:
        plan = self._plan(shard)
        first, tokens = plan.pieces.T
        held = np.flatnonzero((first < stop) & (first + tokens > start))
        return np.unique(np.searchsorted(plan.starts, held, side="right") - 1).tolist()

    def row(self, shard: int, sample: int) -> dict[str, np.ndarray]:
        spans = self.spans(shard, sample)
        row = _row(self._seq_len, [self._store.tokens(shard, start, stop) for start, stop in spans])
        record = self._store.record(shard)
        if record.mask:
            mask = open_mask(self._store.folder, record)
            counts = np.concatenate([mask[start + 1 : stop] for start, stop in spans])
            row["labels"][: len(counts)][counts == 0] = IGNORE_INDEX
        if self._sampling.positions:
            row["positions"] = np.empty(self._seq_len, dtype=np.int64)
            fill_positions(row["positions"], piece_starts(self._plan(shard).sample(sample)))
        return row

    def _open_plan(self, shard: int) -> Plan:
        plan = open_plan(self._store.folder, self._store.record(shard), self._sampling.packing, self._seq_len)
        if plan.num_samples != int(self.samples_per_shard[shard]):
            raise StoreError(
                f"{self._store.folder}: the plan of shard {shard:,} has {plan.num_samples:,} samples, and the list of "
                f"plans {self.samples_per_shard[shard]:,}; zephon-data verify finds all damage"
            )
        return plan


def _row(seq_len: int, pieces: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Of each piece all tokens but the last as inputs, and all but the first as labels; then padding."""
    inputs = np.full(seq_len, PAD_ID, dtype=np.int64)
    labels = np.full(seq_len, IGNORE_INDEX, dtype=np.int64)
    at = 0
    for tokens in pieces:
        count = len(tokens) - 1
        inputs[at : at + count] = tokens[:-1]
        labels[at : at + count] = tokens[1:]
        at += count
    return {"input": inputs, "labels": labels}
