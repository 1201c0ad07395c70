"""From TorchTitan's JobConfig to a loader.

The trainer derives its gradient accumulation from ``training.global_batch_size``, which it reads after the
loader is built and wants divisible by ``local_batch_size * dp_size``. The loader keeps the user's G, adds the
padding rows that a topology needs, and sets the padded size for the trainer.
"""

import functools
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zephon_patches import mapping
from zephon_patches.errors import ConfigError, InputError
from zephon_patches.loader.build import build_evaluation_loader, build_loader
from zephon_patches.loader.evaluation import EvaluationLoader
from zephon_patches.loader.loader import Loader
from zephon_patches.loader.state import ORDER
from zephon_patches.prepare.inputs import make_input
from zephon_patches.prepare.shards import Input, RecordInput
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.titan.agreement import agree_on_order, others_learn_of_failure
from zephon_patches.titan.attention import check_attention
from zephon_patches.titan.steps import place_to_start, set_steps

__all__ = ["build_training_loader", "build_validation_loader"]

logger = logging.getLogger(__name__)

_FORGE = "torchtitan.experiments.forge.engine"

# Above this share of padding rows the log names a better local batch size.
_NOTABLE_PADDING = 0.10


@others_learn_of_failure()
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
        job_config: The trainer's. ``training.global_batch_size`` is set to the padded size, and ``training.steps`` to
            the steps until the data ends, if they are fewer.
        infinite: Whether the data repeats.
        datasets: TorchTitan's registry, for configs without ``[[data.sources]]``.

    Raises:
        ConfigError: The settings cannot work together.
        InputError, MappingError, StoreError: As ``build_loader``.
    """
    _refuse_unsupported(job_config)
    check_attention(job_config)
    training, data = job_config.training, job_config.data
    inputs = None if data.sources else [_registered("training", training, datasets)]
    global_batch_size = _global_batch_size(training, dp_world_size)
    loader = build_loader(
        data,
        _tokenizer(job_config),
        seq_len=training.seq_len,
        global_batch_size=global_batch_size,
        local_batch_size=training.local_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_world_size,
        infinite=infinite,
        inputs=inputs,
        **asdict(training.dataloader),
    )
    _set_padded_batch_size(training, global_batch_size, dp_world_size)
    if loader.end is not None:
        set_steps(training, loader, *place_to_start(job_config))
    agree_on_order(loader.state_dict()[ORDER])
    return loader


@others_learn_of_failure()
def build_validation_loader(
    *,
    dp_world_size: int,
    dp_rank: int,
    tokenizer: Any,
    job_config: Any,
    datasets: Mapping[str, Any],
) -> EvaluationLoader:
    """Builds the validation loader of one rank; arguments and errors as ``build_training_loader``."""
    validation, data = job_config.validation, job_config.data
    if data.validation_sources:
        inputs: list[Input] = [make_input(source) for source in data.validation_sources]
    else:
        inputs = [_registered("validation", validation, datasets)]
    batch = validation.local_batch_size * dp_world_size
    loader = build_evaluation_loader(
        data,
        _tokenizer(job_config),
        seq_len=validation.seq_len,
        local_batch_size=validation.local_batch_size,
        num_batches=None if validation.steps == -1 else validation.steps,
        dp_rank=dp_rank,
        dp_size=dp_world_size,
        inputs=inputs,
        **asdict(validation.dataloader),
    )
    agree_on_order(loader.description)
    if validation.steps == -1:
        logger.info("data: validation reads every sample once, in %s batches on each rank", f"{len(loader):,}")
    else:
        logger.info(
            "data: validation reads %s batches of %s samples; on another number of ranks a batch has another size, "
            "so other samples are read (validation.steps = -1 always reads all)",
            f"{len(loader):,}",
            f"{batch:,}",
        )
    return loader


def _refuse_unsupported(job_config: Any) -> None:
    if job_config.fault_tolerance.enable:
        raise ConfigError(
            'data.loading_strategy = "zephon" does not work with fault_tolerance.enable: TorchFT keeps a place in the '
            "data for each replica. Turn one of them off; a run that loses nodes is resumed at another size without it"
        )
    checkpoint = job_config.checkpoint
    if job_config.data.on_preempt == "checkpoint" and (not checkpoint.enable or checkpoint.load_only):
        found = "checkpoint.load_only = true" if checkpoint.enable else "checkpoint.enable = false"
        raise ConfigError(
            f'data.on_preempt = "checkpoint" saves a checkpoint, and with {found} none is ever saved; set '
            'checkpoint.enable = true and checkpoint.load_only = false, or data.on_preempt = "stop"'
        )
    if _FORGE in sys.modules:
        raise ConfigError(
            f'data.loading_strategy = "zephon" does not work with {_FORGE}: it reads the global batch size before the '
            'loader is built, which may have to pad it; set data.loading_strategy = "stock"'
        )


def _tokenizer(job_config: Any) -> TextTokenizer:
    """The tokenizer of the model's folder, checked against the model's vocabulary."""
    from torchtitan.protocols.train_spec import get_train_spec

    encoder = TextTokenizer(job_config.model.hf_assets_path, job_config.data.tokenizer_engine)
    name, flavor = job_config.model.name, job_config.model.flavor
    vocab_size = getattr(get_train_spec(name).model_args[flavor], "vocab_size", None)
    if vocab_size is not None and encoder.largest_id >= vocab_size:
        raise ConfigError(
            f"the tokenizer in {encoder.folder} gives ids up to {encoder.largest_id:,}, and the model {name} {flavor} "
            f"has a vocabulary of {vocab_size:,}; set model.hf_assets_path to the model's own tokenizer"
        )
    return encoder


class _PaddedBatchSize(int):
    """The size that the trainer accumulates to; remembers the user's, so that it is never padded twice."""

    requested: int | None
    """None where the user gave none"""


def _global_batch_size(training: Any, dp_size: int) -> int:
    """The user's G, or TorchTitan's default for it."""
    size = training.global_batch_size
    if isinstance(size, _PaddedBatchSize):
        size = -1 if size.requested is None else size.requested
    if size == 0:
        raise ConfigError("training.global_batch_size = 0: expected at least 1, or -1 for TorchTitan's default")
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
    given = training.global_batch_size
    if isinstance(given, _PaddedBatchSize):
        padded.requested = given.requested
    else:
        padded.requested = global_batch_size if given > 0 else None
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


def _registered(table: str, settings: Any, datasets: Mapping[str, Any]) -> Input:
    """The ``dataset`` of TorchTitan's registry in a table, as a source, with its loader and processor as they are."""
    name = settings.dataset.lower()
    sources = "[[data.sources]]" if table == "training" else "[[data.validation_sources]]"
    if name not in datasets:
        raise ConfigError(
            f"{table}.dataset = {settings.dataset!r} is not registered (registered are {', '.join(datasets)}); name "
            f"one of them, or give the files in a {sources} table"
        )
    registered = datasets[name]
    path = settings.dataset_path or registered.path

    def records() -> Any:
        try:
            return registered.loader(path)
        except Exception as error:
            raise InputError(
                f"data set {name!r} cannot be loaded from {path!r} ({error}); set {table}.dataset_path, or give the "
                f"files in a {sources} table"
            ) from error

    # A path that was set is local, also when what it names is gone: then the store may still be there.
    local = settings.dataset_path is not None or os.path.exists(path)
    process = registered.sample_processor
    identity = {"dataset": name, "path": None if local else path, "processor": _identity_of(process)}
    return RecordInput(name, identity, records, process, Path(path) if local else None)


def _identity_of(function: Any) -> list[Any]:
    """What tells a function from others: its name, and the arguments that a partial has bound."""
    if isinstance(function, functools.partial):
        return [_identity_of(function.func), repr(function.args), repr(sorted(function.keywords.items()))]
    return [f"{function.__module__}.{function.__qualname__}"]
