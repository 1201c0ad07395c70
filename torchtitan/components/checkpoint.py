"""TorchTitan's checkpoints; the data pipeline acts before each save and after each load."""

from zephon_patches.titan.overlay import hook_checkpoints as _hook_checkpoints
from zephon_patches.titan.overlay import run_upstream as _run_upstream

_upstream = _run_upstream(globals())

_hook_checkpoints(_upstream.CheckpointManager)
