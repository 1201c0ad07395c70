"""``zephon-data inspect``: where a checkpoint stands in the data, and whether a run could go on from it.

    zephon-data inspect outputs/checkpoint/step-20
    zephon-data inspect outputs/checkpoint/step-20 --config my.toml

Reads the loader's two entries and the step, nothing of the model. With a config it says what differs, setting by
setting, and whether a resume would be accepted; the exit status is then 0 if it would, else 1.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zephon_patches.cli.options import add_config, add_json, print_json
from zephon_patches.cli.table import aligned
from zephon_patches.training_config import read_training_config

__all__ = ["add_to"]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.description = __doc__
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="its folder, with .metadata in it")
    add_config(parser, required=False)
    add_json(parser)
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> int:
    from zephon_patches.trace.checkpoint import compare, read_checkpoint  # needs torch, the other commands do not

    contents = read_checkpoint(arguments.checkpoint)
    view = None
    if arguments.config is not None:
        from zephon_patches.trace.view import DataView

        view = DataView(read_training_config(arguments.config))
    verdict = None if view is None else compare(contents, view)
    if arguments.json:
        print_json(
            {
                "checkpoint": str(contents.folder),
                "step": contents.step,
                "cursor": contents.cursor,
                "sources": contents.sources,
                "order": contents.order,
                **({} if verdict is None else asdict(verdict)),
            }
        )
        return 0 if verdict is None or verdict.accepted else 1
    step = "no step in it" if contents.step is None else f"step {contents.step:,}"
    print(f"{contents.folder}: {step}, cursor {contents.cursor:,}")
    print(_sources(contents.sources, contents.order))
    for key, value in contents.order.items():
        if key == "changes":
            for change in value:
                changed = change.get("changed", "?")
                print(f"accepted change at sample {change['at']:,}: {changed} (order {change['before']} before)")
        elif key == "skip":
            print(f"skip: {', '.join(f'[{start:,}, {stop:,})' for start, stop in value)}")
        elif key == "stages":
            for stage in value:
                print(f"mixture from sample {stage['at']:,} on: {json.dumps(stage['weights'])}")
        elif key != "sources":
            print(f"{key}: {value}")
    if verdict is None:
        return 0
    if verdict.differences:
        print(f"\nDifferences to {arguments.config}:")
        rows = [[d.setting, _shown(d.checkpoint), _shown(d.config)] for d in verdict.differences]
        print(aligned(["setting", "checkpoint", "config"], rows, left=("setting", "checkpoint", "config")))
    else:
        print(f"\nNo difference to {arguments.config}")
    if verdict.accepted:
        because = f", by data.accept_change: {verdict.reason}" if verdict.reason else ""
        print(f"\nA resume would be accepted{because}")
        return 0
    print(f"\nA resume would be refused: {verdict.reason}")
    return 1


def _sources(places: list[dict[str, Any]], order: dict[str, Any]) -> str:
    header = ["source", "epoch", "position", "samples", "tokens", "data"]
    rows = [
        [
            place["source"],
            *("?" if place[key] is None else f"{place[key]:,}" for key in ("epoch", "position", "samples")),
            f"{source['tokens']:,}",
            source["data"],
        ]
        for place, source in zip(places, order["sources"], strict=True)
    ]
    return aligned(header, rows, left=("source", "data"))


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
