"""A checkpoint's place in the data, and what a resume with a config would make of it. Needs torch; reads no model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zephon_patches.errors import StateError
from zephon_patches.loader.state import CURSOR, ORDER, check_order, read_state
from zephon_patches.order.stages import Stage, Stages
from zephon_patches.store.history import file_changes, find_manifest
from zephon_patches.store.manifest import Manifest
from zephon_patches.trace.entries import METADATA, TRAIN_STATE, loader_keys, read_entries
from zephon_patches.trace.steps import Basis
from zephon_patches.trace.view import DataView

__all__ = ["Contents", "Difference", "Verdict", "basis_of_checkpoint", "compare", "read_checkpoint"]


@dataclass(frozen=True)
class Contents:
    """What a checkpoint says of the data."""

    folder: Path
    step: int | None
    """None if it holds no trainer"""
    cursor: int
    order: dict[str, Any]

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Where each source stands at the cursor: epoch and position, None where they do not follow from the order."""
        counts = _counts(self.order, self.cursor)
        places = []
        for number, source in enumerate(self.order["sources"]):
            samples = source["samples"]
            epoch, position = (None, None) if counts is None or not samples else divmod(counts[number], samples)
            places.append({"source": source["name"], "epoch": epoch, "position": position, "samples": samples})
        return places


@dataclass(frozen=True)
class Difference:
    """A setting that is another one in the checkpoint than in the config; None where it is not set."""

    setting: str
    checkpoint: Any
    config: Any


@dataclass(frozen=True)
class Verdict:
    """What a resume would do."""

    accepted: bool
    reason: str
    """Why not, as the run would say it; or what an accepted change is"""
    differences: list[Difference]
    """All of them, also those that a resume does not mind"""


def read_checkpoint(folder: Path) -> Contents:
    """Reads the loader's two entries of a checkpoint, and the trainer's step where there is one.

    Raises:
        StateError: It is no checkpoint, or holds no place in the data of this pipeline, or is damaged.
    """
    if not (folder / METADATA).exists():
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{METADATA}"))
        hint = f"; the checkpoints in it are {', '.join(inside)}" if inside else ""
        raise StateError(f"{folder}: no complete checkpoint here ({METADATA} is missing){hint}")
    keys = loader_keys(str(folder))
    if not {CURSOR, ORDER} <= set(keys):
        found = ", ".join(keys) or "none"
        raise StateError(
            f"{folder}: holds no place in the data of this pipeline (entries of a loader: {found}); it was saved as a "
            'model only, or with another data.loading_strategy than "zephon"'
        )
    try:
        cursor, order = read_state(read_entries(str(folder), [CURSOR, ORDER]))
    except StateError as error:
        raise StateError(f"{folder}: {error}") from None
    try:
        step = read_entries(str(folder), ["step"], TRAIN_STATE)["step"]
    except StateError:
        step = None  # of a loop other than TorchTitan's
    return Contents(folder, step, cursor, order)


def basis_of_checkpoint(view: DataView, folder: Path) -> Basis:
    """The place of a checkpoint, for counting the steps after it.

    Raises:
        StateError: As ``read_checkpoint``; or it counts in another order than the config's; or it knows no step.
    """
    contents = read_checkpoint(folder)
    verdict = compare(contents, view)
    if not verdict.accepted:
        raise StateError(f"{folder}: {verdict.reason}")
    if contents.step is None:
        raise StateError(f"{folder}: holds no trainer's step, so no step can be counted from it")
    size = view.config.global_batch_size
    size, by = (size, view.config.path) if size > 0 else (contents.order["global_batch_size"], "the checkpoint")
    told_by = f"{folder} at sample {contents.cursor:,} after step {contents.step:,}, and {size:,} samples a step ({by})"
    return Basis(contents.step, contents.cursor, size, told_by)


def compare(contents: Contents, view: DataView) -> Verdict:
    """What a resume from a checkpoint with a config would do, and in what they differ."""
    present = json.loads(view.description)

    def data_changes(source: int, data: str) -> list[str]:
        store = view.stores[source]
        before = find_manifest(store.folder.parent, data)
        return file_changes(before, Manifest.read(store.folder)) if before else []

    differences = _differences(_flat(contents.order), _flat(present), view.config.global_batch_size)
    try:
        accepted = check_order(contents.order, present, contents.cursor, data_changes, view.config.data.accept_change)
    except StateError as error:
        return Verdict(False, str(error), differences)
    if view.end is not None and contents.cursor > view.end:
        reason = f"the cursor is {contents.cursor:,}, and the data ends at sample {view.end:,}; raise data.epochs"
        return Verdict(False, reason, differences)
    return Verdict(True, "; ".join(accepted), differences)


def _flat(order: dict[str, Any]) -> dict[str, Any]:
    """An order's settings, each under a name of its own."""
    flat = {key: value for key, value in order.items() if not isinstance(value, list | dict)}
    del flat["fingerprint"], flat["format"]
    for source in order["sources"]:
        flat |= {f"source {source['name']}: {key}": value for key, value in source.items() if key != "name"}
    for stage in order.get("stages", []):
        flat[f"mixture from sample {stage['at']:,} on"] = _weights_in_words(stage["weights"])
    if skip := order.get("skip"):
        flat["skip"] = ", ".join(f"[{start}, {stop})" for start, stop in skip)
    return flat


def _differences(before: dict[str, Any], now: dict[str, Any], batch: int) -> list[Difference]:
    now = {**now, "global_batch_size": batch if batch > 0 else "not set"}
    names = [*before, *(name for name in now if name not in before)]
    return [Difference(n, before.get(n), now.get(n)) for n in names if before.get(n) != now.get(n)]


def _weights_in_words(weights: Any) -> str:
    if not isinstance(weights, dict):
        return f"weights with fingerprint {weights}"
    return ", ".join(f"{name} {weight}" for name, weight in weights.items())


def _counts(order: dict[str, Any], cursor: int) -> list[int] | None:
    """Samples of each source below a cursor; None if the order has but a fingerprint of its weights."""
    names = [source["name"] for source in order["sources"]]
    stages = order.get("stages") or [{"at": 0, "weights": dict.fromkeys(names, 1)}]
    try:
        exact = [Stage(s["at"], tuple(int(s["weights"].get(name, 0)) for name in names)) for s in stages]
        return Stages(exact).counts(cursor)
    except (AttributeError, KeyError, TypeError, ValueError, AssertionError):
        return None
