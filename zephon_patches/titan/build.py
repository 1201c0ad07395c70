"""From TorchTitan's JobConfig to a loader.

The trainer derives its gradient accumulation from ``training.global_batch_size``, which it reads after the
loader is built and wants divisible by ``local_batch_size * dp_size``. The loader keeps the user's G, adds the
padding rows that a topology needs, and sets the padded size for the trainer.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zephon_patches import mapping
from zephon_patches.errors import ConfigError, InputError
from zephon_patches.loader.loader import Loader, build_loader
from zephon_patches.prepare.shards import Input, RecordInput

__all__ = ["build_training_loader"]

logger = logging.getLogger(__name__)

# Above this share of padding rows the log names a better local batch size.
_NOTABLE_PADDING = 0.10


def build_training_loader(
    *,
    dp_world_size: int,
    dp_rank: int,
    tokenizer: Any,
    job_config: Any,
    infinite: bool,
    datasets: Mapping[str, Any],
) -> Loader:
    """Builds the training loader of one rank.

    Args:
        dp_world_size: Size of the batch mesh.
        dp_rank: Rank in it.
        tokenizer: The trainer's; its ids are those of ``model.hf_assets_path``, which is read here.
        job_config: The trainer's. ``training.global_batch_size`` is set to the padded size.
        infinite: Whether the data repeats.
        datasets: TorchTitan's registry, for configs without ``[[data.sources]]``.

    Raises:
        ConfigError: The settings cannot work together.
        InputError, MappingError, StoreError: As ``build_loader``.
    """
    training, data = job_config.training, job_config.data
    inputs = None if data.sources else [_registered(training, datasets)]
    global_batch_size = _global_batch_size(training, dp_world_size)
    loader = build_loader(
        data,
        job_config.model.hf_assets_path,
        seq_len=training.seq_len,
        global_batch_size=global_batch_size,
        local_batch_size=training.local_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_world_size,
        num_workers=training.dataloader.num_workers,
        infinite=infinite,
        prefetch_factor=training.dataloader.prefetch_factor,
        persistent_workers=training.dataloader.persistent_workers,
        pin_memory=training.dataloader.pin_memory,
        inputs=inputs,
    )
    _set_padded_batch_size(training, global_batch_size, dp_world_size)
    return loader


class _PaddedBatchSize(int):
    """The size that the trainer accumulates to; remembers the user's, so that it is never padded twice."""

    requested: int


def _global_batch_size(training: Any, dp_size: int) -> int:
    """The user's G, or TorchTitan's default for it."""
    size = training.global_batch_size
    if isinstance(size, _PaddedBatchSize):
        return size.requested
    if size > 0:
        return int(size)
    size = training.local_batch_size * dp_size
    logger.info(
        "data: training.global_batch_size is not set, so a step takes local_batch_size x %d ranks = %s samples. "
        "Another number of ranks will change the size of a step; the order of the samples goes on either way",
        dp_size,
        f"{size:,}",
    )
    return int(size)


def _set_padded_batch_size(training: Any, global_batch_size: int, dp_size: int) -> None:
    local = training.local_batch_size
    padded = _PaddedBatchSize(mapping.padded_batch_size(global_batch_size, local, dp_size))
    padded.requested = global_batch_size
    training.global_batch_size = padded
    steps = mapping.micro_batches_per_step(global_batch_size, local, dp_size)
    padding = padded - global_batch_size
    logger.info(
        "data: a step takes %s samples: %d ranks x %d micro-batches x %d rows = %s rows, %s of them padding",
        f"{global_batch_size:,}",
        dp_size,
        steps,
        local,
        f"{int(padded):,}",
        f"{padding:,}",
    )
    best = mapping.best_local_batch_size(global_batch_size, local, dp_size)
    if padding > _NOTABLE_PADDING * padded and best != local:
        fewer = mapping.padded_batch_size(global_batch_size, best, dp_size) - global_batch_size
        logger.warning(
            "data: %.0f %% of the rows are padding; training.local_batch_size = %d would need %s padding rows",
            100 * padding / padded,
            best,
            f"{fewer:,}",
        )


def _registered(training: Any, datasets: Mapping[str, Any]) -> Input:
    """``training.dataset`` of TorchTitan's registry as a source, with its loader and processor as they are."""
    name = training.dataset.lower()
    if name not in datasets:
        raise ConfigError(
            f"training.dataset = {training.dataset!r} is not registered (registered are {', '.join(datasets)}); name "
            "one of them, or give the files in a [[data.sources]] table"
        )
    registered = datasets[name]
    path = training.dataset_path or registered.path

    def records() -> Any:
        try:
            return registered.loader(path)
        except Exception as error:
            raise InputError(
                f"data set {name!r} cannot be loaded from {path!r} ({error}); set training.dataset_path, or give the "
                "files in a [[data.sources]] table"
            ) from error

    process = registered.sample_processor
    named = getattr(process, "func", process)  # functools.partial has no name of its own
    identity = {
        "dataset": name,
        "path": None if os.path.exists(path) else path,
        "processor": f"{named.__module__}.{named.__qualname__}",
    }
    return RecordInput(name, identity, records, process, Path(path) if os.path.exists(path) else None)
