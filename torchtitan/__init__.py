"""The installed TorchTitan, with the modules of this folder in place of its own.

See ``zephon_patches/titan/overlay.py`` for how, and README.md for what is replaced.
"""

from zephon_patches.titan import cpu as _cpu
from zephon_patches.titan import overlay as _overlay

# First the path, so that `torchtitan.*` is found; then the device, which upstream's modules read when they
# are imported; then upstream's own __init__, which imports them.
_overlay.extend_path(globals())
_cpu.enable()
_overlay.run_upstream(globals())
