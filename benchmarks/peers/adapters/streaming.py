"""mosaicml-streaming: MDS shards of rows that were cut beforehand, its dataset and its loader.

The rows are made as MosaicML's own recipe for pretraining makes them: documents one after the other, cut, the rest
dropped, each row an array of the smallest type. The model shifts, so there are no labels.
"""

import atexit
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.adapters import Batch, Batches, Documents, Peer, Run
from benchmarks.peers.adapters.text import Encoder, rows

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    # streaming imports its data sets of images whether they are wanted or not, and PyPI's torchvision does not load
    # beside a torch without CUDA.
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = module_from_spec(ModuleSpec(name, None))
    sys.modules["torchvision.datasets"].VisionDataset = object
    sys.modules["torchvision.transforms.functional"].to_tensor = None
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory, merge_index

warnings.filterwarnings("ignore", module="streaming")


class Adapter(Peer):
    title = "mosaicml-streaming"
    packages = ("mosaicml-streaming", "torch", "numpy")
    settings = {  # noqa: RUF012
        "defaults": {},
        "predownload 4096": {"predownload": 4096},
        "py1s, 64 canonical nodes": {"shuffle_algo": "py1s", "num_canonical_nodes": 64, "predownload": 4096},
    }
    forks_ranks = True
    notes = (
        "mosaicml-streaming: `shuffle=True` with its default `py1e`, `batch_size` as it demands, all ranks on one "
        "machine. Rows are cut when the shards are written, without the token behind the last one. Its threads sleep "
        "7 ms (`TICK`) whenever they are `predownload` samples ahead, 8 batches by default; so a larger one was tried.",
        "mosaicml-streaming: a global batch that the ranks do not divide cannot be told to it; with 5 and 7 ranks "
        "each rank takes as many rows as are needed to reach 24, so a step is larger. Where the ranks do not "
        "divide the rows of an epoch, the last step has some rows twice.",
    )

    def __init__(self) -> None:
        # Each data set leaves two lock files there, and the next one looks at all of them.
        tempfile.tempdir = tempfile.mkdtemp(prefix="streaming-")
        atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
        clean_stale_shared_memory()

    def write(self, documents: Documents, folder: Path, seq_len: int) -> None:
        _write(rows(documents, seq_len), folder, seq_len, documents.tokens.dtype)

    def write_text(self, texts: Sequence[Path], tokenizer: Path, folder: Path, seq_len: int, cores: int) -> None:
        """A process for each core, each with its own files and folder, then one index: its guide's way."""
        parts = [list(texts[part::cores]) for part in range(cores) if texts[part::cores]]
        work = [(part, tokenizer, folder / f"{number:05d}", seq_len) for number, part in enumerate(parts)]
        with multiprocessing.get_context("fork").Pool(len(parts)) as pool:
            pool.starmap(_write_part, work)
        merge_index(str(folder))

    def open(self, folder: Path, run: Run, checkpoint: bytes | None = None) -> Batches:
        # All ranks are one machine.
        os.environ.update(LOCAL_RANK=str(run.rank), LOCAL_WORLD_SIZE=str(run.ranks))
        return StreamingBatches(folder, run, checkpoint)

    def checkpoint(self, states: Sequence[Any]) -> bytes:
        return json.dumps(states[0]).encode()  # "called on rank zero"


class StreamingBatches(Batches):
    def __init__(self, folder: Path, run: Run, checkpoint: bytes | None) -> None:
        self._dataset = StreamingDataset(
            local=str(folder), batch_size=run.batch_rows, shuffle=True, shuffle_seed=run.seed, **(run.extra or {})
        )
        self._loader = StreamingDataLoader(
            self._dataset, batch_size=run.batch_rows, num_workers=run.workers, collate_fn=_collate
        )
        if checkpoint is not None:
            self._loader.load_state_dict(json.loads(checkpoint))
        self._items: Any = iter(self._loader)

    def __next__(self) -> Batch:
        return Batch(next(self._items))

    def state(self) -> Any:
        return self._loader.state_dict()

    def close(self) -> None:
        """Ends the threads, which otherwise run on when an epoch is left before its end."""
        if hasattr(self._dataset, "_iterator"):
            self._dataset._iterator.non_blocking_exit()
        self._items = None
        del self._loader, self._dataset


def _collate(samples: Sequence[dict[str, np.ndarray]]) -> torch.Tensor:
    batch = np.empty((len(samples), len(samples[0]["tokens"])), np.int64)
    for row, sample in zip(batch, samples, strict=True):
        row[:] = sample["tokens"]
    return torch.from_numpy(batch)


def _write(found: Iterable[np.ndarray], folder: Path, seq_len: int, dtype: np.dtype) -> None:
    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:{dtype.name}:{seq_len}"}) as writer:
        for row in found:
            writer.write({"tokens": row})


def _write_part(texts: Sequence[Path], tokenizer: Path, folder: Path, seq_len: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core
    encoder = Encoder(tokenizer)
    _write(rows((ids for path in texts for ids in encoder.file(path)), seq_len), folder, seq_len, encoder.dtype)
