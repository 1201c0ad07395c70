"""TorchTitan's tokenizers; with ``data.loading_strategy = "zephon"`` a folder may hold BPE ranks in their place."""

from typing import Any

from zephon_patches.titan.overlay import run_upstream as _run_upstream

_upstream = _run_upstream(globals())


def build_hf_tokenizer(job_config: Any) -> Any:
    """Builds the tokenizer of ``model.hf_assets_path``.

    Args:
        job_config: The settings; a folder with ``tiktoken.json`` is read where ``data.loading_strategy`` is "zephon".
    """
    if job_config.data.loading_strategy == "zephon":
        from zephon_patches.prepare.ranks import is_ranks_folder
        from zephon_patches.titan.tokenizer import RanksTokenizer

        if is_ranks_folder(job_config.model.hf_assets_path):
            # A virtual subclass, as the loader is one: it knows nothing of TorchTitan.
            _upstream.BaseTokenizer.register(RanksTokenizer)
            return RanksTokenizer(job_config.model.hf_assets_path)
    return _upstream.build_hf_tokenizer(job_config)
