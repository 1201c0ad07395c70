"""TorchTitan's settings, and the ``[data]`` table of this fork."""

from dataclasses import dataclass, field

from zephon_patches.config import Data
from zephon_patches.titan.overlay import run_upstream as _run_upstream

_upstream = _run_upstream(globals())


@dataclass
class JobConfig(_upstream.JobConfig):  # type: ignore[misc, name-defined]
    """Settings of a training job: one table of the TOML file for each group."""

    data: Data = field(default_factory=Data)
