"""An elastic, deterministic data pipeline: one global order of samples, one cursor, any topology."""

from typing import TYPE_CHECKING, Any

from zephon_patches.config import DataConfig, SourceConfig

if TYPE_CHECKING:
    from zephon_patches.loader.loader import build_loader

__all__ = ["DataConfig", "SourceConfig", "build_loader"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The loader needs torch; the settings and tools that only read them must not pay for it.
    if name == "build_loader":
        from zephon_patches.loader.loader import build_loader

        return build_loader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
