"""Rows to tensors: reads the samples of one micro-batch from their stores."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

__all__ = ["Item", "MicroBatchReader", "Row"]

# Shards whose plan a process keeps open, over all sources; the oldest one goes when there are as many.
_MAX_PLANS = 4096

Item = tuple[dict[str, torch.Tensor], torch.Tensor]


class Row(NamedTuple):
    """Where one row of a micro-batch is read from."""

    source: int
    shard: int
    sample: int
    padding: bool
    """Whether the row only fills up the micro-batch: all its labels are left out of the loss"""


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

    def read(self, rows: Sequence[Row]) -> Item:
        """Makes the tensors of one micro-batch in a fresh buffer.

        Returns:
            ``{"input": int64 (rows, seq_len)}`` and labels of the same shape; ``positions`` too, of the same shape and
            type, where they are wanted.
        """
        return self._read_packed(rows) if self._plans else self._read_concat(rows)

    def _read_concat(self, rows: Sequence[Row]) -> Item:
        # Inputs and labels are views of one buffer unless a label is masked: the trainer never writes to them, and it
        # saves half of the copying.
        buffer = torch.empty((len(rows), self.seq_len + 1), dtype=torch.int64)
        array = buffer.numpy()
        masked = []  # (row, first label that does not count)
        for i, row in enumerate(rows):
            labels = fill_row(array[i], self._stores[row.source].tokens(row.shard), row.sample)
            if row.padding:
                masked.append((i, 0))
            elif labels < self.seq_len:
                masked.append((i, labels))
        inputs, targets = {"input": buffer[:, :-1]}, buffer[:, 1:]
        boundaries = self.sampling.mask_boundaries
        if masked or boundaries:
            targets = targets.clone()
            for i, first in masked:
                targets[i, first:] = IGNORE_INDEX
        if boundaries or self.sampling.positions:
            positions = np.empty((len(rows), self.seq_len), dtype=np.int64)
            labels_array = targets.numpy()
            for i, row in enumerate(rows):
                starts, stop = self._document_starts(row)
                if boundaries:
                    mask_boundaries(labels_array[i], starts)
                fill_positions(positions[i], [*starts.tolist(), stop])
            if self.sampling.positions:
                inputs["positions"] = torch.from_numpy(positions)
        return inputs, targets

    def _document_starts(self, row: Row) -> tuple[np.ndarray, int]:
        """Where documents begin in a sample, and where its padding does, counted from its first token."""
        store = self._stores[row.source]
        first, stop = span(row.sample, self.seq_len, int(store.tokens_per_shard[row.shard]))
        return document_starts(store.pointers(row.shard), store.itemsize, first, stop), stop - first

    def _read_packed(self, rows: Sequence[Row]) -> Item:
        inputs, labels = (torch.empty((len(rows), self.seq_len), dtype=torch.int64) for _ in range(2))
        samples = [(self._packed_shard(row.source, row.shard), row.sample) for row in rows]
        fill_rows(inputs.numpy(), labels.numpy(), samples)
        for i, row in enumerate(rows):
            mask = self._stores[row.source].mask(row.shard)
            if row.padding:
                labels[i] = IGNORE_INDEX
            elif mask is not None:
                mask_labels(labels[i].numpy(), mask, *samples[i])
        item = {"input": inputs}
        if self.sampling.positions:
            item["positions"] = torch.empty_like(inputs)
            positions = item["positions"].numpy()
            for i, (shard, number) in enumerate(samples):
                fill_positions(positions[i], row_starts(shard, number))
        return item, labels

    def _packed_shard(self, source: int, shard: int) -> PackedShard:
        found = self._packed.get((source, shard))
        if found is None:
            if len(self._packed) >= _MAX_PLANS:
                del self._packed[next(iter(self._packed))]
            store = self._stores[source]
            found = packed_shard(store.tokens(shard), plan_of(store, shard, self._plans[source]))
            self._packed[source, shard] = found
        return found
