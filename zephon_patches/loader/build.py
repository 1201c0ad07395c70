"""Builds loaders: opens the stores, or makes them first, and lays the global order over them."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zephon_patches import mapping
from zephon_patches.config import DataConfig, whole
from zephon_patches.errors import ConfigError
from zephon_patches.loader.assemble import ExactStages, Mixtures, describe_data, end_of, make_order, mixtures_of
from zephon_patches.loader.collate import MicroBatchReader
from zephon_patches.loader.evaluation import EvaluationLoader
from zephon_patches.loader.loader import Loader
from zephon_patches.loader.plans import open_plans
from zephon_patches.loader.state import describe_order
from zephon_patches.loader.workers import Delivery
from zephon_patches.mapping import Skips, Topology
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.prepare.build import Building, check_input, open_or_build, tokenizer_for
from zephon_patches.prepare.inputs import make_input
from zephon_patches.prepare.shards import Input
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.samples.chunking import num_samples
from zephon_patches.samples.plan_list import PlanList
from zephon_patches.samples.sequence import Sampling

__all__ = ["build_evaluation_loader", "build_loader"]

logger = logging.getLogger(__name__)

# Seconds that other ranks leave to rank 0 to start building, so that the bar is where people look. Of each further
# machine, one rank joins in then; it tokenizes with threads on all the machine's cores.
_PATIENCE = 3.0

# Sources of a mixture that the log names.
_LISTED = 8


def build_loader(
    config: DataConfig,
    tokenizer: str | Path | TextTokenizer,
    *,
    seq_len: int,
    global_batch_size: int,
    local_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    num_workers: int = 0,
    infinite: bool = True,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    multiprocessing_context: str | None = None,
    inputs: Sequence[Input] | None = None,
) -> Loader:
    """Builds the training loader of one rank; tokenizes the sources first where that has not been done.

    Args:
        config: The data and its order.
        tokenizer: Folder with ``tokenizer.json`` and, for BOS and EOS, ``tokenizer_config.json``; or what it holds.
        seq_len: Tokens of a sample.
        global_batch_size: Samples of an optimizer step over all ranks, at least ``dp_size``.
        local_batch_size: Rows of a micro-batch.
        dp_rank: Rank in the batch mesh; TP, PP and CP peers have the same.
        dp_size: Size of the batch mesh.
        num_workers: Worker processes that read ahead; 0 reads in the calling process.
        infinite: Goes on with epoch after epoch; otherwise ends after one. ``config.epochs`` wins over both.
        prefetch_factor, persistent_workers, pin_memory, multiprocessing_context: See ``Delivery``.
        inputs: Read in place of ``config.sources``, each counted by its size.

    Raises:
        ConfigError: A setting is out of range, or sources with weights should end.
        InputError: A file, a record or the tokenizer cannot be used.
        MappingError: There are more ranks than samples in a global batch.
        StoreError: A store is damaged, or cannot be built here.
    """
    seq_len = whole("seq_len", seq_len)
    global_batch_size = whole("global_batch_size", global_batch_size)
    local_batch_size = whole("local_batch_size", local_batch_size)
    topology = Topology(whole("dp_rank", dp_rank), whole("dp_size", dp_size))
    mapping.check(global_batch_size, local_batch_size, topology)  # before hours of tokenizing
    delivery = Delivery(
        num_workers, prefetch_factor, persistent_workers, pin_memory, multiprocessing_context, config.worker_timeout
    )
    mixtures = None if inputs is not None else mixtures_of(config)
    epochs = config.epochs or (0 if infinite else 1)
    if epochs and mixtures is not None:
        raise ConfigError(
            "infinite = False goes with sources that have neither weights nor stages: with them the sources end their "
            "epochs at different samples"
        )
    order, reader, description, stages = _open(config, tokenizer, seq_len, dp_rank, inputs, mixtures)
    skips = Skips(config.skip)
    if skips.intervals:
        description["skip"] = [list(interval) for interval in skips.intervals]
    return Loader(
        order,
        reader,
        describe_order(description, global_batch_size),
        global_batch_size=global_batch_size,
        local_batch_size=local_batch_size,
        topology=topology,
        end=end_of(order, epochs),
        skips=skips,
        mixtures=[(at, _in_words(weights)) for at, weights in stages],
        accept_change=config.accept_change,
        delivery=delivery,
    )


def build_evaluation_loader(
    config: DataConfig,
    tokenizer: str | Path | TextTokenizer,
    *,
    seq_len: int,
    local_batch_size: int,
    num_batches: int | None = None,
    dp_rank: int = 0,
    dp_size: int = 1,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    multiprocessing_context: str | None = None,
    inputs: Sequence[Input] | None = None,
) -> EvaluationLoader:
    """Builds a loader whose every pass reads the same samples, from number 0, and that holds no state.

    It reads all sources, each counted by its size; their weights, stages and skips are of training.

    Args:
        local_batch_size: Rows of a batch on one rank.
        num_batches: Batches of a pass; None reads every sample once, with as many batches on each rank.

    The others, and what is raised, as ``build_loader``.
    """
    seq_len, local_batch_size = whole("seq_len", seq_len), whole("local_batch_size", local_batch_size)
    topology = Topology(whole("dp_rank", dp_rank), whole("dp_size", dp_size))
    mapping.check(local_batch_size * topology.dp_size, local_batch_size, topology)
    if num_batches is not None and whole("num_batches", num_batches) < 1:
        raise ConfigError(f"num_batches = {num_batches}: expected at least 1, or None for every sample")
    delivery = Delivery(
        num_workers, prefetch_factor, persistent_workers, pin_memory, multiprocessing_context, config.worker_timeout
    )
    order, reader, description, _ = _open(config, tokenizer, seq_len, dp_rank, inputs, None)
    return EvaluationLoader(
        order,
        reader,
        describe_order(description, local_batch_size * topology.dp_size),
        local_batch_size=local_batch_size,
        topology=topology,
        num_batches=num_batches,
        delivery=delivery,
    )


def _open(
    config: DataConfig,
    tokenizer: str | Path | TextTokenizer,
    seq_len: int,
    dp_rank: int,
    inputs: Sequence[Input] | None,
    mixtures: Mixtures | None,
) -> tuple[GlobalOrder, MicroBatchReader, dict[str, Any], ExactStages]:
    """The order, a reader of its rows, the order's description, and its stages, empty where there is but one source."""
    if seq_len < 1:
        raise ConfigError(f"seq_len = {seq_len}: expected at least 1")
    if inputs is None:
        inputs = [make_input(source) for source in config.sources_in_use]
    if not inputs:
        raise ConfigError("data.sources: no source; give a [[data.sources]] table with name and path")
    # By name, so that the order of the tables in the file has no say.
    inputs = sorted(inputs, key=lambda source: source.name)
    encoder = tokenizer if isinstance(tokenizer, TextTokenizer) else TextTokenizer(tokenizer, config.tokenizer_engine)
    encoders = [tokenizer_for(source, config, encoder) for source in inputs]
    for source, ends in zip(inputs, encoders, strict=True):  # before hours of tokenizing the first of them
        check_input(source, ends, config.cache_dir, config.shard_bytes)
    patience = 0.0 if dp_rank == 0 else _PATIENCE
    building = Building(one_per_machine=True, max_minutes=config.max_build_minutes)
    stores = [
        open_or_build(source, ends, config.cache_dir, config.shard_bytes, patience, building)
        for source, ends in zip(inputs, encoders, strict=True)
    ]
    sampling = Sampling(config.packing, config.positions, config.mask_boundaries)
    plans: list[PlanList] = []
    if sampling.packing != "concat":
        for source, store in zip(inputs, stores, strict=True):
            plans.append(open_plans(store, source.name, sampling.packing, seq_len, one_per_machine=True))
    samples = [planned.samples for planned in plans] or [num_samples(s.tokens_per_shard, seq_len) for s in stores]
    opened = [(source.name, source.path, store) for source, store in zip(inputs, stores, strict=True)]
    order, stages, samples_of = make_order(config, opened, samples, mixtures)
    for source, planned, count in zip(inputs, plans, samples_of, strict=False):
        logger.info(
            "data: source %r: packing %s fills %.2f %% of the places of %s samples; %s documents have no label and are "
            "left out",
            source.name,
            planned.packing,
            100 * planned.fill,
            f"{count:,}",
            f"{int(planned.left_out.sum()):,}",
        )
    fingerprints = [planned.fingerprint for planned in plans]
    description = describe_data(config, opened, seq_len, samples_of, stages, encoder.identity, fingerprints)
    one = len(opened) == len(stages) == 1
    return order, MicroBatchReader(stores, seq_len, sampling, plans), description, [] if one else stages


def _in_words(weights: Mapping[str, int]) -> str:
    """The shares of a mixture, of many sources the largest ones."""
    total = sum(weights.values())
    on = [(name, weight) for name, weight in weights.items() if weight]
    listed = on if len(on) <= _LISTED else sorted(on, key=lambda entry: -entry[1])[:_LISTED]
    shares = ", ".join(f"{name} {100 * weight / total:.4g} %" for name, weight in listed)
    return shares if len(on) == len(listed) else f"{shares} and {len(on) - len(listed)} smaller ones"
