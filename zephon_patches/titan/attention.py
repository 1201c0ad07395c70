"""What TorchTitan's models and parallelisms do with what a sample holds: positions, and documents side by side.

The trainer hands every tensor of a batch but ``input`` to the model as an argument. Read in the release: ``train.py``,
``post_dataloading_process`` and ``forward_backward_step``; ``distributed/context_parallel.py``,
``prepare_context_parallel_input``; ``models/*/infra/parallelize.py``. ``docs/packing.md`` has it as a table.
"""

import inspect
import logging
from typing import Any

from zephon_patches.errors import ConfigError

__all__ = ["check_attention"]

logger = logging.getLogger(__name__)

# Under tensor parallelism these keep the rotary table as a DTensor, and turn positions into one under context
# parallelism alone; plain positions cannot index it.
_NO_TENSOR_PARALLEL = ("qwen3", "deepseek_v3")


def check_attention(job_config: Any) -> None:
    """Refuses positions where the model would not get them, and warns where attention crosses documents by surprise.

    Raises:
        ConfigError: ``data.positions`` does not go with the model or a parallelism.
    """
    from torchtitan.protocols.train_spec import get_train_spec

    data, name, flavor = job_config.data, job_config.model.name, job_config.model.flavor
    spec = get_train_spec(name)
    if data.positions:
        why = _why_no_positions(job_config, spec)
        if why is not None:
            raise ConfigError(f"data.positions = true cannot be: {why}. Leave it out, or see docs/packing.md")
    model_args = spec.model_args[flavor]
    if data.packing == "best_fit" and getattr(model_args, "attn_mask_type", "causal") == "block_causal":
        logger.warning(
            "data: model %s %s finds where documents end by their EOS among the inputs; with packing best_fit the last "
            "token of a document is a label and no input, so documents of one sample see each other. With packing "
            "concat or document they do not",
            name,
            flavor,
        )


def _why_no_positions(job_config: Any, spec: Any) -> str | None:
    parallelism, name = job_config.parallelism, job_config.model.name
    if "positions" not in inspect.signature(spec.model_cls.forward).parameters:
        return f"the model {name} takes none"
    if parallelism.context_parallel_degree > 1:
        return (
            f"with parallelism.context_parallel_degree = {parallelism.context_parallel_degree} TorchTitan passes "
            "positions of its own, which count through the sample, so the model would get the argument twice"
        )
    if parallelism.pipeline_parallel_degree > 1:
        return (
            f"with parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree} only the first stage "
            "gets them, so the layers of the others would use other ones"
        )
    if parallelism.tensor_parallel_degree > 1 and name in _NO_TENSOR_PARALLEL:
        return (
            f"with parallelism.tensor_parallel_degree = {parallelism.tensor_parallel_degree} the model {name} shards "
            "its rotary table, and TorchTitan does not shard positions to go with it"
        )
    return None
