"""Has the tables' measurements made by the workers, and keeps what they answered."""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import corpora
from benchmarks.peers.adapters import Documents
from benchmarks.peers.environments import InstallError, NoAnswer, Worker

Answer = dict[str, Any]

# Of the runs whose every token is checked.
SHORT_ROWS = 128
GLOBAL_BATCH = 24
SAVED_RANKS = 4
RESTORED_RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 24)
SAVED_STEP = 17
IDENTITIES = 43 * GLOBAL_BATCH * SHORT_ROWS - 1001  # no whole number of steps, rows or files
EPOCHS = ((1, 0), (1, 2), (4, 0))  # ranks and workers
FRACTIONS = (0.0, 0.5, 0.9)
WORKERS = (0, 2)
CHECKPOINT_RANKS = (1, 8)
_CHECKPOINT_STEP = 20
_SAMPLE_SECONDS = 0.02
_TASK_SECONDS = 600.0


class Bench:
    """The workers of all peers, the corpora, and what they wrote.

    Args:
        folder: Where all of it is.
        peers: Names of the loaders.
        rounds: Measurements of each figure.
        seconds: Of a measurement of table a.
        megabytes: Of real text.
        text_megabytes: Of it, for the tables that tokenize.
    """

    def __init__(
        self, folder: Path, peers: Sequence[str], rounds: int, seconds: float, megabytes: int, text_megabytes: int
    ) -> None:
        self.folder = folder
        self.peers = list(peers)
        self.rounds = rounds
        self.seconds = seconds
        self.megabytes = megabytes
        self.text_megabytes = text_megabytes
        self._workers = {name: Worker(name, folder) for name in peers}
        self._greetings: dict[str, Answer] = {}

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers.values():
            worker.close()

    def ask(self, name: str, do: str, **arguments: Any) -> Answer:
        """A worker's answer; what went wrong is one too: ``unsupported``, ``error`` or ``install``."""
        try:
            answer = self._workers[name].ask(do, _TASK_SECONDS, **arguments)
        except NoAnswer as error:
            answer = {"error": str(error)}
        except InstallError as error:
            answer = {"install": str(error)}
        return answer

    def greeting(self, name: str) -> Answer:
        """Title, versions and settings; without settings if it does not install or import."""
        if name not in self._greetings:
            self._greetings[name] = {"title": name, "settings": [], "text_settings": [], **self.ask(name, "hello")}
        return self._greetings[name]

    def problem_of(self, name: str) -> Answer | None:
        """Why a peer takes part in no table."""
        return self.greeting(name) if not self.greeting(name)["settings"] else None

    def corpus(self, name: str) -> Documents:
        if name == "identities":
            return corpora.identities(self.folder / "identities", IDENTITIES)
        real = corpora.real(self.folder / f"real-{self.megabytes}", self.megabytes)
        if name == "real":
            return real
        return corpora.part_of(real, self.folder / f"text-{self.text_megabytes}", self.text_megabytes)

    def written(self, name: str, corpus: str) -> str:
        """Folder with a corpus in the peer's format.

        Raises:
            Failed: It cannot write it.
        """
        documents = self.corpus(corpus)
        folder = self.folder / "formats" / f"{name}-{documents.folder.name}"
        folder.parent.mkdir(exist_ok=True)
        if folder.is_dir():
            return str(folder)
        seq_len = SHORT_ROWS if corpus == "identities" else 2048
        answer = self.ask(name, "write", documents=str(documents.folder), folder=str(folder), seq_len=seq_len)
        if answer:
            raise Failed(answer)
        self.restart(name)  # what writing left in memory is no part of the measurements
        return str(folder)

    def process_id(self, name: str) -> int:
        return self._workers[name].process_id

    def restart(self, name: str) -> None:
        self._workers[name].close()


class Failed(Exception):
    """A peer cannot take part in a table; its answer is the first argument."""


def prepare(bench: Bench) -> None:
    """Makes what the measurements need: environments, corpora, formats; says what fails."""
    bench.corpus("text")
    for name in bench.peers:
        problem = bench.problem_of(name)
        print(f"{name}: {problem or bench.greeting(name)['versions']}", file=sys.stderr)
        for corpus in ("real", "identities") if problem is None else ():
            try:
                bench.written(name, corpus)
            except Failed as error:
                print(f"{name}: {corpus}: {error.args[0]}", file=sys.stderr)
        bench.restart(name)


def deliver(bench: Bench) -> Answer:
    """Table a: setting by setting, the answers of the rounds."""
    measured: dict[str, Answer] = {}
    for name in _able(bench, measured):
        if not bench.greeting(name)["reads_tokens"]:
            measured[name] = {"unsupported": "reads text alone, see table b"}
            continue
        with _failing(measured, name):
            folder = bench.written(name, "real")
            for setting in bench.greeting(name)["settings"]:
                bench.ask(name, "deliver", folder=folder, setting=setting, seconds=bench.seconds / 8)  # warms up
                measured.setdefault(name, {})[setting] = (folder, setting)
    return _alternate(
        bench,
        measured,
        lambda name, cell: bench.ask(name, "deliver", folder=cell[0], setting=cell[1], seconds=bench.seconds),
    )


def from_text(bench: Bench) -> Answer:
    """Table b."""
    measured: dict[str, Answer] = {}
    documents = str(bench.corpus("text").folder)
    for name in _able(bench, measured, without=("limit",)):
        measured[name] = {setting: setting for setting in bench.greeting(name)["text_settings"]}
    folder = str(bench.folder / "scratch")
    return _alternate(
        bench,
        measured,
        lambda name, setting: bench.ask(name, "from_text", documents=documents, folder=folder, setting=setting),
    )


def convert(bench: Bench) -> Answer:
    """Table c: on one core, and on all."""
    measured: dict[str, Answer] = {}
    documents = str(bench.corpus("text").folder)
    all_cores = len(os.sched_getaffinity(0))
    for name in _able(bench, measured, without=("limit",)):
        measured[name] = {str(cores): cores for cores in sorted({1, all_cores})}
    folder = str(bench.folder / "scratch")
    return _alternate(
        bench,
        measured,
        lambda name, cores: bench.ask(name, "convert", documents=documents, folder=folder, cores=cores),
    )


def restore(bench: Bench) -> Answer:
    """Table d: at the start, and at fractions of an epoch of real tokens."""
    measured: dict[str, Answer] = {}
    tokens = len(bench.corpus("real").tokens)
    for name in _able(bench, measured, without=("limit",)):
        with _failing(measured, name):
            folder = bench.written(name, "real")
            for setting in bench.greeting(name)["settings"]:
                target = str(bench.folder / "formats" / f"{name}-{setting}-saved".replace(" ", "_"))
                places = [fraction for fraction in FRACTIONS if fraction]
                saving: Answer = {"folder": folder, "setting": setting, "tokens": tokens, "target": target}
                if answer := bench.ask(name, "save_on_the_way", fractions=places, **saving):
                    raise Failed(answer)
                cells = {f"{setting}|{fraction}": (folder, setting, target, fraction) for fraction in FRACTIONS}
                measured[name] = {**measured.get(name, {}), **cells}
    names = ("folder", "setting", "target", "fraction")
    return _alternate(
        bench, measured, lambda name, cell: bench.ask(name, "restore", **dict(zip(names, cell, strict=True)))
    )


def checkpoints(bench: Bench) -> Answer:
    """Table e."""
    measured: dict[str, Answer] = {}
    for name in _able(bench, measured, without=("limit",)):
        with _failing(measured, name):
            arguments = {"folder": bench.written(name, "real"), "steps": _CHECKPOINT_STEP}
            for setting in bench.greeting(name)["settings"]:
                measured.setdefault(name, {})[setting] = {
                    str(ranks): bench.ask(name, "checkpoint_bytes", setting=setting, ranks=ranks, **arguments)
                    for ranks in CHECKPOINT_RANKS
                }
    return measured


def memory(bench: Bench) -> Answer:
    """Table f: a fresh worker for each figure."""
    measured: dict[str, Answer] = {}
    for name in _able(bench, measured, without=("limit",)):
        with _failing(measured, name):
            folder = bench.written(name, "real")
            setting = bench.greeting(name)["settings"][0]
            measured[name] = {str(workers): (folder, setting, workers) for workers in WORKERS}

    def one(name: str, cell: Any) -> Answer:
        folder, setting, workers = cell
        bench.restart(name)
        bench.ask(name, "hello")
        before = memory_of(bench.process_id(name))
        with _watching(bench.process_id(name)) as peak:
            arguments = {"folder": folder, "setting": setting, "workers": workers}
            answer = bench.ask(name, "deliver", seconds=bench.seconds, touch=True, **arguments)
        return {**answer, "before": before, "peak": peak}

    return _alternate(bench, measured, one)


def epochs(bench: Bench) -> Answer:
    """Table g."""
    measured: dict[str, Answer] = {}
    documents = str(bench.corpus("identities").folder)
    for name in _able(bench, measured, without=("limit",)):
        with _failing(measured, name):
            arguments = {"documents": documents, "folder": bench.written(name, "identities"), "seq_len": SHORT_ROWS}
            for setting in bench.greeting(name)["settings"]:
                measured.setdefault(name, {})[setting] = {
                    f"{ranks}|{workers}": bench.ask(
                        name, "epoch", setting=setting, ranks=ranks, workers=workers, **arguments
                    )
                    for ranks, workers in EPOCHS
                }
    return measured


def elastic(bench: Bench) -> Answer:
    """Table h."""
    measured: dict[str, Answer] = {}
    for name in _able(bench, measured, without=("limit",)):
        with _failing(measured, name):
            folder = bench.written(name, "identities")
            for setting in bench.greeting(name)["settings"]:
                target = str(bench.folder / "formats" / f"{name}-{setting}-elastic".replace(" ", "_"))
                arguments = {"folder": folder, "setting": setting, "steps": SAVED_STEP, "target": target}
                found = {"reference": bench.ask(name, "reference", run=_run_of(SAVED_RANKS), **arguments)}
                if "steps" in found["reference"]:
                    for ranks in RESTORED_RANKS:
                        found[str(ranks)] = bench.ask(name, "elastic", run=_run_of(ranks), **arguments)
                measured.setdefault(name, {})[setting] = found
    return measured


TABLES: dict[str, Callable[[Bench], Answer]] = {
    "a": deliver,
    "b": from_text,
    "c": convert,
    "d": restore,
    "e": checkpoints,
    "f": memory,
    "g": epochs,
    "h": elastic,
}


def _run_of(ranks: int) -> Answer:
    rows = math.ceil(GLOBAL_BATCH / ranks)
    return {"ranks": ranks, "batch_rows": rows, "seq_len": SHORT_ROWS, "global_batch": GLOBAL_BATCH}


def _able(bench: Bench, measured: dict[str, Answer], without: Sequence[str] = ()) -> Iterator[str]:
    """The peers that are there; of the others their problem is noted."""
    for name in bench.peers:
        if name in without:
            continue
        problem = bench.problem_of(name)
        if problem is None:
            yield name
        else:
            measured[name] = {key: problem[key] for key in ("install", "error") if key in problem}


@contextlib.contextmanager
def _failing(measured: dict[str, Answer], name: str) -> Iterator[None]:
    try:
        yield
    except Failed as error:
        measured[name] = error.args[0]


def _alternate(bench: Bench, measured: dict[str, Answer], measure: Callable[[str, Any], Answer]) -> Answer:
    """Replaces each cell by the answers of all rounds; one that fails is not asked again."""
    cells = [
        (name, key, cell)
        for name, of_peer in measured.items()
        for key, cell in of_peer.items()
        if key not in ("unsupported", "error", "install")
    ]
    answers: dict[tuple[str, str], list[Answer]] = {(name, key): [] for name, key, _ in cells}
    for _ in range(bench.rounds):
        for name, key, cell in cells:
            done = answers[name, key]
            if not done or not is_problem(done[-1]):
                done.append(measure(name, cell))
    for (name, key), done in answers.items():
        measured[name][key] = done
    return measured


def is_problem(answer: Answer) -> bool:
    return any(key in answer for key in ("unsupported", "error", "install"))


@contextlib.contextmanager
def _watching(process_id: int) -> Iterator[Answer]:
    """The largest memory of a process and its children, by kind, while the block runs."""
    peak: Answer = memory_of(process_id)
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            for kind, size in memory_of(process_id).items():
                peak[kind] = max(peak[kind], size)
            time.sleep(_SAMPLE_SECONDS)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def memory_of(process_id: int) -> Answer:
    """Bytes of a process and all below it, shared pages counted once: its own and shared memory, and with files."""
    own = files = 0
    for process in _tree(process_id):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]:
                kind, size = line.split()[:2]
                own += int(size) * 1024 if kind in ("Pss_Anon:", "Pss_Shmem:") else 0
                files += int(size) * 1024 if kind == "Pss_File:" else 0
    return {"own": own, "total": own + files}


def _tree(process_id: int) -> Iterator[int]:
    yield process_id
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process_id}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _tree(int(child))
