"""All ranks of a run, step by step: side by side in this process, or each in a fork of it."""

import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.adapters import IGNORE, Batch, Batches, Peer, Run

_ANSWER_SECONDS = 120.0
_END_SECONDS = 10.0


class Ranks:
    """Iterates over steps, each the inputs and labels of all ranks, padding left out: int64 (rows, seq_len).

    Ends when no rank has a batch.

    Raises:
        RuntimeError: A rank in a process of its own failed, or did not answer; the message is its error.
    """

    def __init__(self, peer: Peer, folder: Path, run: Run, checkpoint: bytes | None = None) -> None:
        self._opened = (peer, folder, run, checkpoint)
        self._ranks: list[_Here | _Forked] = []

    def __enter__(self) -> "Ranks":
        peer, folder, run, checkpoint = self._opened
        kind = _Forked if peer.forks_ranks else _Here
        port = _free_port()
        try:
            for rank in range(run.ranks):
                self._ranks.append(kind(peer, folder, replace(run, rank=rank), checkpoint, port))
            for opened in self._ranks:
                opened.answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for rank in self._ranks:
            rank.ask("end")
        for rank in self._ranks:
            rank.close()

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while parts := [part for part in self._ask("rows") if part is not None]:
            inputs, labels = zip(*parts, strict=True)
            yield np.concatenate(inputs), np.concatenate(labels)

    def states(self) -> list[Any]:
        """The state of each rank."""
        return self._ask("state")

    def _ask(self, question: str) -> list[Any]:
        for rank in self._ranks:
            rank.ask(question)
        return [rank.answer() for rank in self._ranks]


class _Here:
    def __init__(self, peer: Peer, folder: Path, run: Run, checkpoint: bytes | None, port: int) -> None:
        self._batches = peer.open(folder, run, checkpoint)
        self._question = ""

    def ask(self, question: str) -> None:
        self._question = question

    def answer(self) -> Any:
        return _answer(self._batches, self._question)

    def close(self) -> None:
        self._batches.close()


class _Forked:
    def __init__(self, peer: Peer, folder: Path, run: Run, checkpoint: bytes | None, port: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(theirs, peer, folder, run, checkpoint, port))
        self._process.start()
        theirs.close()

    def ask(self, question: str) -> None:
        with contextlib.suppress(OSError):  # the answer says that it ended
            self._pipe.send(question)

    def answer(self) -> Any:
        if not self._pipe.poll(_ANSWER_SECONDS):
            raise RuntimeError(f"a rank gave no answer for {_ANSWER_SECONDS:.0f} s")
        try:
            succeeded, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError("a rank's process ended") from None
        if not succeeded:
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, peer: Peer, folder: Path, run: Run, checkpoint: bytes | None, port: int) -> None:
    os.environ.update(RANK=str(run.rank), WORLD_SIZE=str(run.ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    batches = None
    question = ""
    try:
        while question != "end":
            try:
                if batches is None:
                    batches = peer.open(folder, run, checkpoint)
                pipe.send((True, _answer(batches, question)))
            except Exception as error:
                traceback.print_exc()
                pipe.send((False, f"{type(error).__name__}: {error}"))
                return
            question = pipe.recv()
    finally:
        if batches is not None:
            batches.close()


def _answer(batches: Batches, question: str) -> Any:
    if question == "rows":
        batch = next(batches, None)
        return None if batch is None else _labelled_rows(batch)
    return batches.state() if question == "state" else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _labelled_rows(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of the rows that have a label, int64 (rows, seq_len); the rest is padding."""
    inputs = batch.inputs.numpy()
    if batch.labels is None:  # the trainer shifts
        labels = np.full_like(inputs, IGNORE)
        labels[:, :-1] = inputs[:, 1:]
    else:
        labels = batch.labels.numpy()
    counts = (labels != IGNORE).any(axis=1)
    return inputs[counts], labels[counts]
