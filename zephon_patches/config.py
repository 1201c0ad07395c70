"""The ``[data]`` settings: one dataclass for the table, one for each of its sources.

The same classes serve the TOML file, the command line and the Python API. They import neither torch
nor torchtitan, so that tools can read a training config on a machine that has none of them.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from zephon_patches.errors import ConfigError

__all__ = ["Data", "DataConfig", "SourceConfig", "StageConfig", "data_config_from_table", "whole"]

LoadingStrategy = Literal["stock", "zephon"]
OnBadRecord = Literal["error", "skip"]
OnPreempt = Literal["stop", "checkpoint"]
Packing = Literal["concat", "best_fit", "document"]
TokenizerEngine = Literal["auto", "tokenizers", "fastokens", "tiktoken"]

MAX_SEED = 2**63 - 1

# The largest sequence number: above any run (10^18 samples), and far enough below 2**63 that sums of a few of them
# do not overflow.
MAX_NUMBER = 2**60

_SOURCE_LISTS = ("sources", "validation_sources")

# A source's name is the name of its folder in the cache, so it must be one on every file system.
_SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


HUB = "hf://"
"""What the path of a source on the Hugging Face hub begins with"""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")
_SPLIT = re.compile(r"[\w.]+(-[\w.]+)*")

_PROCESSOR = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")


@dataclass
class SourceConfig:
    """One named set of files; in TOML, one ``[[data.sources]]`` table."""

    name: str
    """Name of the source: the name of its folder in the cache, and part of its shuffling key"""

    path: str
    """
    File, folder (searched with its sub-folders) or glob of .jsonl, .parquet, .arrow and .txt files; .jsonl and .txt,
    and .json with a JSON object a line, also as .gz and .zst; a folder that datasets.save_to_disk made. Token ids as
    Megatron has them, a .bin, an .idx or what both begin with, are used where they are. hf://ORGANISATION/NAME is a
    data set of the Hugging Face hub
    """

    text_field: str = "text"
    """
    Field (JSON lines) or column (.parquet, .arrow) that holds the text of a record; meta.body is the field body in
    the object meta, unless there is a field of that whole name
    """

    token_field: str = ""
    """
    Field or column that holds the token ids of a record, in place of text_field: a list of integers, dotted as there
    """

    chat_field: str = ""
    """
    Field or column that holds a conversation, in place of text_field: a list of messages, each with role and content.
    It becomes a text by the tokenizer's chat template, and only what the assistant says counts in the loss. Goes with
    data.packing = "best_fit" or "document"
    """

    subset: str = ""
    """Subset (configuration) of a data set of the hub; its only or default one where not set"""

    split: str = ""
    """Split of a data set of the hub; train where not set"""

    revision: str = ""
    """Branch, tag or commit of a data set of the hub; main where not set"""

    on_bad_record: OnBadRecord = "error"
    """
    What becomes of a record that gives no document (a malformed line, invalid UTF-8, a lone surrogate, a field that is
    missing or of another type, an id that the tokenizer does not have): "error" stops, "skip" leaves it out, counts it
    in the manifest and lists it beside
    """

    processor: str = ""
    """
    "package.module:function" that makes a text, several or none of a record (a dict of all its fields); reads the
    field text_field where it is not set
    """

    add_bos: bool | None = None
    """
    Whether BOS stands before each document, once; as data.add_bos where not set. Given token ids stay as they are but
    where this is true
    """

    add_eos: bool | None = None
    """Whether EOS stands behind each document, once; as data.add_eos where not set. Of given token ids as add_bos"""

    weight: float | None = None
    """
    Share of the samples, and so of the tokens, as a ratio to the other weights (0.7 and 0.3 are 7 and 3); 0 turns the
    source off. All training sources have one or none has; then each counts by its size
    """

    def __post_init__(self) -> None:
        _check_type("source: name", self.name, str)
        _check_type(f"source {self.name!r}: path", self.path, str)
        _check_type(f"source {self.name!r}: text_field", self.text_field, str)
        if not _SOURCE_NAME.fullmatch(self.name):
            raise ConfigError(
                f"source name {self.name!r} cannot be used: it names a folder in the cache, so it takes "
                "1 to 100 letters, digits, '.', '_' and '-', and starts with a letter or digit"
            )
        for key in ("path", "text_field"):
            if not getattr(self, key):
                raise ConfigError(f"source {self.name!r}: {key} is empty")
        _check_no_nul(f"source {self.name!r}: path", self.path)
        _check_type(f"source {self.name!r}: processor", self.processor, str)
        if self.processor and not _PROCESSOR.fullmatch(self.processor):
            raise ConfigError(
                f"source {self.name!r}: processor = {self.processor!r}: expected 'package.module:function'"
            )
        _check_type(f"source {self.name!r}: token_field", self.token_field, str)
        if self.processor and self.text_field != "text":
            raise ConfigError(
                f"source {self.name!r}: both processor and text_field are set, and a processor gets the whole record; "
                "leave one of them out"
            )
        self._check_chat()
        for key, is_set in (("text_field", self.text_field != "text"), ("processor", bool(self.processor))):
            if self.token_field and is_set:
                raise ConfigError(
                    f"source {self.name!r}: both token_field and {key} are set, and a record gives either token ids or "
                    "texts; leave one of them out"
                )
        self._check_hub()
        for key in ("add_bos", "add_eos"):
            _check_flag(f"source {self.name!r}: {key}", getattr(self, key))
        _check_choice(f"source {self.name!r}: on_bad_record", self.on_bad_record, OnBadRecord)
        if self.weight is not None:
            _check_weight(f"source {self.name!r}: weight", self.weight)

    def _check_chat(self) -> None:
        _check_type(f"source {self.name!r}: chat_field", self.chat_field, str)
        others = {
            "text_field": self.text_field != "text",
            "token_field": bool(self.token_field),
            "processor": bool(self.processor),
            "add_bos": bool(self.add_bos),
            "add_eos": bool(self.add_eos),
        }
        for key, is_set in others.items():
            if self.chat_field and is_set:
                raise ConfigError(
                    f"source {self.name!r}: both chat_field and {key} are set, and a conversation is written by the "
                    f"tokenizer's chat template, BOS and EOS included; leave {key} out"
                )

    def _check_hub(self) -> None:
        on_hub = self.path.startswith(HUB)
        if on_hub and not _HUB_NAME.fullmatch(self.path.removeprefix(HUB)):
            raise ConfigError(
                f"source {self.name!r}: path = {self.path!r}: expected hf://ORGANISATION/NAME, such as "
                "hf://allenai/c4, with subset, split and revision as keys of their own"
            )
        for key in ("subset", "split", "revision"):
            value = getattr(self, key)
            _check_type(f"source {self.name!r}: {key}", value, str)
            if value and not on_hub:
                raise ConfigError(
                    f"source {self.name!r}: {key} = {value!r} is of data sets of the Hugging Face hub, whose path is "
                    "hf://ORGANISATION/NAME; leave it out"
                )
        if self.revision and not _REVISION.fullmatch(self.revision):
            raise ConfigError(
                f"source {self.name!r}: revision = {self.revision!r}: expected the name of a branch or tag, or a commit"
            )
        if self.split and not _SPLIT.fullmatch(self.split):
            raise ConfigError(
                f"source {self.name!r}: split = {self.split!r}: expected the name of one split, such as 'train'; parts "
                "and sums of splits are not read"
            )


@dataclass
class StageConfig:
    """Another mixture from a sequence number on; in TOML, one ``[[data.stages]]`` table."""

    at: int
    """Number of the first sample that is drawn by these weights, above that of the stage before"""

    weights: dict[str, float]
    """Weight of each source by its name, in TOML { web = 0.7, code = 0.3 }; sources that are not named are off"""

    def __post_init__(self) -> None:
        _check_type("stage: at", self.at, int)
        if not 0 < self.at <= MAX_NUMBER:
            raise ConfigError(
                f"stage: at = {self.at:,}: expected the number of a sample, 1 to {MAX_NUMBER:,}; the mixture from "
                "sample 0 on is set by the sources' own weights"
            )
        if not isinstance(self.weights, Mapping) or not self.weights:
            raise ConfigError(
                f"stage at sample {self.at:,}: weights = {self.weights!r}: expected a weight for each source that is "
                "on, as { web = 0.7, code = 0.3 }"
            )
        for name, weight in self.weights.items():
            _check_weight(f"stage at sample {self.at:,}: weight of {name!r}", weight)
        # The parser of arguments takes the type from the value, and then 0.5 could not stand where the file has 1.
        self.weights = {name: float(w) if w <= 2**53 else w for name, w in self.weights.items()}
        if not any(self.weights.values()):
            raise ConfigError(f"stage at sample {self.at:,}: all weights are 0, so there is nothing to draw from")


@dataclass
class DataConfig:
    """Where the data comes from and in which order it is trained on; the TOML's ``[data]`` table.

    Every sample has one place in a global order that follows from these settings and the data alone.
    """

    seed: int = 0
    """Seed of the order of the data; nothing to do with the seed of the model"""

    cache_dir: str = "./data_cache"
    """Folder of the token stores, one sub-folder for each source; built at first use"""

    shuffle_shards: int = 256
    """
    Number of consecutive shards (in an epoch's shuffled order of shards) whose samples are shuffled
    together: a full shuffle for sources of up to that many shards. 0 keeps the order of the files
    """

    shard_bytes: int = 0
    """
    Bytes of input that make one shard; 0 takes a 1,024th of the source, at least 16 MiB and at most
    1 GiB, or 256 MiB where the size is not known. Another value gives another store and another order
    """

    max_build_minutes: float = 30.0
    """
    A start that would have to tokenize for longer than this stops instead, with the command that does it ahead
    of time, since ranks on rented GPUs would wait
    """

    add_bos: bool | None = None
    """Whether BOS stands before each document, once; as TorchTitan where not set: if the tokenizer has it"""

    add_eos: bool | None = None
    """Whether EOS stands behind each document, once; as TorchTitan where not set: if the tokenizer has it"""

    packing: Packing = "concat"
    """
    How documents become samples: "concat" puts them one after the other and cuts at seq_len; "best_fit" keeps them
    whole where they fit, and puts those together that leave little padding; "document" gives each a sample of its own.
    The last two cut what is longer into pieces
    """

    positions: bool = False
    """
    Whether samples carry positions that start at 0 at each document, for the model's rotary embedding; else the model
    counts through the sample
    """

    mask_boundaries: bool = False
    """
    Whether the label that is another document's first token is left out of the loss; goes with "concat", since the
    other packings have no such label
    """

    tokenizer_engine: TokenizerEngine = "auto"
    """
    Library that tokenizes; the ids do not depend on it. "auto" is fastokens where it loads the tokenizer, and
    "tokenizers" (for BPE ranks "tiktoken") elsewhere; one that is named and cannot serve is an error
    """

    epochs: int = 0
    """
    Passes over all sources after which the data ends, each sample exactly so many times; 0 has no end. Goes with
    sources that have no weights, since weighted ones end their passes at different places
    """

    skip: list[tuple[int, int]] = field(default_factory=list)
    """
    Samples that are never trained on, as pairs of sequence numbers [[a, b], ...]: a to b - 1 are left out, and no
    other sample's number changes. May be added beyond the place that a checkpoint stands at
    """

    accept_change: str = ""
    """
    Fingerprint of a new order, from the error that refuses a checkpoint of another one: that checkpoint is gone on
    from, with this order and no other
    """

    worker_timeout: float = 90.0
    """
    Seconds that a loader worker may be silent while a step waits for it (300 for its start), after which the run ends
    with an error that names the samples; 0 waits for ever. By default less than the 100 seconds that TorchTitan's
    ranks wait for each other, which would not say whose data is missing
    """

    sources: list[SourceConfig] = field(default_factory=list)
    """
    The sources, in TOML one [[data.sources]] table each, with the keys name (its folder in the cache), path (file,
    folder, glob, or hf://ORGANISATION/NAME), weight (its share of the samples; by size if none has one), text_field
    ("text" by default) or token_field (of token ids) or chat_field (of a conversation) or processor
    ("package.module:function"), on_bad_record ("error" or "skip"), add_bos and add_eos (where they differ from those
    of [data]), and on the hub subset, split and revision. Without any, training.dataset and training.dataset_path are
    the source
    """

    stages: list[StageConfig] = field(default_factory=list)
    """
    Other mixtures later in the run, in TOML one [[data.stages]] table each, with the keys at (number of the first
    sample) and weights (of the sources by name; those not named are off). May be appended beyond the place that a
    checkpoint stands at
    """

    validation_sources: list[SourceConfig] = field(default_factory=list)
    """
    The sources of validation, in TOML one [[data.validation_sources]] table each, with the same keys. Without any,
    validation.dataset and validation.dataset_path are the source
    """

    def __post_init__(self) -> None:
        _check_type("data.seed", self.seed, int)
        _check_type("data.cache_dir", self.cache_dir, str)
        _check_type("data.shuffle_shards", self.shuffle_shards, int)
        _check_type("data.shard_bytes", self.shard_bytes, int)
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"data.seed = {self.seed}: expected 0 to 2**63 - 1")
        if not self.cache_dir:
            raise ConfigError("data.cache_dir is empty: expected the path of a folder")
        _check_no_nul("data.cache_dir", self.cache_dir)
        if self.shuffle_shards < 0:
            raise ConfigError(
                f"data.shuffle_shards = {self.shuffle_shards}: expected 1 or more shards, or 0 for no shuffle"
            )
        if self.shard_bytes < 0:
            raise ConfigError(
                f"data.shard_bytes = {self.shard_bytes}: expected a number of bytes, or 0 for the default"
            )
        minutes = self.max_build_minutes
        if not isinstance(minutes, int | float) or isinstance(minutes, bool) or not minutes >= 0:
            raise ConfigError(f"data.max_build_minutes = {minutes!r}: expected a number of minutes, 0 or more")
        timeout = self.worker_timeout
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 <= timeout < math.inf:
            raise ConfigError(f"data.worker_timeout = {timeout!r}: expected a number of seconds, or 0 to wait for ever")
        for key in ("add_bos", "add_eos"):
            _check_flag(f"data.{key}", getattr(self, key))
        _check_choice("data.packing", self.packing, Packing)
        for key in ("positions", "mask_boundaries"):
            if not isinstance(getattr(self, key), bool):
                raise ConfigError(f"data.{key} = {getattr(self, key)!r}: expected true or false")
        if self.mask_boundaries and self.packing != "concat":
            raise ConfigError(
                f'data.mask_boundaries goes with data.packing = "concat": with {self.packing!r} no label is another '
                "document's token; leave it out"
            )
        _check_choice("data.tokenizer_engine", self.tokenizer_engine, TokenizerEngine)
        _check_type("data.epochs", self.epochs, int)
        if self.epochs < 0:
            raise ConfigError(f"data.epochs = {self.epochs}: expected 1 or more, or 0 for data without end")
        self.skip = [_skip(interval) for interval in _as_list("data.skip", self.skip)]
        _check_type("data.accept_change", self.accept_change, str)
        for key in _SOURCE_LISTS:
            _check_sources(key, getattr(self, key))
        for source in self.validation_sources:
            if source.weight is not None:
                raise ConfigError(
                    f"data.validation_sources: source {source.name!r} has a weight, but validation reads all sources "
                    "by their size; leave it out"
                )
        self._check_mixture()
        for source in (*self.sources, *self.validation_sources):
            if source.chat_field and self.packing == "concat":
                raise ConfigError(
                    f'source {source.name!r} has a chat_field, which goes with data.packing = "best_fit" or '
                    '"document": with "concat" conversations would be cut anywhere and run into each other'
                )
        paths = {source.name: source.path for source in self.sources}
        for source in self.validation_sources:
            if paths.get(source.name, source.path) != source.path:
                raise ConfigError(
                    f"data.validation_sources: the name {source.name!r} is that of a training source with another "
                    "path, and their stores would share a folder; give it another name"
                )

    @property
    def sources_in_use(self) -> list[SourceConfig]:
        """The sources that the order draws from at some time: those with a weight above 0, at first or in a stage."""
        later = {name for stage in self.stages for name, weight in stage.weights.items() if weight}
        return [source for source in self.sources if source.weight != 0 or source.name in later]

    def _check_mixture(self) -> None:
        """Checks weights, stages and epochs together."""
        weights = {source.name: source.weight for source in self.sources}
        without = [name for name, weight in weights.items() if weight is None]
        if without and len(without) < len(weights):
            raise ConfigError(
                f"data.sources: {', '.join(map(repr, without))} without a weight, and others with one; give all of "
                "them a weight (0 turns one off), or none, and each counts by its size"
            )
        if weights and not without and not any(weights.values()):
            raise ConfigError("data.sources: all weights are 0, so there is nothing to draw from")
        if not isinstance(self.stages, list) or not all(isinstance(stage, StageConfig) for stage in self.stages):
            raise ConfigError("data.stages: expected a list of stages, in TOML [[data.stages]] tables")
        before = 0
        for stage in self.stages:
            if stage.at <= before:
                raise ConfigError(
                    f"data.stages: at = {stage.at:,} follows {before:,}: expected each stage to start behind the one "
                    "before"
                )
            before = stage.at
            for name in stage.weights:
                if name not in weights:
                    raise ConfigError(
                        f"data.stages: the stage at sample {stage.at:,} has a weight for {name!r}, and no "
                        f"[[data.sources]] table has that name; the names are "
                        f"{', '.join(map(repr, weights)) or 'none'}"
                    )
        if self.epochs and (self.stages or (weights and not without)):
            raise ConfigError(
                f"data.epochs = {self.epochs} goes with sources that have neither weights nor stages: with them the "
                "sources end their epochs at different samples. Leave the weights out, or set training.steps"
            )


@dataclass
class Data(DataConfig):
    """
    Where the data comes from, in which order it is trained on, and by which loader: a training config's [data] table.

    The sources stand in the TOML file, one [[data.sources]] table each, with the keys name (the
    source's name, and that of its folder in the cache), path (file, folder or glob, or hf://ORGANISATION/NAME),
    weight (its share of the samples; by size if none has one), text_field (field or column with the text of a
    record; "text" by default) or token_field (with token ids) or chat_field (with a conversation) or processor
    ("package.module:function" that makes texts of a record), on_bad_record ("error" or "skip"), add_bos and add_eos
    (where they differ from those here), and on the hub subset, split and revision. An argument can override them by
    number: --data.sources.0.path. Without any source, training.dataset and training.dataset_path are the source.
    [[data.validation_sources]] likewise for validation. Other mixtures later in the run are [[data.stages]] tables,
    with the keys at and weights.
    """

    loading_strategy: LoadingStrategy = "stock"
    """
    Which loader reads the training data: "stock" is TorchTitan's own; "zephon" is elastic and
    deterministic, and reads the other settings of this group
    """

    initial_cursor: int = 0
    """Sample to start at where no place in the data is loaded from a checkpoint; does not count otherwise"""

    trace: bool = False
    """
    Whether each rank writes a line for each step into data_trace in job.dump_folder: the samples that it took, and a
    digest of their tensors, with which zephon-data audit proves what was trained on
    """

    on_preempt: OnPreempt = "stop"
    """
    What a SIGTERM to any rank does: "stop" ends the run at once, as in TorchTitan; "checkpoint" finishes the step,
    saves a full checkpoint and ends the run with status 0. It costs one small all-reduce a step
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.trace, bool):
            raise ConfigError(f"data.trace = {self.trace!r}: expected true or false")
        _check_type("data.initial_cursor", self.initial_cursor, int)
        if not 0 <= self.initial_cursor <= MAX_NUMBER:
            raise ConfigError(f"data.initial_cursor = {self.initial_cursor:,}: expected 0 to {MAX_NUMBER:,}")
        _check_choice("data.loading_strategy", self.loading_strategy, LoadingStrategy)
        _check_choice("data.on_preempt", self.on_preempt, OnPreempt)


_TABLES: dict[str, type] = {**dict.fromkeys(_SOURCE_LISTS, SourceConfig), "stages": StageConfig}


def data_config_from_table(table: Mapping[str, Any], where: str, cls: type[DataConfig] = DataConfig) -> DataConfig:
    """Builds the settings from a parsed ``[data]`` table.

    Args:
        table: The table as the TOML parser gives it.
        where: The file it comes from, for messages.
        cls: The class to build, ``DataConfig`` or one that adds fields to it.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type or range; the message
            names the file, the place in it and the allowed keys.
    """
    values = dict(table)
    for key, entry_cls in _TABLES.items():
        if key not in values:
            continue
        tables = values[key]
        if not isinstance(tables, list) or not all(isinstance(entry, Mapping) for entry in tables):
            what = "stage" if entry_cls is StageConfig else "source"
            raise ConfigError(f"{where}: data.{key} must be written as [[data.{key}]] tables, one for each {what}")
        values[key] = [
            _from_table(entry_cls, entry, f"{where}: [[data.{key}]] number {number}")
            for number, entry in enumerate(tables, start=1)
        ]
    config: DataConfig = _from_table(cls, values, f"{where}: [data]")
    return config


def whole(name: str, value: Any) -> int:
    """``value`` as a Python int; NumPy's integers would not fit into a state, and a float or bool is a slip.

    Raises:
        ConfigError: It is no integer.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{name} = {value!r}: expected an integer")
    return operator.index(value)


def _from_table(cls: type, table: Mapping[str, Any], where: str) -> Any:
    fields = dataclasses.fields(cls)
    allowed = [f.name for f in fields]
    for key in table:
        if key not in allowed:
            raise ConfigError(f"{where}: unknown key {key!r}; the keys are {', '.join(allowed)}")
    for f in fields:
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in table:
            raise ConfigError(f"{where}: {f.name!r} is missing; the keys are {', '.join(allowed)}")
    try:
        return cls(**table)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_sources(key: str, sources: object) -> None:
    if not isinstance(sources, list) or not all(isinstance(source, SourceConfig) for source in sources):
        raise ConfigError(f"data.{key}: expected a list of sources, in TOML [[data.{key}]] tables")
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"data.{key}: the name {name!r} is given more than once; each needs its own")


def _check_weight(key: str, weight: object) -> None:
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 <= weight < math.inf:
        raise ConfigError(f"{key} = {weight!r}: expected a number, 0 (off) or more")


def _as_list(key: str, value: object) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{key} = {value!r}: expected a list of pairs, as [[100, 200]]")
    return list(value)


def _skip(interval: object) -> tuple[int, int]:
    """An interval of ``data.skip``."""
    pair = tuple(interval) if isinstance(interval, list | tuple) else ()
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) for n in pair):
        raise ConfigError(f"data.skip: {interval!r}: expected two sequence numbers, as [100, 200] for 100 to 199")
    if not 0 <= pair[0] < pair[1] <= MAX_NUMBER:
        raise ConfigError(
            f"data.skip: [{pair[0]}, {pair[1]}]: expected the first number to skip and then the one behind the last, "
            f"from 0 to {MAX_NUMBER:,}"
        )
    return pair


def _check_type(key: str, value: object, expected: type) -> None:
    # bool is an int to Python, but `seed = true` is a slip.
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        kind = {str: "a string", int: "an integer"}[expected]
        raise ConfigError(f"{key} = {value!r}: expected {kind}")


def _check_no_nul(what: str, path: str) -> None:
    if "\0" in path:
        raise ConfigError(f"{what} = {path!r}: no path has a NUL in it")


def _check_flag(key: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{key} = {value!r}: expected true or false, or nothing for the default")


def _check_choice(key: str, value: object, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise ConfigError(f"{key} = {value!r}: expected {' or '.join(map(repr, get_args(allowed)))}")
