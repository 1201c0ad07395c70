"""Rows to tensors: reads the samples of one micro-batch from their stores."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zephon_patches.samples.sequence import IGNORE_INDEX, fill_row
from zephon_patches.store.history import file_changes, find_manifest
from zephon_patches.store.reader import TokenStore

__all__ = ["Item", "MicroBatchReader", "Row"]

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
    """

    def __init__(self, stores: Sequence[TokenStore], seq_len: int) -> None:
        self._stores = list(stores)
        self.seq_len = seq_len

    @property
    def documents(self) -> list[int]:
        """Of each source."""
        return [store.num_documents for store in self._stores]

    def data_changes(self, source: int, data: str) -> list[str]:
        """What has changed in a source since its data had another fingerprint, as far as the cache still knows."""
        store = self._stores[source]
        before = find_manifest(store.folder.parent, data)
        return file_changes(before, store.manifest) if before else []

    def read(self, rows: Sequence[Row]) -> Item:
        """Makes the tensors of one micro-batch in a fresh buffer.

        Returns:
            ``{"input": int64 (rows, seq_len)}`` and labels of the same shape. Both are views of one buffer
            unless a label is masked: the trainer never writes to them, and it saves half of the copying.
        """
        buffer = torch.empty((len(rows), self.seq_len + 1), dtype=torch.int64)
        array = buffer.numpy()
        masked = []  # (row, first label that does not count)
        for i, row in enumerate(rows):
            labels = fill_row(array[i], self._stores[row.source].tokens(row.shard), row.sample)
            if row.padding:
                masked.append((i, 0))
            elif labels < self.seq_len:
                masked.append((i, labels))
        inputs, targets = buffer[:, :-1], buffer[:, 1:]
        if masked:
            targets = targets.clone()
            for i, first in masked:
                targets[i, first:] = IGNORE_INDEX
        return {"input": inputs}, targets
