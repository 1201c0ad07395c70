"""``zephon-data order``: which rank reads which samples, in which micro-batch.

    zephon-data order --config my.toml --at 0:48 --dp 3

Steps have the size training.global_batch_size, or are counted from --checkpoint, or are those of --run. Skipped samples
are read by nobody, so they are not listed. Padding rows are not listed either.
"""

import argparse
from itertools import groupby

from zephon_patches.cli.options import (
    add_config,
    add_json,
    add_numbers,
    basis_of,
    interval,
    intervals_in_words,
    print_json,
    step_of,
)
from zephon_patches.cli.table import aligned
from zephon_patches.errors import ConfigError
from zephon_patches.training_config import read_training_config

__all__ = ["add_to"]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.description = __doc__
    add_config(parser)
    add_numbers(parser)
    parser.add_argument("--dp", metavar="D", type=int, required=True, help="number of data-parallel ranks")
    parser.add_argument("--rank", metavar="R", type=int, help="only rank R of them")
    parser.add_argument("--local-batch-size", metavar="B", type=int, help="rows of a micro-batch (the config's)")
    add_json(parser)
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> int:
    from zephon_patches.trace.steps import deal, steps_over
    from zephon_patches.trace.view import DataView

    view = DataView(read_training_config(arguments.config))
    if arguments.step is not None:
        step = step_of(view, arguments.step, arguments)
        steps, told_by = [step], step.told_by
        start, stop = int(step.numbers[0]), int(step.numbers[-1]) + 1
    else:
        if arguments.run is not None:
            raise ConfigError("--run goes with --step")
        start, stop = interval(arguments.at)
        basis = basis_of(view, arguments)
        steps, told_by = [*steps_over(view, start, stop, basis)], basis.told_by
    local = arguments.local_batch_size or view.config.local_batch_size
    dealt = [r for s in steps for r in deal(s, local, arguments.dp, arguments.rank) if start <= r.n < stop]
    batches = [
        {"step": step, "rank": rank, "micro_batch": micro_batch, "samples": [r.n for r in group]}
        for (step, rank, micro_batch), group in groupby(dealt, key=lambda r: r[:3])
    ]
    if arguments.json:
        print_json({"steps_told_by": told_by, "batches": batches})
        return 0
    print(f"steps told by: {told_by}")
    header = ["step", "rank", "micro-batch", "samples"]
    rows = [
        [f"{b['step']:,}", f"{b['rank']:,}", f"{b['micro_batch']:,}", intervals_in_words(b["samples"])] for b in batches
    ]
    print(aligned(header, rows, left=("samples",)))
    return 0
