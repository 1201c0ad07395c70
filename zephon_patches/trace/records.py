"""Traces of a run on the disk: what each rank got in each step.

With ``data.trace = true`` each start of a run is a segment, a folder of its own under ``data_trace`` in the run's dump
folder, named by its time so that the names are in order. In it each rank appends to a file of its own, and never
writes over anything::

    data_trace/20260102-030405-678-9abc/rank-00000.jsonl

The first line says what the segment is, each further one is a step that the rank has completed:

    format, segment, rank, dp_rank, dp_size, world_size     who writes
    global_batch_size, local_batch_size, end, order         what the steps follow from; ``order`` as in a checkpoint
    step, cursor                                            where the segment starts

    step, cursor, next     the step's number, and the cursor before and after it
    ranges                 the numbers that the rank took, half-open, without padding rows
    digest, rows           of the tensors as the trainer got them (``digest.py``), padding rows included
    sources                how many of the numbers are of each source
    wait                   seconds for which the rank waited for data
    loss                   if it was logged

A process may be killed while it writes: a last line without an end is left out.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from zephon_patches.config import MAX_NUMBER
from zephon_patches.errors import StateError
from zephon_patches.loader.state import CURSOR, ORDER, read_state
from zephon_patches.trace.steps import Step

__all__ = ["FOLDER", "FORMAT", "RankTrace", "Segment", "TraceWriter", "as_ranges", "history", "read_run", "step_of_run"]

FOLDER, FORMAT = "data_trace", 1

_HEADER = {"format", "segment", "rank", "dp_rank", "dp_size", "world_size", "global_batch_size", "local_batch_size"}
_HEADER |= {"end", "order", "step", "cursor"}
_MOST_AT_ONCE = 2**24  # ranks, and samples of a step
_DIGEST = re.compile("[0-9a-f]{16}")

_LINE = {"step", "cursor", "next", "ranges", "digest", "rows", "sources", "wait"}


class TraceWriter:
    """Appends the lines of one rank in one segment.

    Args:
        folder: The run's dump folder.
        header: All fields of the first line but ``format``.
    """

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        path = folder / FOLDER / header["segment"] / f"rank-{header['rank']:05d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: TextIO = open(path, "a", encoding="ascii")  # noqa: SIM115  (open as long as the run)
        self.write({"format": FORMAT, **header})

    def write(self, line: dict[str, Any]) -> None:
        """Writes a line, and hands it to the system at once."""
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@dataclass
class RankTrace:
    """The file of one rank in one segment."""

    path: Path
    header: dict[str, Any]
    lines: list[dict[str, Any]]
    torn: bool = False
    """Whether it ends with half a line"""
    damaged: list[int] = field(default_factory=list)
    """Numbers of other lines that cannot be read, from 1"""


@dataclass
class Segment:
    """One start of a run."""

    name: str
    ranks: list[RankTrace]

    @property
    def header(self) -> dict[str, Any]:
        return self.ranks[0].header

    @property
    def last_step(self) -> int:
        """The last step that any rank has completed; the one it started from if none has."""
        return max((line["step"] for rank in self.ranks for line in rank.lines), default=int(self.header["step"]))


def read_run(run: Path) -> list[Segment]:
    """The segments of a run, in order.

    Args:
        run: Its dump folder, or the folder of its traces.

    Raises:
        StateError: There are none, or a first line is damaged or of another version.
    """
    folder = run if run.name == FOLDER else run / FOLDER
    segments = []
    for path in sorted(path for path in folder.glob("*") if path.is_dir()):
        found = [_read(file) for file in sorted(path.glob("rank-*.jsonl"))]
        if ranks := [trace for trace in found if trace is not None]:
            segments.append(Segment(path.name, ranks))
    if not segments:
        raise StateError(
            f"{run}: no traces in {folder}; a run writes them with data.trace = true, into its job.dump_folder"
        )
    return segments


def _read(path: Path) -> RankTrace | None:
    """None for a file whose first line was not even written."""
    *lines, rest = path.read_bytes().split(b"\n")
    if not lines:
        return None
    header = _parsed(lines[0], _HEADER)
    if header is None or header["format"] != FORMAT or not _is_header(header):
        raise StateError(f"{path}: its first line is not what this version writes (format {FORMAT}): {lines[0]!r:.80}")
    trace = RankTrace(path, header, [], torn=bool(rest))
    for number, text in enumerate(lines[1:], start=2):
        line = _parsed(text, _LINE)
        if line is None or not _is_line(line, header["global_batch_size"]):
            trace.damaged.append(number)
        else:
            trace.lines.append(line)
    return trace


def _parsed(text: bytes, keys: set[str]) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and line.keys() >= keys else None


def _is_header(line: dict[str, Any]) -> bool:
    sizes = ("dp_size", "world_size", "global_batch_size", "local_batch_size")
    counts = all(_is_count(line[key], MAX_NUMBER) for key in ("rank", "dp_rank", "step", "cursor"))
    if not counts or not all(_is_count(line[key], _MOST_AT_ONCE) and line[key] for key in sizes):
        return False
    if type(line["segment"]) is not str or line["dp_rank"] >= line["dp_size"]:
        return False
    try:
        read_state({CURSOR: line["cursor"], ORDER: line["order"]})
    except StateError:
        return False
    return line["end"] is None or _is_count(line["end"], MAX_NUMBER)


def _is_line(line: dict[str, Any], global_batch_size: int) -> bool:
    if not all(_is_count(line[key], MAX_NUMBER) for key in ("step", "cursor", "next")):
        return False
    if not all(type(line[key]) is str and _DIGEST.fullmatch(line[key]) for key in ("digest", "rows")):
        return False
    sources, numbers = line["sources"], (line["wait"], line.get("loss", 0.0))
    if not isinstance(sources, dict) or not all(_is_count(count, MAX_NUMBER) for count in sources.values()):
        return False
    if not all(type(number) in (int, float) for number in numbers):
        return False
    ranges = line["ranges"]
    if not isinstance(ranges, list) or not all(_is_range(interval) for interval in ranges):
        return False
    return sum(stop - start for start, stop in ranges) <= global_batch_size


def _is_range(interval: Any) -> bool:
    pair = isinstance(interval, list) and len(interval) == 2
    return pair and all(_is_count(n, MAX_NUMBER) for n in interval) and interval[0] < interval[1]


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def history(segments: Sequence[Segment]) -> dict[int, Segment]:
    """The segment in which each step was trained for good: a later start from an older checkpoint replaces steps."""
    steps: dict[int, Segment] = {}
    for segment in segments:
        start = segment.header["step"]
        steps = {step: of for step, of in steps.items() if step <= start}
        steps |= {line["step"]: segment for rank in segment.ranks for line in rank.lines}
    return dict(sorted(steps.items()))


def step_of_run(run: Path, step: int) -> Step:
    """The numbers that a step of a run took, as its ranks wrote them down.

    Raises:
        StateError: The step is not in the traces, or not of all ranks.
    """
    steps = history(read_run(run))
    if step not in steps:
        known = f"steps {min(steps):,} to {max(steps):,}" if steps else "no step"
        raise StateError(f"{run}: step {step:,} is not in its traces, which have {known}")
    segment = steps[step]
    size = segment.header["dp_size"]
    ranges = {r.header["dp_rank"]: line["ranges"] for r in segment.ranks for line in r.lines if line["step"] == step}
    if len(ranges) != size:
        raise StateError(f"{run}: step {step:,} is in the traces of {len(ranges)} of {size} data-parallel ranks only")
    numbers = [n for rank in sorted(ranges) for start, stop in ranges[rank] for n in range(start, stop)]
    told_by = f"the traces in {segment.ranks[0].path.parent} (dp {size:,})"
    return Step(step, np.array(numbers, dtype=np.int64), segment.header["global_batch_size"], told_by)


def as_ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Ascending numbers as half-open intervals."""
    ranges: list[list[int]] = []
    for n in numbers:
        if ranges and ranges[-1][1] == n:
            ranges[-1][1] = n + 1
        else:
            ranges.append([n, n + 1])
    return ranges
