"""Grain: rows or documents in ArrayRecord files, or rows of one mapped array, through its datasets.

``ElasticIterator`` is its way to go on with another number of processes: it batches and shards by itself. Documents
are packed by ``ConcatThenSplitIterDataset``; what it saves is the place of one process among so many. Rows that were
cut beforehand or packed have no labels, the trainer shifts; those of the array overlap by a token and have.
"""

import json
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
import torch
from array_record.python.array_record_module import ArrayRecordWriter

from benchmarks.peers.adapters import Batch, Batches, Documents, Peer, Run
from benchmarks.peers.adapters.text import Encoder, rows


class Setting(NamedTuple):
    """Attributes:
    source: ``array``, ``rows`` or ``documents``.
    threads: That read ahead; None is Grain's own number, 16.
    """

    source: str
    threads: int | None = None


class Adapter(Peer):
    title = "Grain"
    packages = ("grain", "array-record", "torch", "numpy")
    settings = {  # noqa: RUF012
        "array, no threads": Setting("array", 0),
        "ArrayRecord, no threads": Setting("rows", 0),
        "ArrayRecord, 16 threads": Setting("rows"),
        "packed documents": Setting("documents"),
    }
    text_settings = {"16 threads": Setting("text"), "no threads": Setting("text", 0)}  # noqa: RUF012
    notes = (
        "Grain reads rows of one array that is mapped into memory, or rows cut beforehand from ArrayRecord files "
        "(`group_size:1`, not compressed), with a global shuffle and `ElasticIterator`; or whole documents from "
        "ArrayRecord files, packed by `ConcatThenSplitIterDataset`. Its documentation asks for no threads "
        "(`num_threads=0`) where data are in memory; 16 are its default.",
        "Grain's `ElasticIterator` refuses a global batch that the number of processes does not divide. Each process "
        "drops its last batch if that is not whole, so at an epoch's end some may have one batch more than others. "
        "Without `ElasticIterator` a checkpoint is a file for each process. Its worker processes are spawned: each "
        "imports the program anew, PyTorch included.",
    )

    def write(self, documents: Documents, folder: Path, seq_len: int) -> None:
        folder.mkdir(parents=True)
        np.save(folder / "tokens.npy", documents.tokens)
        _write(documents, folder / "documents.array_record")
        _write_rows(documents, folder / "rows.array_record", seq_len)
        (folder / "dtype").write_text(documents.tokens.dtype.name)

    def write_text(self, texts: Sequence[Path], tokenizer: Path, folder: Path, seq_len: int, cores: int) -> None:
        """Rows, by a process for each core that writes its own file."""
        folder.mkdir(parents=True, exist_ok=True)
        parts = [list(texts[part::cores]) for part in range(cores) if texts[part::cores]]
        files = [folder / f"rows-{number:05d}-of-{len(parts):05d}.array_record" for number in range(len(parts))]
        work = [(part, tokenizer, file, seq_len) for part, file in zip(parts, files, strict=True)]
        with multiprocessing.get_context("fork").Pool(len(parts)) as pool:
            pool.starmap(_write_part, work)

    def open(self, folder: Path, run: Run, checkpoint: bytes | None = None) -> Batches:
        dtype = np.dtype((folder / "dtype").read_text())
        if run.extra.source == "array":
            array = Rows(folder / "tokens.npy", run.seq_len)
            return ElasticBatches(grain.MapDataset.source(array), run, checkpoint)
        source = grain.sources.ArrayRecordDataSource(str(folder / f"{run.extra.source}.array_record"))
        records = grain.MapDataset.source(source).map(lambda record: np.frombuffer(record, dtype))
        if run.extra.source == "documents":
            return PackedBatches(records, run, checkpoint)
        return ElasticBatches(records, run, checkpoint)

    def open_text(
        self, texts: Sequence[Path], tokenizer: Path, folder: Path, run: Run, checkpoint: bytes | None = None
    ) -> Batches:
        """Tokenizes and packs while it delivers; lines are held in memory."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are the parallelism
        encoder = Encoder(tokenizer)
        lines = [line for path in texts for line in path.read_bytes().splitlines()]
        documents = grain.MapDataset.source(lines).map(
            lambda line: np.array(encoder.encode(json.loads(line)["text"]), encoder.dtype)
        )
        return PackedBatches(documents, run, checkpoint)

    def checkpoint(self, states: Sequence[Any]) -> bytes:
        """The text of its files: one for each process, or one in all from ``ElasticIterator``."""
        if "global_next_index" in states[0]:
            states = states[:1]
        files = {
            f"process_{rank}-of-{len(states)}.json": json.dumps(state, indent=4) for rank, state in enumerate(states)
        }
        return json.dumps(files).encode()


class ElasticBatches(Batches):
    def __init__(self, samples: Any, run: Run, checkpoint: bytes | None) -> None:
        workers = grain.MultiprocessingOptions(num_workers=run.workers) if run.workers else None
        self._items: Any = grain.experimental.ElasticIterator(
            samples.seed(run.seed).shuffle(),
            run.global_batch or run.ranks * run.batch_rows,
            grain.sharding.ShardOptions(shard_index=run.rank, shard_count=run.ranks),
            read_options=_read_options(run),
            multiprocessing_options=workers,
        ).__iter__()
        self._seq_len = run.seq_len
        if checkpoint is not None:
            self._items.set_state(json.loads(json.loads(checkpoint)["process_0-of-1.json"]))

    def __next__(self) -> Batch:
        found = torch.from_numpy(next(self._items).astype(np.int64))
        return Batch(found) if found.shape[1] == self._seq_len else Batch(found[:, :-1], found[:, 1:])

    def state(self) -> Any:
        return self._items.get_state()

    def close(self) -> None:
        self._items.close()


class PackedBatches(Batches):
    """Documents shuffled, those of this process packed."""

    def __init__(self, documents: Any, run: Run, checkpoint: bytes | None) -> None:
        mine = documents.seed(run.seed).shuffle()[run.rank :: run.ranks]
        dataset = mine.map(lambda ids: {"tokens": ids}).to_iter_dataset(_read_options(run))
        packed = grain.experimental.ConcatThenSplitIterDataset(dataset, length_struct={"tokens": run.seq_len})
        packed = packed.map(lambda row: row["tokens"]).batch(run.batch_rows)
        if run.workers:
            packed = packed.mp_prefetch(grain.MultiprocessingOptions(num_workers=run.workers))
        self._items: Any = iter(packed)
        if checkpoint is not None:
            name = f"process_{run.rank}-of-{run.ranks}.json"
            files = json.loads(checkpoint)
            if name not in files:
                raise ValueError(f"File {name} does not exist.")
            self._items.set_state(json.loads(files[name]))

    def __next__(self) -> Batch:
        return Batch(torch.from_numpy(next(self._items).astype(np.int64)))

    def state(self) -> Any:
        return self._items.get_state()

    def close(self) -> None:
        self._items.close()


class Rows:
    """A source of Grain: rows of an array of tokens, each with the token behind it."""

    def __init__(self, path: Path, seq_len: int) -> None:
        self._path = path
        self._seq_len = seq_len
        self._tokens = np.asarray(np.load(path, mmap_mode="r"))  # a plain array is sliced faster

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, number: int) -> np.ndarray:
        start = number * self._seq_len
        return self._tokens[start : start + self._seq_len + 1]

    def __reduce__(self) -> Any:
        return Rows, (self._path, self._seq_len)  # its worker processes map the array anew


def _read_options(run: Run) -> grain.ReadOptions:
    if run.extra.threads is None:
        return grain.ReadOptions()
    return grain.ReadOptions(num_threads=run.extra.threads)


def _write(records: Iterable[np.ndarray], path: Path) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for record in records:
        writer.write(record.tobytes())
    writer.close()


def _write_rows(documents: Iterable[np.ndarray], path: Path, seq_len: int) -> None:
    _write(rows(documents, seq_len), path)


def _write_part(texts: Sequence[Path], tokenizer: Path, path: Path, seq_len: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core
    encoder = Encoder(tokenizer)
    _write_rows((ids for text in texts for ids in encoder.file(text)), path, seq_len)
