"""TorchTitan's loader classes; this fork's loader counts as one of them."""

from zephon_patches.loader.loader import Loader as _Loader
from zephon_patches.titan.overlay import run_upstream as _run_upstream

_upstream = _run_upstream(globals())

# A virtual subclass: the loader itself knows nothing of TorchTitan.
_upstream.BaseDataLoader.register(_Loader)
