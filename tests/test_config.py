"""The ``[data]`` settings: what they accept, and what they say about what they refuse."""

from dataclasses import dataclass

import pytest

from zephon_patches import DataConfig, SourceConfig, StageConfig
from zephon_patches.config import MAX_SEED, Data, data_config_from_table
from zephon_patches.errors import ConfigError


def refusal(table: object, cls: type[DataConfig] = DataConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        data_config_from_table(table, "run.toml", cls)  # type: ignore[arg-type]
    return str(caught.value)


def test_an_empty_table_gives_the_defaults():
    assert data_config_from_table({}, "run.toml") == DataConfig()
    assert DataConfig() == DataConfig(seed=0, cache_dir="./data_cache", shuffle_shards=256, shard_bytes=0, sources=[])


def test_a_table_gives_what_the_python_classes_give():
    table = {
        "seed": 7,
        "sources": [{"name": "web", "path": "web/*.jsonl"}, {"name": "b", "path": "b", "text_field": "t"}],
    }
    config = data_config_from_table(table, "run.toml")
    assert config == DataConfig(
        seed=7, sources=[SourceConfig(name="web", path="web/*.jsonl"), SourceConfig(name="b", path="b", text_field="t")]
    )
    assert table["sources"][0] == {"name": "web", "path": "web/*.jsonl"}, "the table itself is left alone"


def test_defaults_are_not_shared_between_configs():
    DataConfig().sources.append(SourceConfig(name="a", path="b"))
    assert DataConfig().sources == []


def test_an_added_field_of_a_subclass_is_a_key():
    @dataclass
    class More(DataConfig):
        extra: int = 1

    assert data_config_from_table({"extra": 2}, "run.toml", More) == More(extra=2)
    assert "extra" in refusal({"extras": 2}, More)


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ({"sed": 1}, ["run.toml", "[data]", "'sed'", "seed, cache_dir, shuffle_shards", "sources"]),
        ({"sources": [{"name": "a", "path": "b"}, {"path": "b"}]}, ["run.toml", "number 2", "'name'", "text_field"]),
        ({"sources": [{"name": "a"}]}, ["run.toml", "number 1", "'path'", "missing"]),
        ({"sources": [{"name": "a", "path": "b", "feild": 1}]}, ["number 1", "'feild'", "name, path, text_field"]),
        ({"sources": {"name": "a", "path": "b"}}, ["run.toml", "[[data.sources]]"]),
        ({"sources": "web/*.jsonl"}, ["run.toml", "[[data.sources]]"]),
        ({"sources": ["web/*.jsonl"]}, ["run.toml", "[[data.sources]]"]),
        ({"sources": [{"name": "a", "path": ["b"]}]}, ["number 1", "path", "['b']", "a string"]),
        ({"sources": [{"name": 1, "path": "b"}]}, ["number 1", "name", "1", "a string"]),
    ],
)
def test_a_wrong_table_names_file_place_and_allowed_keys(table, parts):
    message = refusal(table)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"seed": -1}, ["data.seed", "-1", "0 to 2**63 - 1"]),
        ({"seed": MAX_SEED + 1}, ["data.seed", str(MAX_SEED + 1)]),
        ({"seed": "0"}, ["data.seed", "'0'", "an integer"]),
        ({"seed": 1.0}, ["data.seed", "1.0", "an integer"]),
        ({"seed": True}, ["data.seed", "True", "an integer"]),
        ({"cache_dir": ""}, ["data.cache_dir", "empty"]),
        ({"cache_dir": 3}, ["data.cache_dir", "3", "a string"]),
        ({"shuffle_shards": -1}, ["data.shuffle_shards", "-1"]),
        ({"shard_bytes": -5}, ["data.shard_bytes", "-5"]),
        ({"verify": "sum"}, ["data.verify", "'sum'", "'size' or 'checksum'"]),
        ({"epochs": -1}, ["data.epochs", "-1", "0 for data without end"]),
        ({"epochs": 1.0}, ["data.epochs", "1.0", "an integer"]),
        ({"accept_change": 5}, ["data.accept_change", "5", "a string"]),
        ({"skip": [(5, 2**61)]}, ["data.skip", "[5, 2305843009213693952]"]),
        ({"skip": "5"}, ["data.skip", "a list of pairs"]),
        ({"stages": [{"at": 5}]}, ["data.stages", "[[data.stages]] tables"]),
        ({"stages": [StageConfig(5, {"a": 1})]}, ["'a'", "the names are none"]),
        ({"sources": [{"name": "a"}]}, ["data.sources"]),
        ({"sources": [SourceConfig("a", "x"), SourceConfig("a", "y")]}, ["'a'", "more than once"]),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(settings, parts):
    with pytest.raises(ConfigError) as caught:
        DataConfig(**settings)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["a", "A-1", "the_pile.v2", "0", "x" * 100])
def test_a_source_name_may_be_any_folder_name(name):
    assert SourceConfig(name=name, path="p").name == name


@pytest.mark.parametrize("name", ["", ".", "..", "-a", ".a", "a/b", "a\\b", "a b", "a:b", "ä", "a\n", "x" * 101])
def test_a_source_name_that_is_no_folder_name_everywhere_is_refused(name):
    with pytest.raises(ConfigError, match="letters, digits"):
        SourceConfig(name=name, path="p")


def test_an_empty_path_or_field_is_refused():
    with pytest.raises(ConfigError, match="path is empty"):
        SourceConfig(name="a", path="")
    with pytest.raises(ConfigError, match="text_field is empty"):
        SourceConfig(name="a", path="p", text_field="")


def test_bounds_are_accepted():
    DataConfig(seed=0, shuffle_shards=0, shard_bytes=0)
    DataConfig(seed=MAX_SEED, shuffle_shards=1, shard_bytes=1)


def test_a_validation_source_may_share_a_training_source_s_name_only_with_its_path():
    web = SourceConfig("web", "a")
    assert DataConfig(sources=[web], validation_sources=[SourceConfig("web", "a")])
    with pytest.raises(ConfigError, match="'web' is that of a training source with another path"):
        DataConfig(sources=[web], validation_sources=[SourceConfig("web", "b")])


@pytest.mark.parametrize("value", [True, -1, 2**70, 1.5, "1"])
def test_an_initial_cursor_that_is_none_is_refused_by_name(value):
    with pytest.raises(ConfigError, match=r"data\.initial_cursor"):
        Data(initial_cursor=value)


def test_what_becomes_of_bad_records_is_one_of_two():
    assert SourceConfig(name="a", path="p").on_bad_record == "error"
    with pytest.raises(ConfigError, match="source 'a': on_bad_record = 'ignore': expected 'error' or 'skip'"):
        SourceConfig(name="a", path="p", on_bad_record="ignore")


@pytest.mark.parametrize("key", ["add_bos", "add_eos"])
def test_ends_of_documents_are_true_false_or_not_set(key):
    assert getattr(DataConfig(), key) is None
    with pytest.raises(ConfigError, match=f"data.{key} = 1: expected true or false"):
        DataConfig(**{key: 1})
    with pytest.raises(ConfigError, match=f"source 'a': {key} = 'yes': expected true or false"):
        SourceConfig(name="a", path="p", **{key: "yes"})
