"""The one seam to the trainer: what happens after each step and after a load.

TorchTitan calls ``CheckpointManager.save`` after every step, also when checkpoints are off, and ``load`` once
before the first. The overlay of ``components/checkpoint.py`` calls these functions from there.
"""

import logging
from typing import Any

from zephon_patches.errors import LoaderError
from zephon_patches.loader.loader import Loader

__all__ = ["after_load", "after_step"]

logger = logging.getLogger(__name__)


def after_step(manager: Any, step: int) -> None:
    """Checks that the trainer consumed whole steps, before anything is saved.

    Raises:
        LoaderError: The trainer stopped in the middle of the loader's step, so a checkpoint would repeat samples.
    """
    loader = manager.states.get("dataloader")
    if isinstance(loader, Loader) and loader.delivered_in_step:
        raise LoaderError(
            f"after step {step:,} the trainer has taken {loader.delivered_in_step} of the "
            f"{loader.micro_batches_per_step} micro-batches of the step at sample {loader.cursor:,}; its gradient "
            "accumulation and the loader's global batch disagree, so training.global_batch_size was changed after "
            "the loader was built"
        )


def after_load(manager: Any, loaded: bool) -> None:
    """Says where training goes on."""
    loader = manager.states.get("dataloader")
    if isinstance(loader, Loader):
        trainer = manager.states.get("train_state")
        logger.info(
            "data: training starts at sample %s (step %s of %s)",
            f"{loader.cursor:,}",
            f"{trainer.step:,}" if trainer is not None else "?",
            f"{trainer.job_config.training.steps:,}" if trainer is not None else "?",
        )
