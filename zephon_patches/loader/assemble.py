"""The global order over opened sources, and its description: what loaders and the tools without torch share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zephon_patches.config import MAX_NUMBER, DataConfig
from zephon_patches.errors import ConfigError, InputError
from zephon_patches.loader.state import describe_stages
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.order.mixture import exact_weights
from zephon_patches.order.shuffle import SourceOrder
from zephon_patches.order.stages import Stage

__all__ = ["ExactStages", "Mixtures", "Opened", "describe_data", "end_of", "exact_stages", "make_order", "mixtures_of"]

Mixtures = list[tuple[int, Mapping[str, float] | None]]
"""What is drawn from, from a number on: the weights by name, or None for the sources' sizes"""

ExactStages = list[tuple[int, dict[str, int]]]
"""Whole weights of each stage, by source; 0 is off"""


class Opened(Protocol):
    """What the order needs of a store."""

    folder: Path
    tokens_per_shard: np.ndarray

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_documents(self) -> int: ...

    @property
    def data_fingerprint(self) -> str: ...

    @property
    def skipped(self) -> dict[str, int]: ...


def mixtures_of(config: DataConfig) -> Mixtures | None:
    """The mixtures that the settings ask for; None if they ask for none."""
    weights = {source.name: source.weight for source in config.sources if source.weight is not None}
    if not weights and not config.stages:
        return None
    return [(0, weights or None), *((stage.at, stage.weights) for stage in config.stages)]


def make_order(
    config: DataConfig,
    sources: Sequence[tuple[str, str, Opened]],
    samples: Sequence[np.ndarray],
    mixtures: Mixtures | None,
) -> tuple[GlobalOrder, ExactStages, list[int]]:
    """Lays the order over the sources.

    Args:
        config: The order's settings.
        sources: Name, path and store of each, by name.
        samples: Of each source the samples of its shards, int64, shape ``(shards,)``, as the packing has them.
        mixtures: As ``mixtures_of``.

    Returns:
        The order; its stages, one by size where there are no mixtures; the samples of each source.

    Raises:
        InputError: A source gives no sample.
    """
    orders, samples_of = [], []
    for (name, path, store), per_shard in zip(sources, samples, strict=True):
        if not per_shard.sum():
            raise InputError(
                f"source {name!r}: {store.num_tokens:,} tokens in {store.num_documents:,} documents "
                f"({path}) give no sample; a sample needs two tokens in a row"
                + "".join(f"; skipped: {reason} {count:,}" for reason, count in store.skipped.items())
            )
        orders.append(SourceOrder(name, per_shard, config.seed, config.shuffle_shards))
        samples_of.append(int(per_shard.sum()))
    stages = exact_stages(mixtures or [(0, None)], {order.name: order.num_samples for order in orders})
    order = GlobalOrder(orders, [Stage(at, tuple(weights.values())) for at, weights in stages] if mixtures else None)
    return order, stages, samples_of


def describe_data(
    config: DataConfig,
    sources: Sequence[tuple[str, str, Opened]],
    seq_len: int,
    samples_of: Sequence[int],
    stages: ExactStages,
    tokenizer: str,
    plans: Sequence[str] = (),
) -> dict[str, Any]:
    """What ``describe_order`` takes; arguments as ``make_order`` takes and gives them.

    Args:
        tokenizer: Its identity.
        plans: The fingerprint of each source's plans, where the packing has some.
    """
    described: list[dict[str, Any]] = [
        {
            "data": store.data_fingerprint,
            "name": name,
            "recipe": store.folder.name.partition("-")[0],
            "samples": samples,
            "tokens": store.num_tokens,
        }
        for (name, _, store), samples in zip(sources, samples_of, strict=True)
    ]
    for entry, plan in zip(described, plans, strict=False):
        entry["plans"] = plan
    description: dict[str, Any] = {
        "packing": config.packing,
        "seed": config.seed,
        "seq_len": seq_len,
        "shard_bytes": config.shard_bytes,
        "shuffle_shards": config.shuffle_shards,
        "sources": described,
        "tokenizer": tokenizer,
    }
    # What has its default stays out, so that the states of before are the same text.
    description |= {key: True for key in ("positions", "mask_boundaries") if getattr(config, key)}
    if len(sources) > 1 or len(stages) > 1:
        description["stages"] = describe_stages(stages)
        for entry in described:
            if since := next(at for at, weights in stages if weights[entry["name"]]):
                entry["since"] = since
    return description


def end_of(order: GlobalOrder, epochs: int) -> int | None:
    """The number at which data of so many epochs ends; None if it does not.

    Raises:
        ConfigError: It is above any order's.
    """
    end = order.end(epochs) if epochs else None
    if end is not None and end > MAX_NUMBER:
        raise ConfigError(f"data.epochs = {epochs:,}: {end:,} samples, and an order has at most {MAX_NUMBER:,}")
    return end


def exact_stages(mixtures: Mixtures, sizes: Mapping[str, int]) -> ExactStages:
    """The whole weights of each stage, by source in the order of ``sizes``; 0 is off."""
    stages = []
    for at, weights in mixtures:
        exact = exact_weights([weights.get(name, 0) for name in sizes] if weights is not None else [*sizes.values()])
        stages.append((at, dict(zip(sizes, exact, strict=True))))
    return stages
