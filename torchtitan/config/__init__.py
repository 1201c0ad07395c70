"""TorchTitan's ``config`` package. It must stand here: without this file upstream's package would win as a
whole, and ``job_config`` and ``manager`` of this folder would never be found."""

from zephon_patches.titan.overlay import run_upstream as _run_upstream

_run_upstream(globals())
