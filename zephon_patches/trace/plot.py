"""A picture of a run from its traces: loss, data waiting time and realized mixture over the samples of the order.

Needs matplotlib. What a later start from an older checkpoint replaced is drawn pale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from zephon_patches.errors import ConfigError
from zephon_patches.trace.records import Segment, history, read_run

__all__ = ["TracedStep", "plot_run", "traced_steps"]

# Sources with a colour of their own; the others are drawn together.
_SOURCES = 8
_COLORS = ["#08306b", "#d94801", "#238b45", "#6a51a3", "#b8860b", "#2171b5", "#a50f15", "#525252", "#bdbdbd"]
_MARK = "#d94801"


@dataclass(frozen=True)
class TracedStep:
    """One step of one segment, all ranks together."""

    step: int
    cursor: int
    """Behind it"""
    dp_size: int
    loss: float | None
    wait: float
    """Seconds, of the rank that waited longest"""
    sources: dict[str, int]
    """Samples of each"""
    is_final: bool
    """Whether no later start replaced it"""


def traced_steps(segments: Sequence[Segment]) -> list[list[TracedStep]]:
    """The steps of each segment."""
    final = history(segments)
    found = []
    for segment in segments:
        by_step: dict[int, dict[int, dict[str, Any]]] = {}  # step -> place in the mesh -> line; peers have the same
        for rank in segment.ranks:
            for line in rank.lines:
                by_step.setdefault(line["step"], {})[rank.header["dp_rank"]] = line
        steps = []
        for step, lines in sorted(by_step.items()):
            sources: dict[str, int] = {}
            for line in lines.values():
                for name, count in line["sources"].items():
                    sources[name] = sources.get(name, 0) + count
            losses = [line["loss"] for line in lines.values() if "loss" in line]
            steps.append(
                TracedStep(
                    step,
                    next(iter(lines.values()))["next"],
                    segment.header["dp_size"],
                    losses[0] if losses else None,
                    max(line["wait"] for line in lines.values()),
                    sources,
                    final.get(step) is segment,
                )
            )
        found.append(steps)
    return found


def plot_run(run: Path, file: Path, window: int = 10) -> None:
    """Draws a run.

    Args:
        run: Its dump folder.
        file: The picture; its suffix says the format.
        window: Steps over which the mixture is averaged.

    Raises:
        ConfigError: matplotlib is not there, or the picture cannot be written.
        StateError: There are no traces.
    """
    segments = read_run(run)
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("drawing needs matplotlib: pip install 'torchtitan-zephon[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = [steps for steps in traced_steps(segments) if steps]
    figure, panels = pyplot.subplots(
        3, 1, sharex=True, figsize=(9, 6.6), height_ratios=[3, 1.2, 1.6], layout="constrained"
    )
    losses, waits, shares = panels
    final = sorted((step for steps in parts for step in steps if step.is_final), key=lambda step: step.step)
    replaced = [[step for step in steps if not step.is_final] for steps in parts]
    # A repeat has nearly the same losses, so what it replaced lies under it, and is drawn wide.
    for steps in replaced:
        _draw_lines(losses, waits, steps, color="#c6dbef", linewidth=6, solid_capstyle="round")
    _draw_lines(losses, waits, final, color=_COLORS[0], linewidth=1.4, **_markers(final))
    _draw_mixture(shares, final, window)
    _mark_topologies(panels, final)
    if any(replaced):
        losses.plot([], [], color="#c6dbef", linewidth=6, label="trained again later, from an older checkpoint")
        losses.legend(frameon=False, fontsize=9, loc="upper right")
    losses.set_ylabel("loss")
    waits.set_ylabel("waiting for\ndata, ms a step")
    waits.set_ylim(bottom=0)
    shares.set_ylabel(f"share of samples,\n{window} steps")
    shares.set_ylim(0, 1)
    shares.set_xlabel("samples of the order")
    shares.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be written ({error})") from None
    finally:
        pyplot.close(figure)


def _markers(steps: Sequence[TracedStep]) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3} if len(steps) < 80 else {}


def _draw_lines(losses: Any, waits: Any, steps: Sequence[TracedStep], **style: Any) -> None:
    logged = [step for step in steps if step.loss is not None]
    losses.plot([step.cursor for step in logged], [step.loss for step in logged], **style)
    waits.plot([step.cursor for step in steps], [1000 * step.wait for step in steps], **style)


def _draw_mixture(axes: Any, steps: Sequence[TracedStep], window: int) -> None:
    """Stacks the share of each source, averaged over the last steps."""
    totals: dict[str, int] = {}
    for step in steps:
        for name, count in step.sources.items():
            totals[name] = totals.get(name, 0) + count
    names = sorted(totals, key=lambda name: -totals[name])
    shown, rest = names[:_SOURCES], set(names[_SOURCES:])
    heights: list[list[float]] = [[] for _ in range(len(shown) + bool(rest))]
    for number in range(len(steps)):
        recent = steps[max(number + 1 - window, 0) : number + 1]
        total = sum(sum(step.sources.values()) for step in recent)
        groups = [{name} for name in shown] + ([rest] if rest else [])
        for height, group in zip(heights, groups, strict=True):
            count = sum(count for step in recent for name, count in step.sources.items() if name in group)
            height.append(count / max(total, 1))
    labels = shown + ([f"{len(rest)} smaller ones"] if rest else [])
    axes.stackplot([step.cursor for step in steps], heights, labels=labels, colors=_COLORS, alpha=0.75, linewidth=0)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)


def _mark_topologies(panels: Any, steps: Sequence[TracedStep]) -> None:
    """Draws a line where the number of ranks changes."""
    if steps:
        panels[0].set_title(f"begins on {steps[0].dp_size:,} data-parallel ranks", loc="left", fontsize=10)
    changes = [(before, after) for before, after in pairwise(steps) if before.dp_size != after.dp_size]
    for number, (before, after) in enumerate(changes):
        for axes in panels:
            axes.axvline(before.cursor, color=_MARK, linewidth=1.2, linestyle="--")
        panels[0].annotate(
            f"{before.dp_size:,} → {after.dp_size:,} ranks",
            (before.cursor, 0.04 + 0.08 * (number % 3)),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            color=_MARK,
            fontsize=9,
        )
