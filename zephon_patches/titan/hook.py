"""The one seam to the trainer: before and after a load, and after each step.

TorchTitan calls ``CheckpointManager.save`` after every step, also when checkpoints are off, and ``load`` once before
the first. The overlay of ``components/checkpoint.py`` calls these functions from there. The manager's states
hold the loader and, as ``train_state``, the trainer.
"""

import functools
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from zephon_patches.errors import ConfigError, LoaderError, StateError
from zephon_patches.loader.loader import Loader
from zephon_patches.loader.state import CURSOR, ORDER, read_state
from zephon_patches.titan.metrics import DataMetrics, paragraph
from zephon_patches.titan.preemption import STAYS, Preemption
from zephon_patches.titan.steps import set_steps
from zephon_patches.titan.tracing import Tracing
from zephon_patches.trace.entries import (
    METADATA,
    another_step,
    holds_train_state,
    loader_keys,
    num_writers,
    read_entries,
)

__all__ = ["after_load", "after_save", "after_step", "attach", "before_load", "unfinished_are_not_counted"]

logger = logging.getLogger(__name__)

# The loaders whose ranks may be without labels. A process may have several; only the trainer's reduces a loss.
_counted: weakref.WeakSet[Loader] = weakref.WeakSet()

_DATALOADER, _TRAIN_STATE = "dataloader", "train_state"
_STRATEGY = 'data.loading_strategy = "zephon"'
_EXCLUDE = 'checkpoint.exclude_from_loading = ["dataloader"]'
_FROM_WEIGHTS = (
    "or start anew from its weights alone: checkpoint.initial_load_path = that folder, checkpoint.folder = a new one, "
    "and data.initial_cursor = the sample to start at"
)


def attach(manager: Any) -> None:
    """Prepares a manager and its trainer when they have been made."""
    loader, trainer = _loader_of(manager), manager.states.get(_TRAIN_STATE)
    manager.preemption = None
    manager.preempted = False
    if loader is None:
        _refuse_another_loader(trainer)
        return
    if hasattr(trainer, "job_config") and trainer.job_config.data.on_preempt == "checkpoint":
        manager.preemption = Preemption()
    manager.steps_before = 0  # the loader's steps at the last call of `after_step`
    manager.tokens_before = 0  # tokens of the steps before this start
    manager.tracing = None
    manager.metrics = DataMetrics(loader)
    manager.written_by = None  # processes that wrote the checkpoint whose place in the data was loaded
    manager.counting_ranks = 1  # ranks whose tokens one saved count stands for: all, but in a stock checkpoint
    if not hasattr(trainer, "metrics_processor"):
        return
    _add_to_log(manager, loader, trainer.metrics_processor)
    if loader.may_be_without_labels:
        _leave_out_ranks_without_labels(loader)
    if loader.samples_may_be_without_labels:
        _divide_by_one_label_at_least(trainer)


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
    if from_hf:
        return
    loader = _loader_of(manager)
    if not (Path(checkpoint) / METADATA).exists():
        if loader is not None and _DATALOADER in states:
            raise StateError(
                f"{checkpoint} has no {METADATA}, with which a checkpoint is complete: it is unfinished, or was saved "
                "for Hugging Face (checkpoint.last_save_in_hf), as a model only. "
                f"{another_step(checkpoint)}; {_FROM_WEIGHTS} (with checkpoint.initial_load_in_hf)"
            )
        return
    keys = loader_keys(checkpoint)
    if loader is None:
        if _DATALOADER in states and ORDER in keys:
            raise StateError(
                f"{checkpoint} was written with {_STRATEGY}, and this run has another strategy; set it, or leave the "
                f"data's place out: {_EXCLUDE}"
            )
        return
    if _DATALOADER in states:
        state = _read_state(checkpoint, keys)
        try:
            loader.check_state(state)
            manager.written_by = num_writers(checkpoint)
        except StateError as error:
            raise StateError(f"{checkpoint}: {error}") from None
    elif not states.keys().isdisjoint(manager.states):  # more than a model is loaded, so the loader was excluded
        _warn_of_what_is_left_out(checkpoint, keys, manager.states.get(_TRAIN_STATE))
        if "world_size" in keys:
            manager.counting_ranks = read_entries(checkpoint, ["world_size"])["world_size"]


def after_load(manager: Any, loaded: bool) -> None:
    """Sets the data's start where no state was loaded, and says where training goes on."""
    loader, trainer = _loader_of(manager), manager.states.get(_TRAIN_STATE)
    if loader is None or not hasattr(trainer, "job_config"):
        return
    manager.steps_before = loader.steps_delivered
    # Upstream saves the tokens of one rank; `after_step` those of all.
    manager.tokens_before = trainer.ntokens_seen * manager.counting_ranks
    initial = trainer.job_config.data.initial_cursor
    if loader.restored:
        if initial:
            logger.info("data: data.initial_cursor = %s does not count, the checkpoint's cursor does", f"{initial:,}")
    else:
        if loader.end is not None and initial > loader.end:
            raise ConfigError(
                f"data.initial_cursor = {initial:,} is behind the end of the data, sample {loader.end:,}; lower it, or "
                "raise data.epochs"
            )
        loader.seek(initial)
        what = "the checkpoint gave no place in the data" if loaded else "no checkpoint was loaded"
        logger.info("data: %s; starting at data.initial_cursor = %s", what, f"{initial:,}")
        loader.log_mixture()
    set_steps(trainer.job_config.training, loader, trainer.step, loader.cursor)
    if trainer.job_config.data.trace:
        manager.tracing = Tracing(loader, trainer.job_config.job.dump_folder, trainer.step)
    manager.metrics.begin()
    written_by = manager.written_by if loader.restored else None
    logger.info("data: %s", paragraph(loader, trainer.job_config, trainer.step, written_by))
    steps = trainer.job_config.training.steps
    if loader.steps_left(loader.cursor) == 0:
        logger.info("data: all samples are trained on and nothing is left to do; raise data.epochs to go on")
    elif trainer.step >= steps:
        logger.info("data: all steps are done and nothing is left to do; raise training.steps to go on")
    elif loader.end is not None:
        _warn_of_an_end_without_a_place(trainer.job_config.checkpoint)
    if (rank := _preempted(manager)) is not None:
        logger.warning("data: SIGTERM on rank %d before the first step: the run ends, with nothing new to save", rank)
        _end_behind(trainer, trainer.step)
        _leave_if_machine_stays(manager)


def after_step(manager: Any, step: int, last_step: bool) -> bool:
    """Checks that the trainer consumed whole steps, and keeps its count of tokens, before anything is saved.

    Returns:
        Whether this is the run's last step: as given, or because the run was asked to end.

    Raises:
        LoaderError: The trainer stopped in the middle of the loader's step, so a checkpoint would repeat samples.
    """
    loader, trainer = _loader_of(manager), manager.states.get(_TRAIN_STATE)
    if loader is None:
        return last_step
    steps = loader.steps_delivered - manager.steps_before
    if loader.delivered_in_step or steps > 1:
        raise LoaderError(
            f"in step {step:,} the trainer took {steps} whole steps of the loader, and then {loader.delivered_in_step} "
            f"of {loader.micro_batches_per_step} micro-batches of the step at sample {loader.cursor:,}; expected: one "
            "whole step. Its gradient accumulation and the loader's global batch disagree, so "
            "training.global_batch_size was changed after the loader was built"
        )
    manager.steps_before = loader.steps_delivered
    if steps and manager.tracing is not None:
        manager.tracing.step(step)
    if hasattr(trainer, "ntokens_seen"):
        # Upstream counts its own rank's, saves that of one rank, and sums over the ranks of today.
        trainer.ntokens_seen = _tokens_seen(manager, loader)
    if not last_step and (rank := _preempted(manager)) is not None:
        logger.warning(
            "data: SIGTERM on rank %d: the run ends behind step %s, with a full checkpoint", rank, f"{step:,}"
        )
        _end_behind(trainer, step)
        _save_in_full(manager)
        manager.preempted = True
        return True
    return last_step


def after_save(manager: Any) -> None:
    """Behind what the manager saved in a step, or did not."""
    if manager.preempted:
        _leave_if_machine_stays(manager)


@contextmanager
def unfinished_are_not_counted(manager: Any) -> Iterator[None]:
    """Lets the manager keep ``keep_latest_k`` checkpoints besides those whose writers were killed.

    It counts folders. The newest may still be being written, and next to one that never will be complete, the last
    that can be loaded might be removed.
    """
    kept, trainer = manager.keep_latest_k, manager.states.get(_TRAIN_STATE)
    if kept and _loader_of(manager) is not None:
        folders = [path for path in Path(manager.folder).glob("step-*") if path.name != f"step-{trainer.step}"]
        manager.keep_latest_k += sum(not (path / METADATA).exists() for path in folders)
    try:
        yield
    finally:
        manager.keep_latest_k = kept


def _preempted(manager: Any) -> int | None:
    """The rank that was asked to end, if one was; a collective where ``data.on_preempt`` asks for it."""
    return None if manager.preemption is None else manager.preemption.asked_rank()


def _end_behind(trainer: Any, step: int) -> None:
    """Lets the trainer's loop end as it does behind the last step, without a validation in between."""
    trainer.job_config.training.steps = step
    trainer.job_config.validation.enable = False


def _leave_if_machine_stays(manager: Any) -> None:
    """Ends this rank so that torchrun starts it anew, if only other machines were asked to end.

    Raises:
        SystemExit: It does.
    """
    if manager.preemption.machine_stays():
        logger.warning(
            "data: this machine had no SIGTERM: its ranks end with status %d, to be started anew without the machine "
            "that had one",
            STAYS,
        )
        manager.states[_TRAIN_STATE].close()
        raise SystemExit(STAYS)


def _save_in_full(manager: Any) -> None:
    """Lets the manager's last checkpoint, which it waits for, be one that can be resumed."""
    manager.last_save_model_only = manager.last_save_in_hf = False
    try:
        manager._async_wait()
    except Exception as error:  # of any kind: it comes from another thread or process
        # With async_with_pinned_mem a process of PyTorch's writes, which a SIGTERM to the process group ends.
        logger.warning("data: the checkpoint before was not completed (%s); this one takes its place", error)
    manager.save_future = None


def _refuse_another_loader(trainer: Any) -> None:
    """Some models of TorchTitan build a loader of their own, which knows nothing of the strategy."""
    config = getattr(trainer, "job_config", None)
    data = getattr(config, "data", None)
    if config is not None and data is not None and data.loading_strategy == "zephon":
        raise ConfigError(
            f"model {config.model.name} builds its own data loader, which {_STRATEGY} cannot replace; set "
            'data.loading_strategy = "stock"'
        )


def _loader_of(manager: Any) -> Loader | None:
    loader = manager.states.get(_DATALOADER)
    return loader if isinstance(loader, Loader) else None


def _tokens_seen(manager: Any, loader: Loader) -> int:
    """Tokens of all samples trained on, over all starts and ranks, padding rows left out."""
    return int(manager.tokens_before) + loader.samples_delivered * loader.seq_len


def _add_to_log(manager: Any, loader: Loader, metrics: Any) -> None:
    """Lets what is logged of a step have the tokens of all ranks, and the values of the data."""
    upstream = metrics.log

    @functools.wraps(upstream)
    def log(step: int, avg: float, largest: float, norm: float, extra_metrics: dict[str, Any] | None = None) -> Any:
        if extra_metrics and "n_tokens_seen" in extra_metrics:
            tokens = {"n_tokens_seen": _tokens_seen(manager, loader)}
            extra_metrics = {**extra_metrics, **tokens, **manager.metrics.values()}
        if manager.tracing is not None:
            manager.tracing.loss = float(avg)
        return upstream(step, avg, largest, norm, extra_metrics)

    metrics.log = log


def _divide_by_one_label_at_least(trainer: Any) -> None:
    """Lets a step in which no label of any rank counts have the loss 0; 0 / 0 would end all weights."""
    upstream = trainer.forward_backward_step

    @functools.wraps(upstream)
    def forward_backward_step(*, global_valid_tokens: Any, **kwargs: Any) -> Any:
        if isinstance(global_valid_tokens, Tensor):  # on one rank; a float that was reduced over several
            global_valid_tokens = global_valid_tokens.clamp(min=1)
        else:
            global_valid_tokens = max(global_valid_tokens, 1.0)
        return upstream(global_valid_tokens=global_valid_tokens, **kwargs)

    trainer.forward_backward_step = forward_backward_step


def _leave_out_ranks_without_labels(loader: Loader) -> None:
    """Lets a rank none of whose labels counts take no part in the largest loss: its own is 0 / 0."""
    from torchtitan.distributed import utils

    _counted.add(loader)
    if hasattr(utils.dist_max, "upstream"):
        return
    upstream = utils.dist_max

    @functools.wraps(upstream)
    def dist_max(x: Any, *args: Any, **kwargs: Any) -> Any:
        if any(loader.samples_delivered and not loader.has_labels_in_last_step for loader in _counted):
            x = x.masked_fill(x.isnan(), float("-inf"))
        return upstream(x, *args, **kwargs)

    dist_max.upstream = upstream  # type: ignore[attr-defined]
    utils.dist_max = dist_max


def _read_state(checkpoint: str, keys: list[str]) -> dict[str, Any]:
    """The loader's state in a checkpoint.

    Raises:
        StateError: There is none, or another loader's, or half of one.
    """
    if CURSOR in keys and ORDER in keys:
        state = read_entries(checkpoint, [CURSOR, ORDER])
        try:
            read_state(state)
        except StateError as error:
            raise StateError(f"{checkpoint}: {error}. {another_step(checkpoint)}") from None
        return state
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
            f"it is incomplete or another loader's. {another_step(checkpoint)}"
        )
    missing = f"{checkpoint} holds no place in the data, so training cannot go on from it where it stopped"
    if holds_train_state(checkpoint):
        raise StateError(
            f"{missing}: it was saved without a loader. {another_step(checkpoint)}; or leave the data's place out: "
            f"{_EXCLUDE}, and data.initial_cursor = the sample to start at"
        )
    raise StateError(
        f"{missing}: it was saved as a model only (checkpoint.last_save_model_only is true by default). "
        f"{another_step(checkpoint)}; {_FROM_WEIGHTS}"
    )


def _warn_of_an_end_without_a_place(checkpoint: Any) -> None:
    """Told at the start, while it can still be changed: when the run has ended, it is too late."""
    if checkpoint.enable and checkpoint.last_save_model_only:
        logger.warning(
            "data: the last checkpoint will hold the model only (checkpoint.last_save_model_only is true by default): "
            "the run cannot go on from it when data.epochs is raised, and starting it again will be an error; set "
            "checkpoint.last_save_model_only = false to keep the place in the data"
        )


def _warn_of_what_is_left_out(checkpoint: str, keys: list[str], trainer: Any) -> None:
    if CURSOR not in keys or not hasattr(trainer, "job_config"):
        return
    cursor = read_entries(checkpoint, [CURSOR])[CURSOR]
    if cursor:
        logger.warning(
            "data: %s stands at sample %s, but checkpoint.exclude_from_loading leaves that out: the data starts at "
            "data.initial_cursor = %s, at this start and at every other until the setting is removed",
            checkpoint,
            f"{cursor:,}",
            f"{trainer.job_config.data.initial_cursor:,}",
        )
