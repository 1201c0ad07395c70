"""How many steps a run over data with an end takes.

The trainer ends at ``training.steps``, saves its last checkpoint there, and makes its learning rate's schedule for so
many; running out of data instead, it would save nothing. So when the loader is built the number is lowered to the steps
that the data has. They are counted from where the run will start: the step and cursor of the checkpoint that TorchTitan
is about to load, which is looked up here by its rules, since the schedule is made before it loads. At a resume with
another global batch the steps behind are as many as they were, those ahead are of the new size.
"""

import logging
import os
import re
from pathlib import Path
from typing import Any

from zephon_patches.errors import StateError
from zephon_patches.loader.loader import Loader
from zephon_patches.loader.state import CURSOR
from zephon_patches.trace.entries import LOADER, METADATA, TRAIN_STATE, read_entries

__all__ = ["place_to_start", "set_steps"]

logger = logging.getLogger(__name__)

_DATALOADER, _TRAIN_STATE = LOADER.rstrip("."), TRAIN_STATE.rstrip(".")


class _Steps(int):
    """The steps that the data has; remembers the user's, so that more data gives more steps again."""

    requested: int


def set_steps(training: Any, loader: Loader, step: int, cursor: int) -> None:
    """Lowers ``training.steps`` to where the data ends; does nothing for data without an end.

    Args:
        training: The trainer's settings.
        loader: Knows the end.
        step: The trainer's at the start.
        cursor: The loader's at the start.
    """
    left = loader.steps_left(cursor)
    if left is None:
        return
    requested = getattr(training.steps, "requested", training.steps)
    steps = _Steps(min(requested, step + left))
    steps.requested = int(requested)
    if steps == training.steps and isinstance(training.steps, _Steps):
        return
    training.steps = steps
    logger.info(
        "data: the data ends at sample %s, in %s steps from sample %s (step %s) on; training.steps is %s, of %s that "
        "are set",
        f"{loader.end:,}",
        f"{left:,}",
        f"{cursor:,}",
        f"{step:,}",
        f"{int(steps):,}",
        f"{steps.requested:,}",
    )


def place_to_start(job_config: Any) -> tuple[int, int]:
    """(step, cursor) at which the trainer will start: those of the checkpoint that TorchTitan will load, if any.

    A checkpoint that cannot be read counts as none here: its load, a little later, says what is wrong with it.
    """
    step, cursor = 0, job_config.data.initial_cursor
    checkpoint = _checkpoint_to_load(job_config)
    if checkpoint is None or not (Path(checkpoint) / METADATA).exists():
        return step, cursor
    excluded = job_config.checkpoint.exclude_from_loading
    try:
        if _TRAIN_STATE not in excluded:
            step = read_entries(checkpoint, ["step"], TRAIN_STATE)["step"]
        if _DATALOADER not in excluded:
            cursor = read_entries(checkpoint, [CURSOR])[CURSOR]
    except StateError:
        return 0, job_config.data.initial_cursor
    return step, cursor


def _checkpoint_to_load(job_config: Any) -> str | None:
    """The folder of the checkpoint that TorchTitan will load with more than a model, by ``CheckpointManager.load``."""
    checkpoint = job_config.checkpoint
    if not checkpoint.enable:
        return None
    folder = os.path.join(job_config.job.dump_folder, checkpoint.folder)
    if not os.path.exists(folder):
        return None if checkpoint.initial_load_model_only else checkpoint.initial_load_path
    step = _latest_step(folder) if checkpoint.load_step == -1 else checkpoint.load_step
    return os.path.join(folder, f"step-{step}") if step > 0 else None  # step 0 is a model


def _latest_step(folder: str) -> int:
    found = [-1]
    for name in os.listdir(folder):
        match = re.search(r"step-(\d+)", name)
        files = (METADATA, "model.safetensors.index.json")
        if match and any(os.path.isfile(os.path.join(folder, name, file)) for file in files):
            found.append(int(match.group(1)))
    return max(found)
