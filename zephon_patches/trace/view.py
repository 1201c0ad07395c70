"""The data of a training config, opened for looking: the order and what the stores say, without torch, read only.

What a run would train on follows from the config and the stores alone, so any sample can be looked up on any machine
that has them, at number 0 or 10^15 alike. Nothing is built or written: a store that is not there is an error that has
the command which makes it.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from zephon_patches.errors import InputError
from zephon_patches.loader.assemble import describe_data, end_of, make_order, mixtures_of
from zephon_patches.loader.state import describe_order
from zephon_patches.mapping import Skips
from zephon_patches.prepare.finding import find_store, is_as_read, tokenizer_for
from zephon_patches.prepare.inputs import make_input
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.samples.sequence import Sampling
from zephon_patches.store.catalog import Catalog, DocumentPlace
from zephon_patches.trace.layout import layout_of
from zephon_patches.training_config import TrainingConfig

__all__ = ["DataView", "Occurrence", "Part", "Sample"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """The part of a document that is in a sample."""

    file: str
    """Name as in the store's manifest; empty for a registered data set"""
    record: int
    """In the file, from 0: the line less 1, the row"""
    document: int
    """In the shard"""
    start: int
    """First token of the part, counted in the document, BOS and EOS included"""
    stop: int
    tokens: int
    """Of the whole document"""


@dataclass(frozen=True)
class Sample:
    """One sample of the global order."""

    n: int
    skipped: bool
    source: str
    epoch: int
    shard: str
    sample: int
    """In the shard"""
    parts: list[Part]


@dataclass(frozen=True)
class Occurrence:
    """A sample of one epoch that holds a part of a document."""

    n: int | None
    """None where it has none: a stage turned its source off before"""
    skipped: bool
    source: str
    epoch: int
    shard: str
    sample: int
    parts: list[Part]


class DataView:
    """The order and the documents of a config.

    Args:
        config: What is opened.

    Attributes:
        order: The global order.
        skips: Numbers that are left out.
        end: Number at which the data ends; None if it does not.
        names: Of the sources, in the order's numbering.
        stores: One for each source.

    Raises:
        ConfigError, InputError, StoreError: A setting, the tokenizer or a store cannot be used, or is not there.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        data = config.data
        self.tokenizer = TextTokenizer(config.tokenizer, data.tokenizer_engine)
        inputs = sorted((make_input(source) for source in data.sources_in_use), key=lambda source: source.name)
        self.names = [source.name for source in inputs]
        self.stores: list[Catalog] = []
        for source in inputs:
            ends = tokenizer_for(source, data, self.tokenizer)
            folder = find_store(source, ends, data.cache_dir, data.shard_bytes)
            store = Catalog(folder, None if source.in_place is None else source.in_place.root)
            if not is_as_read(source, folder, store.files):
                logger.warning(
                    "source %r: its files have other times than when %s was built from them; a start of training "
                    "compares them, and here the store is taken as it is",
                    source.name,
                    folder,
                )
            self.stores.append(store)
        self._opened = [(source.name, source.path, store) for source, store in zip(inputs, self.stores, strict=True)]
        sampling = Sampling(data.packing, data.positions, data.mask_boundaries)
        self._layouts = [layout_of(store, config.seq_len, sampling) for store in self.stores]
        samples = [layout.samples_per_shard for layout in self._layouts]
        self.order, self._stages, self._samples = make_order(data, self._opened, samples, mixtures_of(data))
        self.skips = Skips(data.skip)
        self.end = end_of(self.order, data.epochs)

    @cached_property
    def description(self) -> str:
        """The ``order`` entry of a loader's state; its ``global_batch_size`` is 1 where the config has none."""
        content = describe_data(
            self.config.data,
            self._opened,
            self.config.seq_len,
            self._samples,
            self._stages,
            self.tokenizer.identity,
            [layout.plans.fingerprint for layout in self._layouts if layout.plans is not None],
        )
        if self.skips.intervals:
            content["skip"] = [list(interval) for interval in self.skips.intervals]
        return describe_order(content, max(self.config.global_batch_size, 1))

    def is_skipped(self, n: int) -> bool:
        return any(start <= n < stop for start, stop in self.skips.intervals)

    def samples(self, numbers: Sequence[int] | np.ndarray) -> list[Sample]:
        """What stands at numbers of the order, skipped ones too.

        Raises:
            StoreError: A shard's index or origins cannot be read.
        """
        numbers = np.asarray(numbers, dtype=np.int64)
        place = self.order.locate(numbers)
        return [
            Sample(
                n,
                self.is_skipped(n),
                self.names[source],
                epoch,
                self.stores[source].record(shard).name,
                sample,
                self.parts(source, shard, sample),
            )
            for n, source, epoch, shard, sample in zip(
                numbers.tolist(), *(array.tolist() for array in place), strict=True
            )
        ]

    def parts(self, source: int, shard: int, sample: int) -> list[Part]:
        """The documents of a sample, in its order."""
        store, parts = self.stores[source], []
        for start, stop in self._layouts[source].spans(shard, sample):
            parts += [self._part(store, place, start, stop) for place in store.documents(shard, start, stop)]
        return parts

    def _part(self, store: Catalog, place: DocumentPlace, start: int, stop: int) -> Part:
        file, record = store.origin(place.shard, place.document)
        first, last = max(start, place.start), min(stop, place.stop)
        return Part(file, record, place.document, first - place.start, last - place.start, place.stop - place.start)

    def text(self, sample: Sample, tokens: int) -> str:
        """The first tokens of a sample, decoded, special tokens included."""
        source = self.names.index(sample.source)
        place = self.order.locate(np.array([sample.n], dtype=np.int64))
        store, shard, left, ids = self.stores[source], int(place.shard[0]), tokens, []
        for start, stop in self._layouts[source].spans(shard, sample.sample):
            ids += store.tokens(shard, start, min(stop, start + left)).tolist()
            left = max(tokens - len(ids), 0)
        return self.tokenizer.decode(ids)

    def row(self, source: int, shard: int, sample: int) -> dict[str, np.ndarray]:
        """What the trainer gets of a sample, by name; int64, shape ``(seq_len,)`` each."""
        return self._layouts[source].row(shard, sample)

    # --- from a record to its numbers ---

    def find(self, file: str, record: int, source: str | None = None) -> list[tuple[int, DocumentPlace]]:
        """The documents of a record of an input file, each with the number of its source; none if it gave none.

        Args:
            file: Its name as in the manifest, or the end of a path to it.
            record: In the file, from 0.
            source: Where the name is in several sources.

        Raises:
            InputError: No source, or more than one, has such a file; or it has fewer records.
            StoreError: A store is damaged, or the file has fewer records.
        """
        found = [
            (number, index, entry["name"])
            for number, store in enumerate(self.stores)
            if source in (None, self.names[number])
            for index, entry in enumerate(store.files)
            if _is_end_of(entry["name"], file)
        ]
        exact = [entry for entry in found if entry[2] == file]
        found = exact if len(exact) == 1 else found
        if not found:
            raise InputError(
                f"{file}: no file of that name in {self._where(source)}; names are those of the manifests, such as "
                f"{self._example(source)}"
            )
        if len(found) > 1:
            listed = ", ".join(f"{name} of source {self.names[number]!r}" for number, _, name in found[:8])
            more = f" and {len(found) - 8:,} more" if len(found) > 8 else ""
            raise InputError(f"{file}: {listed}{more} have that name; give more of the path, or --source")
        number, index, _ = found[0]
        return [(number, place) for place in self.stores[number].find(index, record)]

    def occurrences(self, source: int, place: DocumentPlace, epochs: Sequence[int]) -> list[Occurrence]:
        """The samples that hold a document's tokens, in given epochs, by their numbers."""
        samples = self._layouts[source].samples(place.shard, place.start, place.stop)
        found = list(self._occurrences(source, place, samples, epochs))
        return sorted(found, key=lambda entry: (entry.n is None, entry.n, entry.epoch))

    def _occurrences(
        self, source: int, place: DocumentPlace, samples: Sequence[int], epochs: Sequence[int]
    ) -> Iterator[Occurrence]:
        name = self.stores[source].record(place.shard).name
        for sample in samples:
            parts = [p for p in self.parts(source, place.shard, sample) if p.document == place.document]
            for epoch in epochs:
                n = self.order.number(source, epoch, place.shard, sample)
                if n is not None and self.end is not None and n >= self.end:
                    n = None
                skipped = n is not None and self.is_skipped(n)
                yield Occurrence(n, skipped, self.names[source], epoch, name, sample, parts)

    def epoch_at(self, source: int, cursor: int) -> int:
        """The epoch in which a source is at a cursor."""
        return self.order.epochs_at(cursor)[source][0]

    def sources_at(self, cursor: int) -> list[dict[str, Any]]:
        """Where each source stands: epoch, the place in it, and its samples."""
        return [
            {"source": name, "epoch": epoch, "position": position, "samples": size}
            for name, (epoch, position, size) in zip(self.names, self.order.epochs_at(cursor), strict=True)
        ]

    def _where(self, source: str | None) -> str:
        return f"sources {', '.join(self.names)}" if source is None else f"source {source}"

    def _example(self, source: str | None) -> str:
        names = [
            store.files[0]["name"]
            for name, store in zip(self.names, self.stores, strict=True)
            if source in (None, name) and store.files
        ]
        return repr(names[0]) if names else "none: they have no files"


def _is_end_of(name: str, path: str) -> bool:
    """Whether one of two paths is the other's end, part by part."""
    a, b = name.split("/")[::-1], path.split("/")[::-1]
    length = min(len(a), len(b))
    return a[:length] == b[:length]
