"""The one seam to the trainer: before and after a load, and after each step.

TorchTitan calls ``CheckpointManager.save`` after every step, also when checkpoints are off, and ``load`` once before
the first. The overlay of ``components/checkpoint.py`` calls these functions from there. The manager's states
hold the loader and, as ``train_state``, the trainer.
"""

import functools
import logging
import os
from pathlib import Path
from typing import Any

from zephon_patches.errors import LoaderError, StateError
from zephon_patches.loader.loader import Loader
from zephon_patches.loader.state import CURSOR, ORDER
from zephon_patches.titan.entries import loader_keys, read_entries

__all__ = ["after_load", "after_step", "attach", "before_load"]

logger = logging.getLogger(__name__)

_DATALOADER, _TRAIN_STATE = "dataloader", "train_state"
_STRATEGY = 'data.loading_strategy = "zephon"'
_EXCLUDE = 'checkpoint.exclude_from_loading = ["dataloader"]'


def attach(manager: Any) -> None:
    """Prepares a manager and its trainer when they have been made."""
    loader, trainer = _loader_of(manager), manager.states.get(_TRAIN_STATE)
    if loader is None or not hasattr(trainer, "metrics_processor"):
        return
    manager.tokens_before = 0  # tokens of the steps before this start
    manager.counting_ranks = 1  # ranks whose tokens one saved count stands for: all, but in a stock checkpoint
    _log_global_tokens(manager, loader, trainer.metrics_processor)
    _leave_out_ranks_without_tokens(loader)


def before_load(manager: Any, states: dict[str, Any], checkpoint: str, from_hf: bool) -> None:
    """Looks at a checkpoint before DCP does, so that what does not fit is said in words about data.

    Args:
        manager: TorchTitan's.
        states: What will be loaded.
        checkpoint: Its folder.
        from_hf: Whether it is in Hugging Face's format, which holds a model only.

    Raises:
        StateError: The checkpoint's loader state cannot be loaded.
    """
    if from_hf or not (Path(checkpoint) / ".metadata").exists():
        return
    keys = loader_keys(checkpoint)
    loader = _loader_of(manager)
    if loader is None:
        if _DATALOADER in states and ORDER in keys:
            raise StateError(
                f"{checkpoint} was written with {_STRATEGY}, and this run has another strategy; set it, or leave the "
                f"data's place out: {_EXCLUDE}"
            )
        return
    trainer = manager.states[_TRAIN_STATE]
    if _DATALOADER in states:
        loader.check_state(_read_state(checkpoint, keys))
    elif _TRAIN_STATE in states:
        _warn_of_what_is_left_out(checkpoint, keys, trainer.job_config.data.initial_cursor)
        if "world_size" in keys:
            manager.counting_ranks = read_entries(checkpoint, ["world_size"])["world_size"]


def after_load(manager: Any, loaded: bool) -> None:
    """Sets the data's start where no state was loaded, and says where training goes on."""
    loader, trainer = _loader_of(manager), manager.states.get(_TRAIN_STATE)
    if loader is None or not hasattr(trainer, "job_config"):
        return
    # Upstream saves the tokens of one rank; `after_step` those of all.
    manager.tokens_before = trainer.ntokens_seen * manager.counting_ranks
    initial = trainer.job_config.data.initial_cursor
    if loader.restored:
        if initial:
            logger.info("data: data.initial_cursor = %s does not count, the checkpoint's cursor does", f"{initial:,}")
    else:
        loader.seek(initial)
        what = "the checkpoint gave no place in the data" if loaded else "no checkpoint was loaded"
        logger.info("data: %s; starting at data.initial_cursor = %s", what, f"{initial:,}")
    logger.info(
        "data: training starts at sample %s (step %s of %s)",
        f"{loader.cursor:,}",
        f"{trainer.step:,}",
        f"{trainer.job_config.training.steps:,}",
    )


def after_step(manager: Any, step: int) -> None:
    """Checks that the trainer consumed whole steps, and keeps its count of tokens, before anything is saved.

    Raises:
        LoaderError: The trainer stopped in the middle of the loader's step, so a checkpoint would repeat samples.
    """
    loader, trainer = _loader_of(manager), manager.states.get(_TRAIN_STATE)
    if loader is None:
        return
    if loader.delivered_in_step:
        raise LoaderError(
            f"after step {step:,} the trainer has taken {loader.delivered_in_step} of the "
            f"{loader.micro_batches_per_step} micro-batches of the step at sample {loader.cursor:,}; its gradient "
            "accumulation and the loader's global batch disagree, so training.global_batch_size was changed after "
            "the loader was built"
        )
    if hasattr(trainer, "ntokens_seen"):
        # Upstream counts its own rank's, saves that of one rank, and sums over the ranks of today.
        trainer.ntokens_seen = _tokens_seen(manager, loader)


def _loader_of(manager: Any) -> Loader | None:
    loader = manager.states.get(_DATALOADER)
    return loader if isinstance(loader, Loader) else None


def _tokens_seen(manager: Any, loader: Loader) -> int:
    """Tokens of all samples trained on, over all starts and ranks, padding rows left out."""
    return int(manager.tokens_before) + loader.samples_delivered * loader.seq_len


def _log_global_tokens(manager: Any, loader: Loader, metrics: Any) -> None:
    upstream = metrics.log

    @functools.wraps(upstream)
    def log(*args: Any, extra_metrics: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        if extra_metrics and "n_tokens_seen" in extra_metrics:
            extra_metrics = {**extra_metrics, "n_tokens_seen": _tokens_seen(manager, loader)}
        return upstream(*args, extra_metrics=extra_metrics, **kwargs)

    metrics.log = log


def _leave_out_ranks_without_tokens(loader: Loader) -> None:
    """Lets a rank whose rows are all padding take no part in the largest loss: its own is 0 / 0."""
    from torchtitan.distributed import utils

    upstream = getattr(utils.dist_max, "upstream", utils.dist_max)

    @functools.wraps(upstream)
    def dist_max(x: Any, *args: Any, **kwargs: Any) -> Any:
        return upstream(x if loader.rows_in_last_step else x.new_full(x.shape, float("-inf")), *args, **kwargs)

    dist_max.upstream = upstream  # type: ignore[attr-defined]
    utils.dist_max = dist_max


def _read_state(checkpoint: str, keys: list[str]) -> dict[str, Any]:
    """The loader's state in a checkpoint.

    Raises:
        StateError: There is none, or another loader's, or half of one.
    """
    if CURSOR in keys and ORDER in keys:
        return read_entries(checkpoint, [CURSOR, ORDER])
    if any(key.startswith("dp_rank_") for key in keys):
        ranks = read_entries(checkpoint, ["world_size"])["world_size"] if "world_size" in keys else "some"
        raise StateError(
            f"{checkpoint} was written by TorchTitan's own loader on {ranks} data-parallel ranks: it holds their "
            f"places in the data, which cannot become one cursor. Go on without them: {_EXCLUDE}, and "
            "data.initial_cursor = the number of samples to leave out (README.md, 'Move a stock run over')"
        )
    if keys:
        raise StateError(
            f"{checkpoint}: the loader's entries are {', '.join(map(repr, keys))}, expected {CURSOR!r} and {ORDER!r}; "
            f"it is incomplete or another loader's. Resume from another one: checkpoint.load_step{_others(checkpoint)}"
        )
    raise StateError(
        f"{checkpoint} holds no place in the data, so training cannot go on from it where it stopped: it was saved as "
        "a model only (checkpoint.last_save_model_only is true by default) or without a loader. Resume from another "
        f"one: checkpoint.load_step{_others(checkpoint)}; or leave the data's place out: {_EXCLUDE}, and "
        "data.initial_cursor = the sample to start at"
    )


def _others(checkpoint: str) -> str:
    """The other steps that are beside a checkpoint, for a message."""
    folder = Path(checkpoint)
    steps = [name[len("step-") :] for name in os.listdir(folder.parent) if name.startswith("step-")]
    others = sorted((int(step) for step in steps if step.isdigit() and f"step-{step}" != folder.name), reverse=True)
    return f" ({', '.join(map(str, others[:5]))})" if others else ""


def _warn_of_what_is_left_out(checkpoint: str, keys: list[str], initial_cursor: int) -> None:
    if CURSOR not in keys:
        return
    cursor = read_entries(checkpoint, [CURSOR])[CURSOR]
    if cursor:
        logger.warning(
            "data: %s stands at sample %s, but checkpoint.exclude_from_loading leaves that out: the data starts at "
            "data.initial_cursor = %s, at this start and at every other until the setting is removed",
            checkpoint,
            f"{cursor:,}",
            f"{initial_cursor:,}",
        )
