"""``zephon-data prepare``: tokenizes sources ahead of time, on any machine, without torch.

    zephon-data prepare --config train_configs/llama3_debug.toml
    zephon-data prepare --source web=/data/web --tokenizer assets/tokenizer --cache-dir /fast/tokens

A run finds the finished store by the content of its input, tokenizer and settings. A store that is finished already
is left alone, and one that was interrupted is continued.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from zephon_patches.config import Data, DataConfig, SourceConfig, data_config_from_table
from zephon_patches.errors import ConfigError
from zephon_patches.prepare.build import open_or_build, tokenizer_for
from zephon_patches.prepare.inputs import make_input
from zephon_patches.prepare.tokenizers import TextTokenizer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["add_to"]

_SOURCE_OPTIONS = (
    "text_field",
    "token_field",
    "subset",
    "split",
    "revision",
    "on_bad_record",
    "processor",
    "add_bos",
    "add_eos",
)


def add_to(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser(
        "prepare",
        help="tokenize sources ahead of time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, help="training config (TOML); all its sources are prepared")
    parser.add_argument("--source", metavar="NAME=PATH", help="one source, in place of a config")
    parser.add_argument("--text-field", help="its field or column with the text (text)")
    parser.add_argument("--token-field", help="its field or column with token ids, in place of texts (none)")
    parser.add_argument("--subset", help="its subset, where its path is hf://ORGANISATION/NAME (its default)")
    parser.add_argument("--split", help="its split on the hub (train)")
    parser.add_argument("--revision", help="its branch, tag or commit on the hub (main)")
    parser.add_argument("--on-bad-record", help="what becomes of its bad records: error or skip (error)")
    parser.add_argument("--processor", help="function that makes texts of its records: package.module:function (none)")
    for name, place in (("bos", "before"), ("eos", "behind")):
        parser.add_argument(
            f"--add-{name}",
            action=argparse.BooleanOptionalAction,
            help=f"whether {name.upper()} stands {place} each document (if the tokenizer has it)",
        )
    parser.add_argument("--tokenizer", help="folder with tokenizer.json (the config's model.hf_assets_path)")
    parser.add_argument("--cache-dir", help="folder of the token stores (the config's data.cache_dir)")
    parser.add_argument("--shard-bytes", type=int, help="input bytes of a shard (the config's data.shard_bytes, or 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    data, tokenizer = _settings(arguments)
    encoder = TextTokenizer(tokenizer)
    for source in [*data.sources, *data.validation_sources]:
        input_ = make_input(source)
        store = open_or_build(input_, tokenizer_for(input_, data, encoder), data.cache_dir, data.shard_bytes)
        manifest = store.manifest
        print(
            f"{source.name}: {manifest.documents:,} documents, {manifest.tokens:,} tokens in "
            f"{len(manifest.shards):,} shards: {store.folder}"
        )
        for reason, count in manifest.skipped.items():
            print(f"{source.name}: {count:,} records skipped ({reason})")
    return 0


def _settings(arguments: argparse.Namespace) -> tuple[DataConfig, str]:
    """The data's settings and the tokenizer's folder; options win over the config."""
    if (arguments.config is None) == (arguments.source is None):
        raise ConfigError("give either --config FILE or --source NAME=PATH")
    if arguments.config is not None:
        for key in _SOURCE_OPTIONS:
            if getattr(arguments, key) is not None:
                option = f"--{key.replace('_', '-')}"
                raise ConfigError(f"{option} goes with --source; a config's sources have their own {key}")
        content = _read_toml(arguments.config)
        data: DataConfig = data_config_from_table(
            _table(content, "data", arguments.config), str(arguments.config), Data
        )
        tokenizer = arguments.tokenizer or _table(content, "model", arguments.config).get("hf_assets_path")
        if not isinstance(tokenizer, str | None):
            raise ConfigError(f"{arguments.config}: [model]: hf_assets_path = {tokenizer!r}: expected a string")
        if not (data.sources or data.validation_sources):
            raise ConfigError(
                f"{arguments.config}: no [[data.sources]]; data sets of TorchTitan's registry are tokenized by the "
                "run itself"
            )
    else:
        name, equals, path = arguments.source.partition("=")
        if not equals:
            raise ConfigError(f"--source {arguments.source}: expected NAME=PATH, such as web=/data/web")
        given = {key: getattr(arguments, key) for key in _SOURCE_OPTIONS if getattr(arguments, key) is not None}
        data = DataConfig(sources=[SourceConfig(name, path, **given)])
        tokenizer = arguments.tokenizer
    if not tokenizer:
        raise ConfigError("no tokenizer: give --tokenizer FOLDER (with tokenizer.json)")
    if arguments.cache_dir is not None:
        data.cache_dir = arguments.cache_dir
    if arguments.shard_bytes is not None:
        data.shard_bytes = arguments.shard_bytes
    data.__post_init__()  # checks what the options set
    return data, tokenizer


def _table(content: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} must be one [{name}] table, found {table!r}")
    return table


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML ({error})") from None
