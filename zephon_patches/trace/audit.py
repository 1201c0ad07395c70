"""Proves from a run's traces that it trained on what the order says, through all starts and topologies.

Everything is computed again from the config, the stores and the sizes that a segment names, by another way than the
loader's: the numbers of each step and rank, and the digests of the tensors that the trainer should have got. Then the
segments are put together: a start from an older checkpoint replaces the steps behind it, which is no fault; what is
left must follow on without a gap.

So if no fault is found, every number from the first cursor to the last one that no skip covers was trained on once, in
order, with the tokens that the stores have for it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zephon_patches import mapping
from zephon_patches.loader.state import differences
from zephon_patches.mapping import Skips, Topology
from zephon_patches.samples.sequence import IGNORE_INDEX
from zephon_patches.trace.digest import Digest, row_digests
from zephon_patches.trace.records import Segment, as_ranges, history, read_run
from zephon_patches.trace.view import DataView

__all__ = ["Audit", "SegmentReport", "audit_run"]


@dataclass
class SegmentReport:
    """One start of the run."""

    segment: str
    dp_size: int
    global_batch_size: int
    steps: tuple[int, int]
    """The first step and the last; the last below the first if it completed none"""
    cursors: tuple[int, int]
    """Before the first step and behind the last"""
    repeated: int
    """Of its steps, those that a later start trained again"""
    faults: int


@dataclass
class Audit:
    """What was found."""

    segments: list[SegmentReport] = field(default_factory=list)
    steps: int = 0
    """That make the run, without repeats"""
    samples: int = 0
    """In them"""
    cursors: tuple[int, int] = (0, 0)
    """Where the run begins and ends in the order"""
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is no fault but should be known"""


def audit_run(run: Path, view: DataView) -> Audit:
    """Audits the traces of a run.

    Args:
        run: Its dump folder.
        view: The data of its config.

    Raises:
        StateError: There are no traces, or they are of another version.
        StoreError: A store is damaged.
    """
    segments, audit = read_run(run), Audit()
    final = history(segments)
    for number, segment in enumerate(segments):
        # Killed in its last step, a segment may have the lines of some ranks only; that step is not the run's, or the
        # last of all.
        last_is_kept = final.get(segment.last_step) is segment and number < len(segments) - 1
        checker = _Segment(segment, view, last_is_kept)
        checker.check()
        head, last = segment.header, segment.last_step
        own = range(head["step"] + 1, last + 1)
        audit.faults += [f"{segment.name}: {fault}" for fault in checker.faults]
        audit.notes += [f"{segment.name}: {note}" for note in checker.notes]
        audit.segments.append(
            SegmentReport(
                segment.name,
                head["dp_size"],
                head["global_batch_size"],
                (head["step"] + 1, last),
                (head["cursor"], checker.cursors.get(last, head["cursor"])),
                sum(final.get(step) is not segment for step in own),
                len(checker.faults),
            )
        )
    _check_joints(segments, audit)
    audit.steps = len(final)
    if final:
        first = min(final)
        line = next(x for r in final[first].ranks for x in r.lines if x["step"] == first)
        last_line = next(x for r in final[max(final)].ranks for x in r.lines if x["step"] == max(final))
        audit.cursors = (line["cursor"], last_line["next"])
        taken = {
            (step, rank.header["dp_rank"]): sum(stop - start for start, stop in x["ranges"])
            for step, segment in final.items()
            for rank in segment.ranks
            for x in rank.lines
            if x["step"] == step
        }
        audit.samples = sum(taken.values())
    return audit


def _check_joints(segments: Sequence[Segment], audit: Audit) -> None:
    """Each segment starts where the ones before left off, or at an older place of theirs."""
    cursors: dict[int, int] = {}  # the cursor behind each step, of what makes the run so far
    for number, segment in enumerate(segments):
        head = segment.header
        start, cursor = head["step"], head["cursor"]
        kept = {step: behind for step, behind in cursors.items() if step <= start}
        if not kept and number and start:
            audit.faults.append(f"{segment.name}: starts behind step {start:,}, before all traces of earlier starts")
        elif not kept and number:
            audit.notes.append(f"{segment.name}: starts anew at sample {cursor:,}")
        elif kept and max(kept) != start:
            audit.faults.append(
                f"{segment.name}: starts behind step {start:,}, and the segments before end with step {max(kept):,}: "
                f"traces of steps {max(kept) + 1:,} to {start:,} are missing"
            )
        elif kept and kept[start] != cursor:
            audit.faults.append(
                f"{segment.name}: starts at sample {cursor:,} behind step {start:,}, but that step ended at sample "
                f"{kept[start]:,}: samples between them are missed or repeated"
            )
        cursors = kept | {start: cursor} | {line["step"]: line["next"] for r in segment.ranks for line in r.lines}


class _Segment:
    """Checks one segment by itself."""

    def __init__(self, segment: Segment, view: DataView, last_is_kept: bool) -> None:
        self._segment, self._view, self._last_is_kept = segment, view, last_is_kept
        self._head = segment.header
        order = json.loads(self._head["order"])
        self._order = order
        self._skips = Skips(tuple(pair) for pair in order.get("skip", []))
        self._lines: dict[int, dict[int, list[dict[str, Any]]]] = {}  # by rank and step
        for rank in segment.ranks:
            by_step = self._lines.setdefault(rank.header["rank"], {})
            for line in rank.lines:
                by_step.setdefault(line["step"], []).append(line)
        self.faults: list[str] = []
        self.notes: list[str] = []
        self.cursors: dict[int, int] = {}
        """The cursor behind each step"""

    def check(self) -> None:
        head = self._head
        for rank in self._segment.ranks:
            for key in ("dp_size", "world_size", "global_batch_size", "local_batch_size", "order", "end", *_START):
                if rank.header[key] != head[key]:
                    self.faults.append(f"rank {rank.header['rank']}: {key} is {rank.header[key]}, not {head[key]}")
            self.faults += [f"rank {rank.header['rank']}: line {line} cannot be read" for line in rank.damaged]
            if rank.torn:
                self.notes.append(f"rank {rank.header['rank']}: killed while it wrote a line, which is left out")
        missing = set(range(head["world_size"])) - {rank.header["rank"] for rank in self._segment.ranks}
        if missing and self._segment.last_step == head["step"]:
            self.notes.append(f"stopped before its first step: no trace of rank {_listed(missing)} yet")
        elif missing:
            self.faults.append(f"no trace of rank {_listed(missing)} of {head['world_size']}")
        if self.faults and any(rank.header["dp_size"] != head["dp_size"] for rank in self._segment.ranks):
            return
        last = self._segment.last_step
        lines = self._differences()
        if lines:
            self.faults.append("was trained in another order than the config's: " + "; ".join(lines))
            return
        cursor = head["cursor"]
        for step in range(head["step"] + 1, last + 1):
            size, behind = mapping.step_at(cursor, head["global_batch_size"], head["end"], self._skips)
            if not size:
                self.faults.append(f"step {step:,}: the data had ended at sample {head['end']:,}")
                return
            self._check_step(step, cursor, behind, step == last)
            self.cursors[step] = cursor = behind

    def _differences(self) -> list[str]:
        """In what the order of the segment is another one than the config's, up to where it got; but for skips."""
        cursor = max((line["next"] for r in self._segment.ranks for line in r.lines), default=self._head["cursor"])
        saved, present = self._order, json.loads(self._view.description)
        return differences({**saved, "skip": []}, {**present, "skip": []}, cursor)

    def _check_step(self, step: int, cursor: int, behind: int, is_last: bool) -> None:
        lines: dict[int, dict[str, Any]] = {}  # by rank
        for rank in self._segment.ranks:
            found = self._lines[rank.header["rank"]].get(step, [])
            if len(found) > 1:
                self.faults.append(f"step {step:,}: rank {rank.header['rank']} has {len(found)} lines")
            if found:
                lines[rank.header["rank"]] = found[0]
        if absent := [r.header["rank"] for r in self._segment.ranks if r.header["rank"] not in lines]:
            if is_last and not self._last_is_kept and len(absent) < len(self._segment.ranks):
                self.notes.append(
                    f"step {step:,}: under way when the run stopped, or not written: no line of rank {_listed(absent)}"
                )
            else:
                self.faults.append(f"step {step:,}: no line of rank {_listed(absent)}")
        wrong: dict[int, tuple[str, str]] = {}  # dp_rank -> what it got: digest, rows
        expected: dict[int, Digest] = {}
        ranges: dict[int, list[list[int]]] = {}
        for rank in self._segment.ranks:
            line, dp_rank = lines.get(rank.header["rank"]), rank.header["dp_rank"]
            if line is None:
                continue
            who = f"step {step:,}: rank {rank.header['rank']}"
            if (line["cursor"], line["next"]) != (cursor, behind):
                self.faults.append(
                    f"{who} went from sample {line['cursor']:,} to {line['next']:,}, expected {cursor:,} to {behind:,}"
                )
            if dp_rank not in expected:
                numbers, expected[dp_rank] = self._expected(cursor, dp_rank)
                ranges[dp_rank] = as_ranges(n for n in numbers.tolist() if n >= 0)
            if line["ranges"] != ranges[dp_rank]:
                took, due = _intervals(line["ranges"]), _intervals(ranges[dp_rank])
                self.faults.append(f"{who} took samples {took}, expected {due}")
            if line["digest"] != expected[dp_rank].digest:
                wrong[dp_rank] = (line["digest"], line["rows"])
        if wrong:
            self._name(step, wrong, expected)

    def _name(self, step: int, wrong: dict[int, tuple[str, str]], expected: dict[int, Digest]) -> None:
        """Says what is the matter with digests that are not the expected ones."""
        by_digest = {digest.digest: dp_rank for dp_rank, digest in expected.items()}
        total = sum(int(rows, 16) for _, rows in wrong.values()) % 2**64
        others: list[int] = []
        for dp_rank, (digest, rows) in wrong.items():
            whose = by_digest.get(digest)
            if rows == expected[dp_rank].rows:
                self.faults.append(f"step {step:,}: data-parallel rank {dp_rank} got its rows in another order")
            elif whose is not None:
                self.faults.append(
                    f"step {step:,}: data-parallel rank {dp_rank} got the rows of data-parallel rank {whose}"
                )
            else:
                others.append(dp_rank)
        if len(others) > 1 and total == sum(expected[dp_rank].total for dp_rank in wrong) % 2**64:
            self.faults.append(f"step {step:,}: data-parallel ranks {_listed(others)} exchanged rows")
            return
        self.faults += [f"step {step:,}: data-parallel rank {dp_rank} got other tokens" for dp_rank in others]

    def _expected(self, cursor: int, dp_rank: int) -> tuple[np.ndarray, Digest]:
        """A rank's numbers, -1 for padding rows, and the digest of what it should get."""
        head, view = self._head, self._view
        step = next(mapping.steps_from(cursor, head["global_batch_size"], head["end"], self._skips))
        numbers = mapping.numbers_of_rank(
            step,
            head["global_batch_size"],
            head["local_batch_size"],
            Topology(dp_rank, head["dp_size"]),
            self._skips,
        ).ravel()
        first = numbers[0] if numbers[0] >= 0 else self._skips.numbers(np.array([step[0]], dtype=np.int64))[0]
        place = view.order.locate(np.where(numbers < 0, first, numbers))
        digest = Digest()
        for n, source, shard, sample in zip(
            numbers.tolist(), place.source.tolist(), place.shard.tolist(), place.sample.tolist(), strict=True
        ):
            row = view.row(source, shard, sample)
            if n < 0:
                row["labels"] = np.full_like(row["labels"], IGNORE_INDEX)
            digest.add(row_digests({name: array[None] for name, array in row.items()}))
        return numbers, digest


_START = ("step", "cursor")


def _listed(numbers: Sequence[int] | set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _intervals(ranges: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{start:,}-{stop - 1:,}" for start, stop in ranges) or "none"
