#!/usr/bin/env python3
"""Compares two runs step by step: the samples must be the same, the losses nearly.

    python scripts/elastic_demo.py RECORDS_OF_ONE RECORDS_OF_OTHER --plot losses.png

The folders are what scripts/recording_train.py wrote. The exit status is 1 if a step differs. scripts/elastic_demo.sh
makes two such runs.
"""

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

# Of the loss, relative: sums over another number of ranks round differently.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Step:
    """What one step trained on, all ranks together."""

    ranks: int
    first: int
    end: int
    rows: tuple[str, ...]
    loss: float

    @property
    def digest(self) -> str:
        return hashlib.blake2b("".join(self.rows).encode(), digest_size=6).hexdigest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("reference", type=Path, help="folder of the records of one run")
    parser.add_argument("other", type=Path, help="folder of the records of the other run")
    parser.add_argument("--plot", type=Path, help="PNG to draw the losses into; needs matplotlib")
    options = parser.parse_args(argv)
    try:
        reference, other = read_steps(options.reference), read_steps(options.other)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(reference, other))
    if options.plot:
        draw(reference, other, options.plot)
        print(f"drawn in {options.plot}")
    found = differences(reference, other)
    for difference in found:
        print(difference, file=sys.stderr)
    if not found:
        print(
            f"{len(reference)} steps: the same samples in the same order, losses within a relative {TOLERANCE:g} "
            f"(largest difference {max(relative(reference[step], other[step]) for step in reference):.1e})"
        )
    return 1 if found else 0


def read_steps(folder: Path) -> dict[int, Step]:
    """The steps of a run, joined over its ranks and starts.

    Raises:
        ValueError: There are none, or the ranks do not fit together.
    """
    lines = [json.loads(line) for path in sorted(folder.glob("rank-*.jsonl")) for line in path.open()]
    if not lines:
        raise ValueError(f"no records in {folder}: the run did not complete a step")
    steps = {}
    for step in sorted({line["step"] for line in lines}):
        of_step = [line for line in lines if line["step"] == step]
        places = {(line["ranks"], line["first"], line["end"]) for line in of_step}
        if len(places) != 1 or len(of_step) != of_step[0]["ranks"]:
            raise ValueError(f"{folder}: step {step} was recorded more than once, or not by all of its ranks")
        # Peers in tensor and context parallelism have the same place and the same rows.
        rows: dict[int, list[str]] = {}
        for line in of_step:
            if rows.setdefault(line["dp_rank"], line["rows"]) != line["rows"]:
                raise ValueError(f"{folder}: in step {step} two peers of place {line['dp_rank']} have different rows")
        losses = [line["loss"] for line in of_step if line["loss"] is not None]
        if not losses:
            raise ValueError(f"{folder}: no loss was logged in step {step}; set metrics.log_freq = 1")
        ((ranks, first, end),) = places
        steps[step] = Step(ranks, first, end, tuple(row for _, part in sorted(rows.items()) for row in part), losses[0])
    return steps


def relative(one: Step, other: Step) -> float:
    """Difference of the losses over the first one's."""
    return abs(other.loss - one.loss) / abs(one.loss)


def differences(reference: dict[int, Step], other: dict[int, Step]) -> list[str]:
    """What tells the two runs apart, one line each."""
    found = []
    for step in sorted(reference.keys() ^ other.keys()):
        found.append(f"step {step}: only in one of the runs")
    for step in sorted(reference.keys() & other.keys()):
        one, two = reference[step], other[step]
        if (one.first, one.end, one.rows) != (two.first, two.end, two.rows):
            found.append(f"step {step}: other samples")
        # So that a loss that is no number is a difference, too.
        if not relative(one, two) <= TOLERANCE:
            found.append(f"step {step}: the losses {one.loss:.6f} and {two.loss:.6f} differ by more than {TOLERANCE:g}")
    return found


def table(reference: dict[int, Step], other: dict[int, Step]) -> str:
    """Both runs side by side."""
    lines = [
        "      |      uninterrupted run                        |      elastic run                              |",
        " step | ranks  samples      their digest     loss     | ranks  samples      their digest     loss     | "
        "relative difference",
    ]
    for step in sorted(reference.keys() | other.keys()):
        one, two = reference.get(step), other.get(step)
        difference = f" {relative(one, two):.1e}" if one and two else ""
        lines.append(f"{step:5} | {_cells(one)} | {_cells(two)} |{difference}")
    return "\n".join(lines)


def _cells(step: Step | None) -> str:
    if step is None:
        return " " * 45
    return f"{step.ranks:5}  {f'{step.first}-{step.end - 1}':11}  {step.digest}  {step.loss:11.6f}"


def draw(reference: dict[int, Step], other: dict[int, Step], file: Path) -> None:
    """Draws both losses and their difference, with the points where the number of ranks changes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, (losses, difference) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 4.8), height_ratios=[3, 1.2], layout="constrained"
    )
    steps = sorted(reference)
    ranks = sorted({step.ranks for step in reference.values()})
    losses.plot(
        steps,
        [reference[step].loss for step in steps],
        color="#9ecae1",
        linewidth=7,
        solid_capstyle="round",
        label=f"uninterrupted, {' and '.join(map(str, ranks))} ranks",
    )
    steps = sorted(other)
    parts = [[steps[0]]]
    for before, step in pairwise(steps):
        if other[before].ranks == other[step].ranks:
            parts[-1].append(step)
        else:
            parts.append([step])
    path = " → ".join(str(other[part[0]].ranks) for part in parts)
    losses.plot(
        steps,
        [other[step].loss for step in steps],
        color="#08306b",
        linewidth=1.2,
        marker="o",
        markersize=4,
        label=f"elastic, {path} ranks",
    )
    for before, after in pairwise(parts):
        for axes in (losses, difference):
            axes.axvline((before[-1] + after[0]) / 2, color="#d94801", linewidth=1.2, linestyle="--")
        losses.annotate(
            f"{other[before[0]].ranks} → {other[after[0]].ranks} ranks",
            ((before[-1] + after[0]) / 2, 0.06),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            textcoords="offset points",
            color="#d94801",
        )
    losses.set_ylabel("loss")
    losses.legend(frameon=False)
    losses.set_title("The same samples at every step, at any number of ranks", loc="left", fontsize=11)

    common = sorted(reference.keys() & other.keys())
    difference.plot(
        common, [relative(reference[step], other[step]) for step in common], color="#08306b", marker="o", markersize=4
    )
    difference.axhline(TOLERANCE, color="#737373", linewidth=1, linestyle=":")
    difference.annotate(
        f"allowed: {TOLERANCE:g}",
        (1, TOLERANCE),
        xycoords=("axes fraction", "data"),
        xytext=(-4, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        color="#737373",
        fontsize=9,
    )
    # Linear up to the rounding of one number, so that equal losses have a place on the axis.
    difference.set_yscale("symlog", linthresh=1e-8)
    difference.set_ylim(bottom=-2e-9)
    difference.set_ylabel("relative\ndifference")
    difference.set_xlabel("step")
    difference.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (losses, difference):
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
