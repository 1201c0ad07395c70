"""The PyPI package `zephon`: tokenizes and packs while it trains, with checkpoints for other numbers of ranks."""

import json
import os
import pickle
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import vortex
import zephon
from transformers import AutoTokenizer
from zephon.work import MixtureSpec, StaticMixtureWorkSource

from benchmarks.peers.adapters import Batch, Batches, Documents, Peer, Run

_SAMPLES_PER_FILE = 2000
_CHUNK = 16_384  # its default: samples that one lane gets at a time
_CHUNKS_PER_LANE = 64  # so many at least; with few of them some lanes run out long before others

# The engine says so at each start where ranks do not divide the lanes.
warnings.filterwarnings("ignore", message=r"\[zephon\]", category=RuntimeWarning)


class Setting(NamedTuple):
    """How it is run.

    Attributes:
        rows: Whether the samples are rows that were cut beforehand; else documents, packed as they come.
        options: Of the pipeline.
        shuffle: Of the order, beside that of the files.
    """

    rows: bool
    options: dict[str, Any]
    shuffle: dict[str, Any]


_WITHIN = {"shuffle_within_shard": True}
_ACROSS = {"shuffle_within_shard": True, "shuffle_block_size": "auto"}


class Adapter(Peer):
    title = "zephon"
    packages = ("zephon", "vortex-data", "transformers", "torch")
    settings = {  # noqa: RUF012
        "documents packed, shuffled within files": Setting(False, {}, _WITHIN),
        "rows, shuffled within files": Setting(True, {"runner": "inline"}, _WITHIN),
        "rows, shuffled within files, threads": Setting(True, {}, _WITHIN),
        "rows, shuffled across files": Setting(True, {"runner": "inline"}, _ACROSS),
    }
    text_settings = {"JSON lines": False, "Vortex first": True}  # noqa: RUF012
    forks_ranks = True
    notes = (
        "zephon: Vortex files of uint16, which were faster than Parquet in every setting tried. Documents are packed "
        "by `pack_flat` with `wrap`; rows were cut beforehand.",
        "zephon: with several lanes its default chunk of 16,384 samples is too large for data as small as this: there "
        "are 64 chunks a lane, so that lanes run out at about the same step. Packed lanes still do not hold the same "
        "number of rows; where some have run out, near the epoch's end, steps are made up otherwise at other ranks.",
        "zephon: in table h it has as many lanes as there are rows in a global batch, the most that can be chosen. "
        "Where ranks do not divide the lanes, each takes as many rows as it has lanes; a trainer must allow for it.",
    )

    def write(self, documents: Documents, folder: Path, seq_len: int) -> None:
        width = seq_len + 1
        rows = len(documents.tokens) // width
        cut = pa.FixedSizeListArray.from_arrays(pa.array(np.asarray(documents.tokens[: rows * width])), width)
        _write(pa.table({"input_ids": cut}), folder / "rows")
        ids = pa.array(
            [np.asarray(tokens) for tokens in documents], pa.list_(pa.from_numpy_dtype(documents.tokens.dtype))
        )
        _write(pa.table({"input_ids": ids}), folder / "documents")

    def open(self, folder: Path, run: Run, checkpoint: bytes | None = None) -> Batches:
        setting: Setting = run.extra
        pipeline = _pipeline(folder / ("rows" if setting.rows else "documents"), run, setting.shuffle)
        if not setting.rows:
            pipeline = _packed(pipeline, run)
        options = {} if run.workers else dict(setting.options)
        if run.ranks > 1:
            options["aggregate_dir"] = str(folder / f"aggregate-{os.environ['MASTER_PORT']}")
        pipeline = pipeline.batch(_rows_at_once(run)).options(**options)
        return ZephonBatches(pipeline, run, checkpoint)

    def open_text(
        self, texts: Sequence[Path], tokenizer: Path, folder: Path, run: Run, checkpoint: bytes | None = None
    ) -> Batches:
        data = texts[0].parent
        if run.extra:
            data = folder / "texts"
            lines = (json.loads(line)["text"] for path in texts for line in path.read_bytes().splitlines())
            _write(pa.table({"text": pa.array(lines, pa.large_string())}), data)
        pipeline = _pipeline(data, run, _WITHIN).decode_text(normalize_newlines=False)
        pipeline = pipeline.tokenize(
            AutoTokenizer.from_pretrained(str(tokenizer)), field="text", add_attention_mask=False
        )
        return ZephonBatches(_packed(pipeline, run).batch(_rows_at_once(run)), run, checkpoint)

    def checkpoint(self, states: Sequence[Any]) -> bytes:
        return pickle.dumps(states[0])  # of all ranks, the same on each: they were merged through `aggregate_dir`


def _write(table: pa.Table, folder: Path) -> None:
    folder.mkdir(parents=True)
    for start in range(0, len(table), _SAMPLES_PER_FILE):
        part = table.slice(start, _SAMPLES_PER_FILE).combine_chunks()
        vortex.io.write(vortex.array(part), str(folder / f"{start:09d}.vortex"))


def _lanes(run: Run) -> int:
    return run.global_batch or run.ranks


def _rows_at_once(run: Run) -> int:
    return 1 if run.global_batch else run.batch_rows


def _pipeline(data: Path, run: Run, shuffle: dict[str, Any]) -> zephon.Pipeline:
    dataset = zephon.Dataset.from_path("data", str(data))
    lanes = _lanes(run)
    source = StaticMixtureWorkSource(
        datasets=[dataset],
        mixture=MixtureSpec({"data": 1.0}),
        seed=run.seed,
        chunk_size=_CHUNK if lanes == 1 else min(_CHUNK, max(1, dataset.total() // (lanes * _CHUNKS_PER_LANE))),
        exhausted_policy="redistribute",  # one pass, the short end included; "stop" leaves that out
        **shuffle,
    )
    options: dict[str, Any] = {"world_size": run.ranks, "global_rank": run.rank, "canonical_replicas": lanes}
    if run.workers:
        options |= {"runner": "process", "max_workers": run.workers}
    return zephon.Pipeline(source).options(**options)


def _packed(pipeline: zephon.Pipeline, run: Run) -> zephon.Pipeline:
    return pipeline.pack_flat(run.seq_len + 1, algorithm="wrap", emit_positions=False)


class ZephonBatches(Batches):
    def __init__(self, pipeline: zephon.Pipeline, run: Run, checkpoint: bytes | None) -> None:
        self._pipeline = pipeline
        owned, more = divmod(_lanes(run), run.ranks)
        self._at_once = owned + (run.rank < more) if run.global_batch else 1
        if checkpoint is not None:
            pipeline.restore(pickle.loads(checkpoint))
        self._items = iter(pipeline)

    def __next__(self) -> Batch:
        parts = [_training(item) for item in islice(self._items, self._at_once)]
        if not parts:
            raise StopIteration
        inputs, labels = zip(*parts, strict=True)
        return parts[0] if len(parts) == 1 else Batch(torch.cat(inputs), torch.cat(labels))

    def state(self) -> Any:
        return self._pipeline.checkpoint()

    def close(self) -> None:
        self._items.close()


def _training(item: Any) -> Batch:
    found = item.to_training(return_labels=True, exclude_fields=("ids", "texts"))
    return Batch(found["input_ids"], found["labels"])
