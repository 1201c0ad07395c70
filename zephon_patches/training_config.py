"""A training config as the tools read it: the ``[data]`` table, and the few settings of TorchTitan that it goes with.

The defaults are TorchTitan's. What arguments override at a run's start is not in the file, so a tool does not see it.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zephon_patches.config import Data, data_config_from_table
from zephon_patches.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["TrainingConfig", "read_toml", "read_training_config", "table_of"]


@dataclass(frozen=True)
class TrainingConfig:
    """What the samples, and their way to the ranks, depend on."""

    path: Path
    data: Data
    tokenizer: str
    """``model.hf_assets_path``"""
    seq_len: int
    global_batch_size: int
    """Samples of a step; -1 where it is not set and so depends on the number of ranks"""
    local_batch_size: int


def read_training_config(path: Path) -> TrainingConfig:
    """Reads a training config.

    Raises:
        ConfigError: It cannot be read, or a setting is wrong; the message names the file and the place in it.
    """
    content = read_toml(path)
    data = data_config_from_table(table_of(content, "data", path), str(path), Data)
    assert isinstance(data, Data)
    if not data.sources:
        raise ConfigError(
            f"{path}: no [[data.sources]]; data sets of TorchTitan's registry are known to the run alone, so name "
            "their files as a source"
        )
    training = table_of(content, "training", path)
    tokenizer = table_of(content, "model", path).get("hf_assets_path", "./tests/assets/tokenizer")
    if not isinstance(tokenizer, str):
        raise ConfigError(f"{path}: [model]: hf_assets_path = {tokenizer!r}: expected a string")
    return TrainingConfig(
        path,
        data,
        tokenizer,
        seq_len=_whole(training, "seq_len", 2048, path),
        global_batch_size=_whole(training, "global_batch_size", -1, path),
        local_batch_size=_whole(training, "local_batch_size", 8, path),
    )


def _whole(training: dict[str, Any], key: str, default: int, path: Path) -> int:
    value = training.get(key, default)
    unset = key == "global_batch_size" and value == -1
    if not isinstance(value, int) or isinstance(value, bool) or not (value >= 1 or unset):
        raise ConfigError(f"{path}: [training]: {key} = {value!r}: expected an integer, at least 1")
    return value


def table_of(content: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    """A table of a config, empty if it is not there."""
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} must be one [{name}] table, found {table!r}")
    return table


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        ConfigError: It cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML ({error})") from None
