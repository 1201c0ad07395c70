"""The loader: a cursor and a topology give batches.

``build_loader`` opens (or builds) the stores, lays the global order over them, and returns a ``Loader``: an
iterable of micro-batches whose whole state is the cursor. It works with any PyTorch training loop.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zephon_patches import mapping
from zephon_patches.config import DataConfig
from zephon_patches.errors import ConfigError, InputError, LoaderError
from zephon_patches.loader.collate import Item, MicroBatchReader, Row
from zephon_patches.loader.state import CURSOR, ORDER, check_order, describe_order, read_state
from zephon_patches.loader.workers import WorkerPool
from zephon_patches.mapping import Topology
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.order.shuffle import SourceOrder
from zephon_patches.prepare.build import open_or_build
from zephon_patches.prepare.shards import FileInput, Input
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.samples.chunking import num_samples
from zephon_patches.store.reader import TokenStore

__all__ = ["Loader", "build_loader"]

logger = logging.getLogger(__name__)

# Numbers are located in blocks ahead of need, since numpy's cost is per call.
_BLOCK_ROWS = 2048
# Seconds that other ranks leave to rank 0 to start building, so that the bar is where people look.
_PATIENCE = 3.0


class Loader:
    """An iterable of micro-batches with a cursor.

    Each item is ``({"input": int64 (local_batch_size, seq_len)}, labels)``, labels int64 of the same shape with
    -100 where none counts. ``micro_batches_per_step`` items make a step. Make it with ``build_loader``.

    ``iter(loader)`` starts at the cursor and replaces the iterator before it. ``load_state_dict`` takes effect
    at the next item, also on a running iterator.

    Args:
        order: The global order.
        reader: Reads the rows.
        description: The ``order`` entry of the state.
        global_batch_size: Samples of a step, over all ranks.
        local_batch_size: Rows of a micro-batch.
        topology: This rank's place.
        end: Number at which the data ends; None if it does not.
        num_workers: Worker processes; 0 reads in the calling one, without any DataLoader.
        prefetch_factor, persistent_workers, pin_memory, multiprocessing_context: As torch's DataLoader.
    """

    def __init__(
        self,
        order: GlobalOrder,
        reader: MicroBatchReader,
        description: str,
        *,
        global_batch_size: int,
        local_batch_size: int,
        topology: Topology,
        end: int | None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory: bool = False,
        multiprocessing_context: str | None = None,
    ) -> None:
        mapping.check(global_batch_size, local_batch_size, topology)
        self.global_batch_size = global_batch_size
        self.local_batch_size = local_batch_size
        self.topology = topology
        self.micro_batches_per_step = mapping.micro_batches_per_step(
            global_batch_size, local_batch_size, topology.dp_size
        )
        self._order = order
        self._reader = reader
        self._description = description
        self._end = end
        self._cursor = 0
        self._delivered = 0  # micro-batches of the step that starts at the cursor
        self._iterator: object | None = None  # marks the iterator that counts
        self._loads = 0
        self._pin_memory = pin_memory and num_workers == 0 and torch.accelerator.is_available()
        self._pool = (
            WorkerPool(
                reader,
                lambda: self._plan(self._cursor),
                num_workers,
                prefetch_factor,
                persistent_workers,
                pin_memory,
                multiprocessing_context,
            )
            if num_workers
            else None
        )

    @property
    def cursor(self) -> int:
        """The number behind the last completed step. A step is complete when its last item is handed out."""
        return self._cursor

    @property
    def delivered_in_step(self) -> int:
        """Items handed out of the step that starts at the cursor; 0 between steps."""
        return self._delivered

    def state_dict(self) -> dict[str, Any]:
        """The state of the last completed step: plain, immutable values, the same on every rank."""
        return {CURSOR: self._cursor, ORDER: self._description}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Moves the cursor, forwards or backwards; items fetched ahead are dropped.

        Raises:
            StateError: It is no whole state, or it counts in another order of data.
        """
        cursor, saved = read_state(state_dict)
        present = json.loads(self._description)
        check_order(saved, present, cursor)
        self._cursor = cursor
        self._delivered = 0
        self._loads += 1
        places = ", ".join(
            f"epoch {epoch:,}, sample {position:,} of {size:,} of source {source['name']!r}"
            for source, (epoch, position, size) in zip(present["sources"], self._order.epochs_at(cursor), strict=True)
        )
        logger.info("data: resume at sample %s (%s)", f"{cursor:,}", places)
        before = saved.get("global_batch_size")
        if before != self.global_batch_size:
            logger.info(
                "data: the global batch was %s samples and is %s now; the order goes on from sample %s",
                f"{before:,}",
                f"{self.global_batch_size:,}",
                f"{cursor:,}",
            )

    def __iter__(self) -> Iterator[Item]:
        self._iterator = marker = object()
        self._delivered = 0
        return self._iterate(marker)

    def _iterate(self, marker: object) -> Iterator[Item]:
        while True:
            loads = self._loads
            items = iter(self._pool) if self._pool else map(self._read, self._plan(self._cursor))
            for item in items:
                self._delivered += 1
                if self._delivered == self.micro_batches_per_step:
                    self._cursor = mapping.next_cursor(self._cursor, self.global_batch_size, self._end)
                    self._delivered = 0
                yield item
                if self._iterator is not marker:
                    raise LoaderError(
                        "this iterator was replaced by a later iter(loader); only the last one counts, since the "
                        "loader has one cursor"
                    )
                if self._loads != loads:
                    break
            else:
                return
            del items  # stops its workers and drops what they fetched ahead

    def _read(self, rows: Sequence[Row]) -> Item:
        inputs, labels = self._reader.read(rows)
        if self._pin_memory:
            return {key: value.pin_memory() for key, value in inputs.items()}, labels.pin_memory()
        return inputs, labels

    def _plan(self, cursor: int) -> Iterator[Sequence[Row]]:
        """The rows of each micro-batch of this rank, from a cursor on."""
        rows = self.local_batch_size * self.micro_batches_per_step
        steps = max(1, _BLOCK_ROWS // rows)
        while self._end is None or cursor < self._end:
            block = []
            for _ in range(steps):
                if self._end is not None and cursor >= self._end:
                    break
                numbers = mapping.numbers_of_rank(
                    cursor, self.global_batch_size, self.local_batch_size, self.topology, self._end
                )
                # A rank that has no row in the last step repeats the step's first sample.
                first = numbers[0, 0] if numbers[0, 0] >= 0 else cursor
                block.append((numbers, np.where(numbers >= 0, numbers, first)))
                cursor = mapping.next_cursor(cursor, self.global_batch_size, self._end)
            padding = np.concatenate([numbers for numbers, _ in block]) < 0  # shape: (micro-batches, rows)
            place = self._order.locate(np.concatenate([filled for _, filled in block]).ravel())
            flat = [
                Row(*row)
                for row in zip(
                    place.source.tolist(),
                    place.shard.tolist(),
                    place.sample.tolist(),
                    padding.ravel().tolist(),
                    strict=True,
                )
            ]
            for start in range(0, len(flat), self.local_batch_size):
                yield flat[start : start + self.local_batch_size]


def build_loader(
    config: DataConfig,
    tokenizer: str | Path,
    *,
    seq_len: int,
    global_batch_size: int,
    local_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    num_workers: int = 0,
    infinite: bool = True,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    multiprocessing_context: str | None = None,
    inputs: Sequence[Input] | None = None,
) -> Loader:
    """Builds the loader of one rank; tokenizes the sources first where that has not been done.

    Args:
        config: The data and its order.
        tokenizer: Folder with ``tokenizer.json`` and, for BOS and EOS, ``tokenizer_config.json``.
        seq_len: Tokens of a sample.
        global_batch_size: Samples of an optimizer step over all ranks, at least ``dp_size``.
        local_batch_size: Rows of a micro-batch.
        dp_rank: Rank in the batch mesh; TP, PP and CP peers have the same.
        dp_size: Size of the batch mesh.
        num_workers: Worker processes that read ahead; 0 reads in the calling process.
        infinite: Goes on with epoch after epoch; otherwise ends after one.
        prefetch_factor, persistent_workers, pin_memory, multiprocessing_context: As torch's DataLoader; the
            first two count only with workers.
        inputs: Read in place of ``config.sources``.

    Raises:
        ConfigError: A setting is out of range.
        InputError: A file, a record or the tokenizer cannot be used.
        MappingError: There are more ranks than samples in a global batch.
        StoreError: A store is damaged, or cannot be built here.
    """
    for name, value in (("seq_len", seq_len), ("global_batch_size", global_batch_size)):
        if value < 1:
            raise ConfigError(f"{name} = {value}: expected at least 1")
    if num_workers < 0:
        raise ConfigError(f"num_workers = {num_workers}: expected at least 0")
    topology = Topology(dp_rank, dp_size)
    mapping.check(global_batch_size, local_batch_size, topology)  # before hours of tokenizing
    if inputs is None:
        inputs = [FileInput(source) for source in config.sources]
    if len(inputs) != 1:
        raise ConfigError(
            f"data.sources: found {len(inputs)} sources, expected one; give one [[data.sources]] table whose path "
            "is a folder or a glob over all files"
        )
    encoder = TextTokenizer(tokenizer)
    patience = 0.0 if dp_rank == 0 else _PATIENCE
    stores = [open_or_build(source, encoder, config.cache_dir, config.shard_bytes, patience) for source in inputs]
    orders, described = [], []
    for source, store in zip(inputs, stores, strict=True):
        samples = num_samples(store.tokens_per_shard, seq_len)
        if not samples.sum():
            raise InputError(
                f"source {source.name!r}: {store.manifest.tokens:,} tokens in {store.manifest.documents:,} documents "
                f"({source.path}) give no sample; a sample needs two tokens in a row"
            )
        orders.append(SourceOrder(source.name, samples, config.seed, config.shuffle_shards))
        described.append(_describe_source(source, store, int(samples.sum())))
    order = GlobalOrder(orders)
    description = describe_order(
        {
            "packing": "concat",
            "seed": config.seed,
            "seq_len": seq_len,
            "shard_bytes": config.shard_bytes,
            "shuffle_shards": config.shuffle_shards,
            "sources": described,
            "tokenizer": encoder.identity,
        },
        global_batch_size,
    )
    return Loader(
        order,
        MicroBatchReader(stores, seq_len),
        description,
        global_batch_size=global_batch_size,
        local_batch_size=local_batch_size,
        topology=topology,
        end=None if infinite else order.end(epochs=1),
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=persistent_workers and num_workers > 0,
        pin_memory=pin_memory,
        multiprocessing_context=multiprocessing_context if num_workers else None,
    )


def _describe_source(source: Input, store: TokenStore, samples: int) -> dict[str, Any]:
    return {
        "data": store.manifest.data_fingerprint,
        "name": source.name,
        "recipe": store.folder.name.partition("-")[0],
        "samples": samples,
        "tokens": store.manifest.tokens,
    }
