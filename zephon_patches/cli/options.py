"""Options that several commands have, and the ways they print.

What a command does its work with, it imports when it runs: its options and their help are there at once.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zephon_patches.config import MAX_NUMBER
from zephon_patches.errors import ConfigError

if TYPE_CHECKING:
    from zephon_patches.trace.steps import Basis, Step
    from zephon_patches.trace.view import DataView, Part

__all__ = [
    "add_config",
    "add_json",
    "add_numbers",
    "add_place",
    "basis_of",
    "interval",
    "intervals_in_words",
    "part_in_words",
    "print_json",
    "step_of",
]


def add_config(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument("--config", metavar="FILE", type=Path, required=required, help="the run's config (TOML)")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for machines (a table for people)")


def add_numbers(parser: argparse.ArgumentParser) -> None:
    """Which samples are asked for: an interval of numbers, or a step."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--at", metavar="A:B", help="samples A to B - 1 of the order")
    where.add_argument("--step", metavar="K", type=int, help="the samples of the K-th step, from 1")
    add_place(parser)


def add_place(parser: argparse.ArgumentParser) -> None:
    """How steps are counted."""
    parser.add_argument(
        "--run",
        metavar="RUN",
        type=Path,
        help="count steps by the traces of a run, written with data.trace = true: its job.dump_folder",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        type=Path,
        help="count steps from a checkpoint, such as outputs/checkpoint/step-20",
    )


def interval(text: str, what: str = "--at") -> tuple[int, int]:
    """A half-open interval, ``A:B``, or a number, ``A``; with digits grouped by ``_`` or ``,``.

    Raises:
        ConfigError: It is neither.
    """
    first, colon, last = text.replace(",", "").partition(":")
    try:
        start = int(first)
        stop = int(last) if colon else start + 1
    except ValueError:
        start = stop = -1
    if not 0 <= start < stop <= MAX_NUMBER:
        raise ConfigError(f"{what} {text}: expected A:B, for A to B - 1, or A, with 0 <= A < B <= {MAX_NUMBER:,}")
    return start, stop


def basis_of(view: "DataView", arguments: argparse.Namespace) -> "Basis":
    """What steps are counted from: a checkpoint, or the config's fixed size."""
    if arguments.checkpoint is None:
        from zephon_patches.trace.steps import basis_of_config

        return basis_of_config(view)
    from zephon_patches.trace.checkpoint import basis_of_checkpoint  # needs torch

    return basis_of_checkpoint(view, arguments.checkpoint)


def step_of(view: "DataView", step: int, arguments: argparse.Namespace) -> "Step":
    """A step by what the arguments say that it is counted from."""
    if arguments.run is not None and arguments.checkpoint is not None:
        raise ConfigError("give --run or --checkpoint, not both")
    if arguments.run is not None:
        from zephon_patches.trace.records import step_of_run

        return step_of_run(arguments.run, step)
    from zephon_patches.trace.steps import numbers_of_step

    return numbers_of_step(view, step, basis_of(view, arguments))


def print_json(data: Any) -> None:
    print(json.dumps(data, ensure_ascii=False, indent=1))


def part_in_words(part: "Part") -> list[str]:
    """File, record and tokens of a part, for a table."""
    return [part.file or "-", f"{part.record:,}", f"{part.start:,}:{part.stop:,} of {part.tokens:,}"]


def intervals_in_words(numbers: Iterable[int]) -> str:
    """Numbers in order, as ``5, 8-11``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a:,}" if a == b else f"{a:,}-{b:,}" for a, b in runs)
