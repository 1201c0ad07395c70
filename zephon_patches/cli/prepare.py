"""``zephon-data prepare``: tokenizes sources ahead of time, on any machine, without torch.

    zephon-data prepare --config train_configs/llama3_debug.toml
    zephon-data prepare --source web=/data/web --tokenizer assets/tokenizer --cache-dir /fast/tokens

A run finds the finished store by the content of its input, tokenizer and settings. A store that is finished already
is left alone, and one that was interrupted is continued. Any number of these commands may run at once, on any machines
that share the cache folder; they share the work. Of a Slurm array:

    zephon-data prepare --config my.toml --part $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from zephon_patches.cli.table import aligned
from zephon_patches.config import (
    HUB,
    Data,
    DataConfig,
    Packing,
    SourceConfig,
    TokenizerEngine,
    data_config_from_table,
)
from zephon_patches.errors import ConfigError, StoreError
from zephon_patches.training_config import read_toml, table_of

if TYPE_CHECKING:
    from zephon_patches.prepare.build import Outlook
    from zephon_patches.prepare.builder import Part
    from zephon_patches.samples.plan_list import PlanList
    from zephon_patches.store.reader import TokenStore

__all__ = ["add_to"]

_SEQ_LEN = 2048
"""TorchTitan's default"""

_SOURCE_OPTIONS = (
    "text_field",
    "token_field",
    "chat_field",
    "subset",
    "split",
    "revision",
    "on_bad_record",
    "processor",
    "add_bos",
    "add_eos",
)


_MAX_WORKERS = 1024  # a slip of the hand, which would take the machine down
_MAX_PART_DIGITS = 18


class _Once(argparse.Action):
    """An option that would win over itself in silence, were it given twice."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(
                f"{option} {getattr(namespace, self.dest)} and {option} {value}: give one; --config takes several"
            )
        setattr(namespace, self.dest, value)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.description = __doc__
    parser.add_argument("--config", type=Path, help="training config (TOML); all its sources are prepared")
    parser.add_argument("--source", metavar="NAME=PATH", action=_Once, help="one source, in place of a config")
    parser.add_argument("--text-field", help="its field or column with the text (text)")
    parser.add_argument("--token-field", help="its field or column with token ids, in place of texts (none)")
    parser.add_argument("--chat-field", help="its field or column with conversations, in place of texts (none)")
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
    parser.add_argument(
        "--tokenizer-engine",
        choices=get_args(TokenizerEngine),
        help="library that tokenizes; the ids do not depend on it (the config's data.tokenizer_engine, or auto)",
    )
    parser.add_argument(
        "--exact", action="store_true", help="compare every document with the reference engine, at its speed"
    )
    parser.add_argument("--cache-dir", help="folder of the token stores (the config's data.cache_dir)")
    parser.add_argument("--shard-bytes", type=int, help="input bytes of a shard (the config's data.shard_bytes, or 0)")
    parser.add_argument(
        "--packing",
        choices=get_args(Packing),
        help="how documents become samples, for which best_fit and document have plans that are made too (concat)",
    )
    parser.add_argument(
        "--seq-len",
        type=int,
        metavar="N",
        help="places of a sample, for those plans (the config's training.seq_len and validation.seq_len)",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that tokenize (as many as are of use, at most one a core)"
    )
    parser.add_argument(
        "--part",
        metavar="I/N",
        help="build only every N-th unit of work, from unit I on, 0 <= I < N: for array jobs, which may run at once",
    )
    parser.add_argument(
        "--engine",
        choices=["local", "ray"],
        default="local",
        help="local: processes of this machine; ray: tasks of a Ray cluster, --workers does not matter (local)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be built, and write nothing")
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> int:
    from zephon_patches.prepare.build import Building, build_part, look_at, open_or_build
    from zephon_patches.prepare.finding import check_input, tokenizer_for
    from zephon_patches.prepare.inputs import make_input
    from zephon_patches.prepare.tokenizers import TextTokenizer
    from zephon_patches.store.reader import TokenStore

    data, tokenizer, seq_lens = _settings(arguments)
    workers = arguments.workers
    if workers is not None and not 1 <= workers <= _MAX_WORKERS:
        raise ConfigError(f"--workers {workers}: expected 1 to {_MAX_WORKERS:,} processes of this machine")
    part = None if arguments.part is None else _part(arguments.part)
    encoder = TextTokenizer(tokenizer, data.tokenizer_engine, arguments.exact)
    trained = data.sources_in_use
    for source in data.sources:
        if source not in trained:
            print(f"{source.name}: off (its weight is 0, and no stage draws from it), so it is not prepared")
    sources = [*trained, *data.validation_sources]
    if arguments.engine == "ray":  # whose tasks run in another folder
        sources = [s if s.path.startswith(HUB) else replace(s, path=os.path.abspath(s.path)) for s in sources]
    inputs = [make_input(source) for source in sources]
    roles = ["training"] * len(trained) + ["validation"] * len(data.validation_sources)
    encoders = [tokenizer_for(files, data, encoder) for files in inputs]
    where = data.cache_dir, data.shard_bytes
    if arguments.dry_run:
        outlooks = [look_at(files, ends, *where) for files, ends in zip(inputs, encoders, strict=True)]
        print(_plan_table([source.name for source in sources], outlooks))
        return 0
    for files, ends in zip(inputs, encoders, strict=True):  # before the first one is built
        check_input(files, ends, *where)
    building = Building(workers=workers, on_ray=arguments.engine == "ray")
    stores: list[tuple[str, str, TokenStore]] = []
    for source, role, files, ends in zip(sources, roles, inputs, encoders, strict=True):
        if part is None:
            stores.append((source.name, role, open_or_build(files, ends, *where, building=building)))
            continue
        done = build_part(files, ends, *where, part, building)
        if isinstance(done, TokenStore):
            stores.append((source.name, role, done))
        else:
            print(
                f"{source.name}: part {arguments.part} is done, and the store is not closed: {done}; the last part to "
                "be done closes it, or the same command without --part, which builds what is missing"
            )
    if stores:
        print(_summary_table(stores))
    if stores and data.packing != "concat" and (arguments.config or arguments.packing):
        from zephon_patches.loader.plans import open_plans

        plans = [open_plans(store, name, data.packing, seq_lens[role]) for name, role, store in stores]
        print(_plans_table(stores, plans))
    return 0


def _part(text: str) -> "Part":
    from zephon_patches.prepare.builder import Part

    index, slash, count = text.partition("/")
    numbers = slash and index.isdecimal() and count.isdecimal() and max(len(index), len(count)) <= _MAX_PART_DIGITS
    if not (numbers and int(index) < int(count)):
        raise ConfigError(f"--part {text:.60}: expected I/N with 0 <= I < N, such as 0/8, the first of eight parts")
    return Part(int(index), int(count))


def _summary_table(stores: "list[tuple[str, str, TokenStore]]") -> str:
    """What the stores hold; validation sources have no share of the training data."""
    header = ["source", "role", "documents", "tokens", "mean", "largest", "share", "shards", "skipped", "folder"]
    total = sum(store.num_tokens for _, role, store in stores if role == "training")
    rows = []
    for name, role, store in stores:
        skipped = [f"{count:,} {reason}" for reason, count in store.manifest.skipped.items()]
        rows.append(
            [
                name,
                role,
                f"{store.num_documents:,}",
                f"{store.num_tokens:,}",
                f"{store.num_tokens / max(store.num_documents, 1):,.1f}",
                f"{_largest_document(store):,}",
                f"{100 * store.num_tokens / max(total, 1):.1f} %" if role == "training" else "-",
                f"{len(store.tokens_per_shard):,}",
                ", ".join(skipped) or "-",
                str(store.folder),
            ]
        )
    return aligned(header, rows, left=("source", "role", "skipped", "folder"))


def _plans_table(stores: "list[tuple[str, str, TokenStore]]", plans: "list[PlanList]") -> str:
    """What the packing makes of the stores: documents left out are those without a label."""
    header = ["source", "role", "packing", "seq_len", "samples", "fill", "left out"]
    rows = [
        [
            name,
            role,
            planned.packing,
            f"{planned.seq_len:,}",
            f"{int(planned.samples.sum()):,}",
            f"{100 * planned.fill:.2f} %",
            f"{int(planned.left_out.sum()):,}",
        ]
        for (name, role, _), planned in zip(stores, plans, strict=True)
    ]
    return aligned(header, rows, left=("source", "role", "packing"))


def _largest_document(store: "TokenStore") -> int:
    """Tokens of the longest document; reads 4 bytes a document, from the indexes.

    Raises:
        StoreError: An index is missing or cut off.
    """
    import numpy as np

    from zephon_patches.store.indexed import HEADER, index_bytes

    largest = 0
    for shard in store.manifest.shards:
        path = store.folder / f"{shard.name}.idx"
        lengths = np.empty(0, dtype=np.int32)
        try:
            if path.stat().st_size == index_bytes(shard.documents):  # not so of a pipe, whose end would never come
                lengths = np.fromfile(path, "<i4", shard.documents, offset=HEADER.size)
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error}); zephon-data verify finds all damage") from None
        if len(lengths) != shard.documents:
            raise StoreError(f"{path}: cut off, or no index; zephon-data verify finds all damage")
        largest = max(largest, int(lengths.max(initial=0)))
    return largest


def _plan_table(names: list[str], outlooks: "list[Outlook]") -> str:
    """What would be built."""
    header = ["source", "store", "units done", "units", "input MB", "left MB", "minutes", "folder"]
    rows = []
    for name, outlook in zip(names, outlooks, strict=True):
        state = "finished" if outlook.finished else "partly built" if outlook.started else "not begun"
        rows.append(
            [
                name,
                state,
                "-" if outlook.finished else f"{outlook.finished_units:,}",
                "-" if outlook.finished else f"{outlook.units:,}",
                f"{outlook.bytes / 1e6:,.1f}",
                f"{outlook.missing_bytes / 1e6:,.1f}",
                f"{outlook.minutes:,.1f}",
                str(outlook.folder),
            ]
        )
    return aligned(header, rows, left=("source", "store", "folder"))


def _settings(arguments: argparse.Namespace) -> tuple[DataConfig, str, dict[str, int]]:
    """The data's settings, the tokenizer's folder, and the places of a sample by role; options win over the config."""
    if (arguments.config is None) == (arguments.source is None):
        raise ConfigError("give either --config FILE or --source NAME=PATH")
    seq_lens = dict.fromkeys(("training", "validation"), _SEQ_LEN)
    if arguments.config is not None:
        if arguments.packing is not None:
            raise ConfigError("--packing goes with --source; a config has its own data.packing")
        for key in _SOURCE_OPTIONS:
            if getattr(arguments, key) is not None:
                option = f"--{key.replace('_', '-')}"
                raise ConfigError(f"{option} goes with --source; a config's sources have their own {key}")
        content = read_toml(arguments.config)
        data: DataConfig = data_config_from_table(
            table_of(content, "data", arguments.config), str(arguments.config), Data
        )
        tokenizer = arguments.tokenizer or table_of(content, "model", arguments.config).get("hf_assets_path")
        if not isinstance(tokenizer, str | None):
            raise ConfigError(f"{arguments.config}: [model]: hf_assets_path = {tokenizer!r}: expected a string")
        for role in seq_lens:
            seq_lens[role] = table_of(content, role, arguments.config).get("seq_len", _SEQ_LEN)
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
        # A store has no packing, but conversations do not go with the default one.
        packing: Packing = arguments.packing or _default_packing(arguments)
        data = DataConfig(sources=[SourceConfig(name, path, **given)], packing=packing)
        if arguments.packing not in (None, "concat") and arguments.seq_len is None:
            raise ConfigError(
                f"--packing {arguments.packing}: its plans are for one length of samples; give --seq-len too"
            )
        tokenizer = arguments.tokenizer
    if tokenizer and "\0" in tokenizer:
        raise ConfigError(f"tokenizer folder {tokenizer!r}: no path has a NUL in it")
    if not tokenizer:
        raise ConfigError("no tokenizer: give --tokenizer FOLDER (with tokenizer.json)")
    if arguments.cache_dir is not None:
        data.cache_dir = arguments.cache_dir
    if arguments.tokenizer_engine is not None:
        data.tokenizer_engine = arguments.tokenizer_engine
    if arguments.shard_bytes is not None:
        data.shard_bytes = arguments.shard_bytes
    data.__post_init__()  # checks what the options set
    if arguments.seq_len is not None:
        seq_lens = dict.fromkeys(seq_lens, arguments.seq_len)
    for role, seq_len in seq_lens.items():
        if not isinstance(seq_len, int) or seq_len < 1:
            raise ConfigError(f"seq_len = {seq_len!r} of {role}: expected a number of tokens, at least 1")
    return data, tokenizer, seq_lens


def _default_packing(arguments: argparse.Namespace) -> Packing:
    return "best_fit" if arguments.chat_field else "concat"
