"""Megatron Core: an indexed dataset of documents, and ``GPTDataset`` on it.

The samplers of Megatron-LM's training loop are not part of the package; ``GlobalBatchSampler`` does what its default
one does: batches in order of the dataset's own shuffle, from ``consumed_samples`` on. That number is what a checkpoint
of it keeps of the data.
"""

import json
import multiprocessing
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler

from benchmarks.peers.adapters import Batch, Batches, Documents, Peer, Run
from benchmarks.peers.adapters.text import Encoder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Transformer Engine and Apex, which nothing here uses
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator


class Adapter(Peer):
    title = "Megatron Core's GPTDataset"
    packages = ("megatron-core", "torch", "numpy")
    settings = {"mmap": {}, "file pointers": {"mmap_bin_files": False}}  # noqa: RUF012
    notes = (
        "Megatron Core: an epoch (`num_samples=None`), attention masks left to the kernel "
        "(`create_attention_mask=False`); each sample also carries its loss mask and positions. Its sampler belongs to "
        "Megatron-LM, which is not on PyPI; the adapter has one that does the same. The newest release needs Python "
        "3.12; with an older one the tables have 0.16.1.",
        "Megatron Core refuses a global batch that micro-batch times ranks does not divide.",
    )

    def write(self, documents: Documents, folder: Path, seq_len: int) -> None:
        folder.mkdir(parents=True)
        _write(documents, folder, documents.vocabulary)

    def write_text(self, texts: Sequence[Path], tokenizer: Path, folder: Path, seq_len: int, cores: int) -> None:
        """Processes that tokenize lines, one that writes: as Megatron-LM's script does it."""
        folder.mkdir(parents=True, exist_ok=True)
        with multiprocessing.get_context("fork").Pool(cores, _start_encoder, (tokenizer,)) as pool:
            lines = (line for path in texts for line in path.open("rb"))
            _write(pool.imap(_encode_line, lines, 32), folder, Encoder(tokenizer).vocabulary)

    def open(self, folder: Path, run: Run, checkpoint: bytes | None = None) -> Batches:
        return MegatronBatches(folder, run, checkpoint)

    def checkpoint(self, states: Sequence[Any]) -> bytes:
        return json.dumps({"consumed_train_samples": states[0]}).encode()


class MegatronBatches(Batches):
    def __init__(self, folder: Path, run: Run, checkpoint: bytes | None) -> None:
        self._global_batch = run.global_batch or run.ranks * run.batch_rows
        self._consumed = json.loads(checkpoint)["consumed_train_samples"] if checkpoint is not None else 0
        ConstantNumMicroBatchesCalculator(self._global_batch, run.batch_rows, run.ranks, False, run.rank)
        config = GPTDatasetConfig(
            random_seed=run.seed,
            sequence_length=run.seq_len,
            blend=([str(folder / "text")], None),
            split="1,0,0",
            path_to_cache=str(folder / "cache"),
            tokenizer=_Tokenizer(json.loads((folder / "vocabulary.json").read_text())),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            **(run.extra or {}),
        )
        dataset = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()[0]
        sampler = GlobalBatchSampler(len(dataset), self._consumed, run.batch_rows, run.rank, run.ranks)
        self._items: Any = iter(DataLoader(dataset, batch_sampler=sampler, num_workers=run.workers))

    def __next__(self) -> Batch:
        batch = next(self._items)
        self._consumed += self._global_batch
        return Batch(batch["tokens"], batch["labels"])

    def state(self) -> Any:
        return self._consumed

    def close(self) -> None:
        self._items = None  # ends its workers


class GlobalBatchSampler(Sampler[list[int]]):
    """The samples of one rank: of each run of ``rows * ranks`` numbers its part; the last ones, too few, are left."""

    def __init__(self, samples: int, consumed: int, rows: int, rank: int, ranks: int) -> None:
        self._steps = range(consumed, samples - rows * ranks + 1, rows * ranks)
        self._mine = range(rank * rows, (rank + 1) * rows)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[list[int]]:
        for start in self._steps:
            yield [start + place for place in self._mine]


class _Tokenizer(SimpleNamespace):
    """What the dataset asks a tokenizer."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size=vocab_size, eod=vocab_size, unique_identifiers={"vocab_size": vocab_size})


_encoder: Encoder | None = None


def _start_encoder(tokenizer: Path) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core
    _encoder = Encoder(tokenizer)


def _encode_line(line: bytes) -> np.ndarray:
    assert _encoder is not None
    return np.array(_encoder.encode(json.loads(line)["text"]), _encoder.dtype)


def _write(documents: Iterable[np.ndarray], folder: Path, vocabulary: int) -> None:
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=DType.optimal_dtype(vocabulary))
    for ids in documents:
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(folder / "text.idx"))
    (folder / "vocabulary.json").write_text(json.dumps(vocabulary))
