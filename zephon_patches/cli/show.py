"""``zephon-data show``: which samples stand where in the order, and of which documents they are.

    zephon-data show --config my.toml --at 1_200_000:1_200_004
    zephon-data show --config my.toml --step 40 --text
    zephon-data show --config my.toml --step 40 --dp 3 --rank 1
    zephon-data show --config my.toml --step 40 --run outputs

Any place of the order is found at once, from the finished stores; no run, no GPU and no torch is needed. A place by
--at is exact always. A step is exact if all steps have the size training.global_batch_size; if the size was another for
a time, give --run, for a run with data.trace = true, or --checkpoint, one before the step. What was used is said.

A record is counted from 0 in its file: the line less 1, or the row. Tokens are those of the document, with BOS and EOS.
"""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zephon_patches.cli.options import (
    add_config,
    add_json,
    add_numbers,
    basis_of,
    interval,
    intervals_in_words,
    part_in_words,
    print_json,
    step_of,
)
from zephon_patches.cli.table import aligned
from zephon_patches.errors import ConfigError
from zephon_patches.training_config import read_training_config

if TYPE_CHECKING:
    from zephon_patches.trace.steps import Reading, Step
    from zephon_patches.trace.view import Sample

__all__ = ["add_to"]

_TOKENS = 16


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.description = __doc__
    add_config(parser)
    add_numbers(parser)
    parser.add_argument("--dp", metavar="D", type=int, help="say who reads them on D data-parallel ranks")
    parser.add_argument("--rank", metavar="R", type=int, help="only what rank R of them reads")
    parser.add_argument(
        "--text",
        metavar="TOKENS",
        type=int,
        nargs="?",
        const=_TOKENS,
        help=f"show the text of the first tokens of each sample, of so many ({_TOKENS})",
    )
    add_json(parser)
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.rank is not None and arguments.dp is None:
        raise ConfigError("--rank goes with --dp, the number of data-parallel ranks")
    if arguments.text is not None and arguments.text < 1:
        raise ConfigError(f"--text {arguments.text}: expected a number of tokens, at least 1")
    from zephon_patches.trace.steps import deal, steps_over
    from zephon_patches.trace.view import DataView

    view = DataView(read_training_config(arguments.config))
    readings: list[Reading | None]
    if arguments.step is not None:
        step = step_of(view, arguments.step, arguments)
        told_by, steps = step.told_by, [step]
        numbers = step.numbers.tolist()
    else:
        if arguments.run is not None:
            raise ConfigError("--run goes with --step")
        if arguments.checkpoint is not None and arguments.dp is None:
            raise ConfigError("--checkpoint goes with --step, or with --dp; --at alone counts no steps")
        start, stop = interval(arguments.at)
        if view.end is not None and stop > view.end:
            raise ConfigError(f"--at {arguments.at}: the data ends at sample {view.end:,}")
        numbers, told_by, steps = [*range(start, stop)], "", []
        if arguments.dp is not None:
            basis = basis_of(view, arguments)
            told_by, steps = basis.told_by, [*steps_over(view, start, stop, basis)]
    if arguments.dp is None:
        readings = [None] * len(numbers)
    else:
        wanted = set(numbers)
        dealt = [r for s in steps for r in deal(s, view.config.local_batch_size, arguments.dp, arguments.rank)]
        readings = [r for r in dealt if r.n in wanted]
        numbers = [r.n for r in readings if r is not None]
    samples = view.samples(numbers)
    texts: list[str | None] = [None] * len(samples)
    if arguments.text:
        texts = [view.text(sample, arguments.text) for sample in samples]
    if arguments.json:
        print_json(
            {
                "step": arguments.step,
                "steps_told_by": told_by or None,
                "samples": [_as_json(*entry) for entry in zip(samples, readings, texts, strict=True)],
            }
        )
        return 0
    if arguments.step is not None:
        print(f"step {arguments.step:,}: {_in_words(steps[0])}; told by: {told_by}")
    elif told_by:
        print(f"steps told by: {told_by}")
    print(_table(samples, readings, texts))
    return 0


def _in_words(step: "Step") -> str:
    return f"{len(step.numbers):,} samples, {intervals_in_words(step.numbers.tolist())}"


def _as_json(sample: "Sample", reading: "Reading | None", text: str | None) -> dict[str, Any]:
    content = asdict(sample)
    if reading is not None:
        content |= {"step": reading.step, "rank": reading.rank, "micro_batch": reading.micro_batch, "row": reading.row}
    if text is not None:
        content["text"] = text
    return content


def _table(samples: "list[Sample]", readings: "list[Reading | None]", texts: list[str | None]) -> str:
    dealt = any(reading is not None for reading in readings)
    with_text = any(text is not None for text in texts)
    header = ["step", "rank", "micro-batch", "row"] if dealt else []
    header += ["n", "source", "epoch", "shard", "sample", "file", "record", "tokens"] + ["text"] * with_text
    rows = []
    for sample, reading, text in zip(samples, readings, texts, strict=True):
        first = [] if reading is None else [f"{value:,}" for value in reading[:4]]
        n = f"{sample.n:,}" + (" skipped" if sample.skipped else "")
        first += [n, sample.source, f"{sample.epoch:,}", sample.shard, f"{sample.sample:,}"]
        last = [] if text is None else [repr(text)]
        for part in sample.parts:
            rows.append([*first, *part_in_words(part), *last])
            # Said once for each sample.
            first, last = [""] * len(first), [""] * len(last)
    return aligned(header, rows, left=("source", "shard", "file", "tokens", "text"))
