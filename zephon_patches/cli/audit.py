"""``zephon-data audit``: proves from a run's traces that it trained on what the order says.

    zephon-data audit outputs --config my.toml

The run needs data.trace = true. Every step of every start is computed again from the stores: the samples of each rank,
and a digest of the tensors as the trainer got them. A start from an older checkpoint repeats steps, which is no fault.
The exit status is 0 if no fault was found, else 1.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from zephon_patches.cli.options import add_config, add_json, print_json
from zephon_patches.cli.table import aligned
from zephon_patches.training_config import read_training_config

__all__ = ["add_to"]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.description = __doc__
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the run's job.dump_folder")
    add_config(parser)
    add_json(parser)
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> int:
    from zephon_patches.trace.audit import audit_run
    from zephon_patches.trace.view import DataView

    audit = audit_run(arguments.run_folder, DataView(read_training_config(arguments.config)))
    if arguments.json:
        print_json(asdict(audit))
        return 1 if audit.faults else 0
    rows = []
    for report in audit.segments:
        first, last = report.steps
        rows.append(
            [
                report.segment,
                f"{report.dp_size:,}",
                f"{report.global_batch_size:,}",
                f"{first:,}-{last:,}" if last >= first else "none",
                f"{report.cursors[0]:,}-{report.cursors[1]:,}",
                f"{report.repeated:,}",
                f"{report.faults:,}",
            ]
        )
    header = ["segment", "dp ranks", "batch", "steps", "cursor", "repeated later", "faults"]
    print(aligned(header, rows, left=("segment", "steps", "cursor")))
    for note in audit.notes:
        print(f"note: {note}")
    for fault in audit.faults:
        print(f"FAULT: {fault}")
    if audit.faults:
        print(f"{len(audit.faults):,} faults")
        return 1
    first, last = audit.cursors
    print(
        f"{audit.steps:,} steps from sample {first:,} to {last:,} of the order: {audit.samples:,} samples trained on, "
        "each once, in order, with the tokens of the stores"
    )
    return 0
