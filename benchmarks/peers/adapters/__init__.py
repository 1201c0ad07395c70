"""What every loader under comparison is asked for: one file here each, with a class ``Adapter(Peer)``.

A file imports its own package only inside its environment, where ``worker.py`` runs it. All peers get the same work:
rows of ``Run.seq_len`` tokens, ``Run.batch_rows`` of them a batch, as int64 tensors, one epoch. What a peer has no
counterpart for raises ``Unsupported``; the table shows the reason.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["NAMES", "Batch", "Batches", "Documents", "Peer", "Run", "Unsupported", "load_adapter"]

# In the order of the tables' rows.
NAMES = ("limit", "ours", "stock", "zephon", "streaming", "litdata", "megatron", "grain")

IGNORE = -100  # a label that does not count


class Unsupported(Exception):
    """The peer has no counterpart; the message says what is missing."""


class Batch(NamedTuple):
    """A batch: int64 tensors of shape (rows, seq_len).

    A peer that gives (rows, seq_len + 1) has ``inputs = x[:, :-1]`` and ``labels = x[:, 1:]``; one that gives
    (rows, seq_len) and leaves shifting to the trainer has no labels. A row of which no label counts (all are -100) is
    padding and is not counted as delivered; so is the input id 0 in the corpus of identities.
    """

    inputs: Any
    labels: Any = None


class Documents:
    """Documents in a folder, as text and as tokens.

    Attributes:
        folder: Where they are.
        tokens: Of all documents one after the other. For speed uint16, from real text, with BOS and EOS. For what is
            checked token by token int32 and all different, 1, 2, 3, and so on: the corpus of identities.
        lengths: int64, tokens of each document.
        texts: Files of JSON lines, {"text": ...}. An identity's text is its number; documents there have no ends.
        tokenizer: Folder with ``tokenizer.json`` and ``tokenizer_config.json`` that gives these tokens.
        vocabulary: All ids are below this.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.texts = sorted((folder / "jsonl").glob("*.jsonl"))
        self.tokenizer = folder / "tokenizer"
        self.tokens: np.ndarray = np.load(folder / "tokens.npy", mmap_mode="r")
        self.lengths: np.ndarray = np.load(folder / "lengths.npy")
        self.vocabulary: int = 65_536 if self.tokens.dtype.itemsize == 2 else int(self.tokens[-1]) + 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[np.ndarray]:
        end = 0
        for length in self.lengths.tolist():
            end += length
            yield self.tokens[end - length : end]


@dataclass(frozen=True)
class Run:
    """One rank of a run. Each ``next`` of the iterator is one step of this rank: no gradient accumulation.

    Attributes:
        rank: Data parallel rank.
        ranks: Data parallel size.
        workers: Worker processes; 0 reads in the calling process.
        batch_rows: Rows of a batch on this rank. Where ranks do not divide the global batch, rounded up.
        seq_len: Tokens of a row.
        global_batch: Rows of a step over all ranks, for peers that can be told; None is ``ranks * batch_rows``.
        seed: Of the order; each peer shuffles as it recommends for training.
        extra: Arguments of the setting, one of ``Peer.settings``' values.
    """

    rank: int = 0
    ranks: int = 1
    workers: int = 0
    batch_rows: int = 8
    seq_len: int = 2048
    global_batch: int | None = None
    seed: int = 0
    extra: Any = None


class Batches(ABC):
    """An iterator over one epoch; ``StopIteration`` at its end."""

    def __iter__(self) -> "Batches":
        return self

    @abstractmethod
    def __next__(self) -> Batch: ...

    def state(self) -> Any:
        """What the peer's documentation says this rank saves, as it stands behind the last batch handed out."""
        raise Unsupported("has no state")

    def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """Ends worker processes and threads, frees shared memory."""


class Peer(ABC):
    """One loader.

    Attributes:
        title: In the tables.
        packages: Distributions whose versions are shown.
        settings: Variants to try, by name, the recommended one first; their values come back as ``Run.extra``.
        reads_tokens: Whether ``open`` delivers tokens that were stored, so that table a has a row; otherwise ``write``
            keeps text.
        text_settings: The same for ``open_text``.
        forks_ranks: Whether several ranks need a process each. Then ``open`` is called in a fork of the worker, with
            RANK, WORLD_SIZE, LOCAL_RANK (0) and LOCAL_WORLD_SIZE (1) set, so each rank is a machine of its own;
            MASTER_ADDR and MASTER_PORT are set too. Otherwise all ranks are opened in one process, side by side.
        notes: Sentences under the tables: what the peer gives instead, what was tried and was worse, and why.
    """

    title: str
    packages: tuple[str, ...] = ()
    settings: dict[str, Any] = {"default": None}  # noqa: RUF012
    reads_tokens = True
    text_settings: dict[str, Any] = {"default": None}  # noqa: RUF012
    forks_ranks = False
    notes: tuple[str, ...] = ()

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in self.packages}

    def write(self, documents: Documents, folder: Path, seq_len: int) -> None:
        """Writes tokenized documents in the peer's own format into a new folder. Never timed.

        Args:
            seq_len: Of the runs that will read it, for formats that are cut into rows beforehand.
        """
        raise Unsupported("reads no tokenized data")

    def write_text(self, texts: Sequence[Path], tokenizer: Path, folder: Path, seq_len: int, cores: int) -> None:
        """Tokenizes files of JSON lines ({"text": ...}) into the peer's own format, by its own means. Timed: table c.

        Args:
            tokenizer: Folder with ``tokenizer.json`` and ``tokenizer_config.json``. Where the latter names them, each
                document gets BOS (``<|bos|>``) in front and EOS (``<|eos|>``) behind, however the peer does that.
            seq_len: As in ``write``.
            cores: How many this process may run on; use as many processes or threads as is best.
        """
        raise Unsupported("has none")

    @abstractmethod
    def open(self, folder: Path, run: Run, checkpoint: bytes | None = None) -> Batches:
        """Batches from what ``write`` wrote, from the start or from where a checkpoint stands.

        Args:
            checkpoint: What ``checkpoint`` gave, of a run that may have had another number of ranks. A peer that
                refuses it raises whatever it raises.
        """

    def open_text(
        self, texts: Sequence[Path], tokenizer: Path, folder: Path, run: Run, checkpoint: bytes | None = None
    ) -> Batches:
        """Batches from text: table b. Timed from here on; ``folder`` is new and may be written to.

        Text, BOS and EOS as in ``write_text``. Here it converts all of it on all cores, then delivers.
        """
        self.write_text(texts, tokenizer, folder, run.seq_len, len(os.sched_getaffinity(0)))
        return self.open(folder, run, checkpoint)

    def checkpoint(self, states: Sequence[Any]) -> bytes:
        """The bytes that a checkpoint keeps of the data, given the ``state()`` of every rank, by rank.

        As the peer documents it: of rank 0 alone where one is enough, of all ranks where each has its own.
        """
        raise Unsupported("has no state")


def load_adapter(name: str) -> Peer:
    return import_module(f"{__name__}.{name}").Adapter()
