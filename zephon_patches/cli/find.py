"""``zephon-data find``: the samples that a document is in, and when they come.

    zephon-data find --config my.toml --document part-0003.jsonl:17
    zephon-data find --config my.toml --document part-0003.jsonl:17 --epochs 0:3
    zephon-data find --config my.toml --document part-0003.jsonl:17 --checkpoint outputs/checkpoint/step-20

A document is named by its file, as much of the path as is needed, and its record, counted from 0: the line less 1, or
the row. With a cursor, a step or a checkpoint it is said which samples come before it and which are still to come;
and without --epochs, the epoch that each source is in there and the next one are searched.
"""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from zephon_patches.cli.options import add_config, add_json, add_place, part_in_words, print_json, step_of
from zephon_patches.cli.options import interval as parse_interval
from zephon_patches.cli.table import aligned
from zephon_patches.errors import ConfigError
from zephon_patches.training_config import read_training_config

if TYPE_CHECKING:
    from zephon_patches.trace.view import DataView, Occurrence

__all__ = ["add_to"]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.description = __doc__
    add_config(parser)
    parser.add_argument("--document", metavar="FILE:RECORD", required=True, help="a record of an input file, from 0")
    parser.add_argument("--source", metavar="NAME", help="the source it is of, where several have such a file")
    parser.add_argument("--epochs", metavar="A:B", help="passes A to B - 1 over its source (0, or those at the cursor)")
    parser.add_argument("--cursor", metavar="N", type=int, help="tell what comes before sample N from what comes after")
    parser.add_argument("--step", metavar="K", type=int, help="the same for the samples before step K")
    add_place(parser)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--before", action="store_true", help="only what comes before")
    only.add_argument("--after", action="store_true", help="only what is still to come")
    add_json(parser)
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> int:
    file, colon, record = arguments.document.rpartition(":")
    if not (colon and file and record.replace(",", "").isdecimal()):
        raise ConfigError(f"--document {arguments.document}: expected FILE:RECORD, such as part-0003.jsonl:17")
    from zephon_patches.trace.view import DataView

    view = DataView(read_training_config(arguments.config))
    if arguments.source is not None and arguments.source not in view.names:
        raise ConfigError(f"--source {arguments.source}: the sources are {', '.join(view.names)}")
    cursor, told_by = _cursor(view, arguments)
    if (arguments.before or arguments.after) and cursor is None:
        raise ConfigError("--before and --after go with --cursor, --step or --checkpoint")
    found: list[Occurrence] = []
    places = view.find(file, int(record.replace(",", "")), arguments.source)
    for source, place in places:
        if arguments.epochs is not None:
            epochs = range(*parse_interval(arguments.epochs, "--epochs"))
        elif cursor is None:
            epochs = range(1)
        else:
            now = view.epoch_at(source, cursor)
            epochs = range(now, now + 2)
        found += view.occurrences(source, place, epochs)
    if arguments.before or arguments.after:
        assert cursor is not None
        found = [entry for entry in found if entry.n is not None and (entry.n < cursor) == arguments.before]
    if arguments.json:
        content = [
            {**asdict(entry), "before": None if cursor is None or entry.n is None else entry.n < cursor}
            for entry in found
        ]
        print_json({"cursor": cursor, "cursor_told_by": told_by or None, "documents": len(places), "samples": content})
        return 0
    if told_by:
        print(f"cursor {cursor:,}, told by: {told_by}")
    if not places:
        print(f"{arguments.document} gave no document: it is blank, was skipped, or its processor gave none")
        return 0
    print(_table(found, cursor))
    return 0


def _cursor(view: "DataView", arguments: argparse.Namespace) -> tuple[int | None, str]:
    """What tells before from after, and where it is from."""
    if arguments.cursor is not None:
        if arguments.step is not None or arguments.checkpoint is not None or arguments.run is not None:
            raise ConfigError("give one of --cursor, --step and --checkpoint")
        if arguments.cursor < 0:
            raise ConfigError(f"--cursor {arguments.cursor}: expected 0 or more")
        return arguments.cursor, "--cursor"
    if arguments.step is not None:
        step = step_of(view, arguments.step, arguments)
        return int(step.numbers[0]), f"the start of step {arguments.step:,}, {step.told_by}"
    if arguments.run is not None:
        raise ConfigError("--run goes with --step")
    if arguments.checkpoint is not None:
        from zephon_patches.trace.checkpoint import basis_of_checkpoint  # needs torch

        basis = basis_of_checkpoint(view, arguments.checkpoint)
        return basis.cursor, basis.told_by
    return None, ""


def _table(found: "list[Occurrence]", cursor: int | None) -> str:
    header = ["n", *(["when"] if cursor is not None else []), "source", "epoch", "shard", "sample", "file", "record"]
    header.append("tokens")
    rows = []
    for entry in found:
        n = "never" if entry.n is None else f"{entry.n:,}"
        when = (
            "" if entry.n is None else "skipped" if entry.skipped else "before" if entry.n < (cursor or 0) else "after"
        )
        first = [n, *([when] if cursor is not None else []), entry.source, f"{entry.epoch:,}"]
        if cursor is None and entry.skipped:
            first[0] += " skipped"
        for part in entry.parts:
            rows.append([*first, entry.shard, f"{entry.sample:,}", *part_in_words(part)])
    return aligned(header, rows, left=("when", "source", "shard", "file", "tokens"))
