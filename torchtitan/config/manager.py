"""TorchTitan's reader of TOML files and arguments, which also knows lists of tables in ``[data]``."""

from zephon_patches.titan.overlay import run_upstream as _run_upstream
from zephon_patches.titan.settings import ReadsData as _ReadsData

_upstream = _run_upstream(globals())


class ConfigManager(_ReadsData, _upstream.ConfigManager):  # type: ignore[misc, name-defined]
    __doc__ = _upstream.ConfigManager.__doc__


if __name__ == "__main__":
    print(ConfigManager().parse_args())
