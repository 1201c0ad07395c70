"""An elastic, deterministic data pipeline: one global order of samples, one cursor, any topology."""

from typing import TYPE_CHECKING, Any

from zephon_patches.config import DataConfig, SourceConfig, StageConfig

if TYPE_CHECKING:
    from zephon_patches.loader.build import build_evaluation_loader, build_loader

__all__ = ["DataConfig", "SourceConfig", "StageConfig", "build_evaluation_loader", "build_loader"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The loader needs torch; the settings and tools that only read them must not pay for it.
    if name in ("build_evaluation_loader", "build_loader"):
        from zephon_patches.loader import build

        return getattr(build, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
