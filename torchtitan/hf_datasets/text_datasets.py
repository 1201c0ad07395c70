"""TorchTitan's text datasets; ``data.loading_strategy = "zephon"`` builds this fork's loader for training."""

from typing import Any

from zephon_patches.titan.overlay import run_upstream as _run_upstream

_upstream = _run_upstream(globals())


def build_text_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: Any,
    job_config: Any,
    infinite: bool = True,
) -> Any:
    """Builds the loader of the training data.

    Args:
        dp_world_size: Size of the batch mesh.
        dp_rank: This process's rank in it; its peers in TP, PP and CP have the same.
        tokenizer: TorchTitan's tokenizer.
        job_config: The settings; ``data.loading_strategy`` chooses the loader.
        infinite: Whether to go on with another epoch at the end of the data.
    """
    if job_config.data.loading_strategy == "stock":
        return _upstream.build_text_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)

    from zephon_patches.titan.build import build_training_loader

    return build_training_loader(
        dp_world_size=dp_world_size,
        dp_rank=dp_rank,
        tokenizer=tokenizer,
        job_config=job_config,
        infinite=infinite,
        datasets=_upstream.DATASETS,
    )


def build_text_validation_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: Any,
    job_config: Any,
    infinite: bool = False,
) -> Any:
    """Builds the loader of the validation data; arguments as above.

    Each pass of ours starts at the same sample and ends by itself on all ranks at once, so ``infinite`` has no say.
    """
    if job_config.data.loading_strategy == "stock":
        return _upstream.build_text_validation_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)

    from zephon_patches.titan.build import build_validation_loader

    return build_validation_loader(
        dp_world_size=dp_world_size,
        dp_rank=dp_rank,
        tokenizer=tokenizer,
        job_config=job_config,
        datasets=_upstream.DATASETS,
    )
