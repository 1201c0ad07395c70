"""TorchTitan's ``hf_datasets`` package. It must stand here: without this file upstream's package would win as a
whole, and ``text_datasets`` of this folder would never be found."""

from zephon_patches.titan.overlay import run_upstream as _run_upstream

_run_upstream(globals())
