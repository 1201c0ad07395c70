"""Rows to tensors: reads the samples of one micro-batch from their stores."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zephon_patches.samples.chunking import span
from zephon_patches.samples.packed import (
    PackedShard,
    document_starts,
    fill_positions,
    fill_rows,
    mask_boundaries,
    mask_labels,
    packed_shard,
    row_starts,
)
from zephon_patches.samples.plan_list import PlanList, plan_of
from zephon_patches.samples.sequence import CONCAT, IGNORE_INDEX, Sampling, fill_row
from zephon_patches.store.history import file_changes, find_manifest
from zephon_patches.store.reader import TokenStore

__all__ = ["Empty", "Item", "MicroBatchReader", "Row"]

# Shards whose plan a process keeps open, over all sources; the oldest one goes when there are as many.
_MAX_PLANS = 4096

Item = tuple[dict[str, torch.Tensor], torch.Tensor]

Empty = Callable[[tuple[int, ...]], np.ndarray]
"""Gives memory for an int64 array of some shape"""

# Inputs, labels and positions, as the item has them.
_Arrays = tuple[np.ndarray, np.ndarray, np.ndarray | None]

Row = tuple[int, int, int, bool]
"""Where one row of a micro-batch is read from: source, shard, sample; and whether it only fills up the micro-batch, so
that all its labels are left out of the loss. Plain tuples, since a named one takes many times as long to make."""


def _fresh(shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(shape, dtype=np.int64)


class MicroBatchReader:
    """Reads micro-batches; pickles small, so that worker processes open the stores themselves.

    Args:
        stores: One for each source.
        seq_len: Inputs of a row.
        sampling: What a sample holds.
        plans: Of each store, for a packing that has some.
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        seq_len: int,
        sampling: Sampling = CONCAT,
        plans: Sequence[PlanList] = (),
    ) -> None:
        self._stores = list(stores)
        self._plans = list(plans)
        self._packed: dict[tuple[int, int], PackedShard] = {}
        self.seq_len = seq_len
        self.sampling = sampling

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": {}}

    @property
    def row_words(self) -> int:
        """Words (int64) that a row takes at most: inputs, labels and positions, and the token behind the inputs."""
        return 3 * self.seq_len + 1

    @property
    def may_mask_all(self) -> bool:
        """Whether a sample may be without a label that counts."""
        return self.sampling.mask_boundaries

    @property
    def documents(self) -> list[int]:
        """Of each source."""
        return [store.num_documents for store in self._stores]

    def place_of(self, source: int, shard: int) -> tuple[str, str, Path]:
        """What a source and a shard are called, and the store's folder, for messages."""
        store = self._stores[source]
        return store.folder.parent.name, store.record(shard).name, store.folder

    def data_changes(self, source: int, data: str) -> list[str]:
        """What has changed in a source since its data had another fingerprint, as far as the cache still knows."""
        store = self._stores[source]
        before = find_manifest(store.folder.parent, data)
        return file_changes(before, store.manifest) if before else []

    def read(self, rows: Sequence[Row], empty: Empty = _fresh) -> Item:
        """Makes the tensors of one micro-batch.

        Args:
            rows: Where they are read from.
            empty: Gives the memory that they lie in, fresh if it is not given.

        Returns:
            ``{"input": int64 (rows, seq_len)}`` and labels of the same shape; ``positions`` too, of the same shape and
            type, where they are wanted. Inputs and labels may share memory.
        """
        inputs, labels, positions = self._read_packed(rows, empty) if self._plans else self._read_concat(rows, empty)
        # From NumPy's arrays and views, which take less time to make than torch's.
        tensors = {"input": torch.from_numpy(inputs)}
        if positions is not None:
            tensors["positions"] = torch.from_numpy(positions)
        return tensors, torch.from_numpy(labels)

    def _read_concat(self, rows: Sequence[Row], empty: Empty) -> _Arrays:
        # Inputs and labels are views of one buffer unless a label is masked: the trainer never writes to them, and it
        # saves half of the copying.
        seq_len, width, stores = self.seq_len, self.seq_len + 1, self._stores
        tokens = empty((len(rows), width))
        masked = []  # (row, first label that does not count)
        for i, (source, shard, sample, padding) in enumerate(rows):
            shard_tokens = stores[source].tokens(shard)
            start = sample * seq_len
            piece = shard_tokens[start : start + width]
            if len(piece) == width:  # nearly always; a call would take a tenth of the copy
                tokens[i] = piece
            else:
                masked.append((i, fill_row(tokens[i], shard_tokens, sample)))
            if padding:
                masked.append((i, 0))
        boundaries = self.sampling.mask_boundaries
        inputs, labels, positions = tokens[:, :-1], tokens[:, 1:], None
        if masked or boundaries:
            labels = empty(labels.shape)
            labels[:] = tokens[:, 1:]
            for i, first in masked:
                labels[i, first:] = IGNORE_INDEX
        if boundaries or self.sampling.positions:
            positions = empty(inputs.shape) if self.sampling.positions else None
            for i, row in enumerate(rows):
                starts, stop = self._document_starts(row)
                if boundaries:
                    mask_boundaries(labels[i], starts)
                if positions is not None:
                    fill_positions(positions[i], [*starts.tolist(), stop])
        return inputs, labels, positions

    def _document_starts(self, row: Row) -> tuple[np.ndarray, int]:
        """Where documents begin in a sample, and where its padding does, counted from its first token."""
        source, shard, sample, _ = row
        store = self._stores[source]
        first, stop = span(sample, self.seq_len, int(store.tokens_per_shard[shard]))
        return document_starts(store.pointers(shard), store.itemsize, first, stop), stop - first

    def _read_packed(self, rows: Sequence[Row], empty: Empty) -> _Arrays:
        inputs, labels = (empty((len(rows), self.seq_len)) for _ in range(2))
        samples = [(self._packed_shard(source, shard), sample) for source, shard, sample, _ in rows]
        fill_rows(inputs, labels, samples)
        for i, (source, shard, _, padding) in enumerate(rows):
            mask = self._stores[source].mask(shard)
            if padding:
                labels[i] = IGNORE_INDEX
            elif mask is not None:
                mask_labels(labels[i], mask, *samples[i])
        positions = empty(inputs.shape) if self.sampling.positions else None
        if positions is not None:
            for i, (packed, number) in enumerate(samples):
                fill_positions(positions[i], row_starts(packed, number))
        return inputs, labels, positions

    def _packed_shard(self, source: int, shard: int) -> PackedShard:
        found = self._packed.get((source, shard))
        if found is None:
            if len(self._packed) >= _MAX_PLANS:
                del self._packed[next(iter(self._packed))]
            store = self._stores[source]
            found = packed_shard(store.tokens(shard), plan_of(store, shard, self._plans[source]))
            self._packed[source, shard] = found
        return found
