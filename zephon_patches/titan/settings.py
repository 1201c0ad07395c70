"""The ``[data]`` table inside TorchTitan's settings: TOML files, arguments, ``--help``.

TorchTitan reads the TOML file into dataclasses first, then lets the arguments override them. Its reader
does not enter lists, so ``[[data.sources]]`` would stay a list of plain tables; here ``[data]`` goes
through the same checks as in the Python API instead. Arguments need nothing of that kind: the argument
parser makes the same dataclasses, which check themselves.
"""

import sys
from collections.abc import Sequence
from typing import Any

from zephon_patches.config import DataConfig, data_config_from_table
from zephon_patches.errors import ConfigError

__all__ = ["ReadsData"]


class ReadsData:
    """Mixed into TorchTitan's ``ConfigManager``: checks ``[data]`` and says where a mistake stands."""

    _toml_file = "the TOML file"

    def parse_args(self, args: Sequence[str] | None = None) -> Any:
        """Reads the settings; arguments win over the TOML file, which wins over the defaults.

        Raises:
            ConfigError: The TOML file's ``[data]`` is wrong.
            SystemExit: An argument is wrong; the message is printed, as for any other argument.
        """
        args = list(sys.argv[1:] if args is None else args)
        self._toml_file = _toml_file_of(args) or type(self)._toml_file
        try:
            return super().parse_args(args)  # type: ignore[misc]
        except _InvalidTable as error:
            # The frames between are the parser's and say nothing to who wrote the file.
            raise ConfigError(str(error)) from None
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None

    def _maybe_load_toml(self, args: list[str]) -> Any:
        values = super()._maybe_load_toml(args)  # type: ignore[misc]
        if values and not isinstance(values.get("data", {}), dict):
            raise _InvalidTable(f"{self._toml_file}: data must be one [data] table, found {values['data']!r}")
        return values

    def _dict_to_dataclass(self, cls: Any, data: dict[str, Any]) -> Any:
        if isinstance(cls, type) and issubclass(cls, DataConfig):
            try:
                return data_config_from_table(data, self._toml_file, cls)
            except ConfigError as error:
                raise _InvalidTable(str(error)) from None
        return super()._dict_to_dataclass(cls, data)  # type: ignore[misc]


class _InvalidTable(ConfigError):
    """Raised when the mistake is in the TOML file, not in an argument."""


def _toml_file_of(args: Sequence[str]) -> str | None:
    """The file that TorchTitan's reader takes; both spellings, as ``KEY FILE`` or ``KEY=FILE``."""
    for index, argument in enumerate(args):
        key, equals, value = argument.partition("=")
        if key in ("--job.config_file", "--job.config-file"):
            return value if equals else next(iter(args[index + 1 :]), None)
    return None
