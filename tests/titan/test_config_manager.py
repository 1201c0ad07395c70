"""``[data]`` in TOML files, on the command line and in ``--help``."""

import contextlib
import dataclasses
import io
import re
import sys
import types

import pytest

from torchtitan.config import ConfigManager, JobConfig
from zephon_patches import DataConfig, SourceConfig
from zephon_patches.config import Data
from zephon_patches.errors import ConfigError

TOML = """
[training]
seq_len = 64

[data]
loading_strategy = "zephon"
seed = 4

[[data.sources]]
name = "web"
path = "web/*.jsonl"

[[data.sources]]
name = "books"
path = "books"
text_field = "body"
"""


@pytest.fixture
def parse(tmp_path):
    """Parses a TOML text and arguments."""

    def parse(toml: str | None, *args: str) -> JobConfig:
        if toml is not None:
            (tmp_path / "run.toml").write_text(toml)
            args = ("--job.config_file", str(tmp_path / "run.toml"), *args)
        return ConfigManager().parse_args(list(args))

    return parse


def plain(text: str) -> str:
    """A help page without colours, boxes and line breaks."""
    return re.sub(r"(?:[\s│╭╮╰╯─]|-{3,})+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))


def test_the_default_is_the_stock_loader(parse):
    assert parse(None).data == Data()
    assert Data().loading_strategy == "stock"


def test_tables_become_sources(parse):
    config = parse(TOML)
    assert config.data == Data(
        loading_strategy="zephon",
        seed=4,
        sources=[SourceConfig("web", "web/*.jsonl"), SourceConfig("books", "books", "body")],
    )
    assert config.training.seq_len == 64


def test_arguments_win_over_the_file(parse):
    config = parse(TOML, "--data.loading_strategy=stock", "--data.seed", "9", "--data.sources.1.path", "elsewhere")
    assert config.data.loading_strategy == "stock"
    assert config.data.seed == 9
    assert [source.path for source in config.data.sources] == ["web/*.jsonl", "elsewhere"]
    assert config.data.sources[1].text_field == "body"


def test_one_argument_turns_it_on(parse):
    assert parse(None, "--data.loading_strategy=zephon").data == Data(loading_strategy="zephon")
    assert parse(None, "--data.loading-strategy", "zephon").data == Data(loading_strategy="zephon")


@pytest.mark.parametrize("spelling", ["--job.config_file={}", "--job.config-file={}"])
@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ("[data]\nsead = 1", ["[data]", "'sead'", "loading_strategy", "shard_bytes"]),
        ("[data]\nseed = '1'", ["data.seed", "'1'", "an integer"]),
        ("[data]\nseed = -1", ["data.seed", "-1"]),
        ("[data]\nloading_strategy = 'fast'", ["data.loading_strategy", "'fast'", "'stock' or 'zephon'"]),
        ("[data]\nloading_strategy = 3", ["data.loading_strategy", "3", "'stock' or 'zephon'"]),
        ("[[data.sources]]\nname = 'a'", ["[[data.sources]] number 1", "'path' is missing"]),
        ("[[data.sources]]\nname = 'a'\npath = 'b'\nfield = 'c'", ["'field'", "name, path, text_field"]),
        ("[data.sources]\nname = 'a'\npath = 'b'", ["[[data.sources]]"]),
        ("data = 3", ["[data] table", "3"]),
        ("[[data]]\nseed = 1", ["[data] table"]),
    ],
)
def test_a_mistake_in_the_file_names_the_file_and_the_place(tmp_path, spelling, table, parts):
    file = tmp_path / "wrong.toml"
    file.write_text(table)
    with pytest.raises(ConfigError) as caught:
        ConfigManager().parse_args([spelling.format(file)])
    for part in [str(file), *parts]:
        assert part in str(caught.value)
    assert caught.value.__suppress_context__, "the parser's own frames say nothing to who wrote the file"


def test_unknown_keys_elsewhere_stay_upstreams_affair(parse):
    with pytest.raises(ValueError, match="seqlen"):
        parse("[training]\nseqlen = 3")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--data.seed=-1"], ["data.seed", "-1", "0 to 2**63 - 1"]),
        (["--data.shuffle_shards=-1"], ["data.shuffle_shards"]),
        (["--data.sources.0.path", ""], ["'web'", "path is empty"]),
        (["--data.sources.1.name", "web"], ["'web'", "more than once"]),
        (["--data.loading_strategy=fast"], ["fast", "'stock', 'zephon'"]),
        (["--data.seed=x"], ["--data.seed", "'x'"]),
    ],
)
def test_a_wrong_argument_gives_one_message_and_no_traceback(parse, capsys, args, parts):
    with pytest.raises(SystemExit) as caught:
        parse(TOML, *args)
    assert caught.value.code == 2
    printed = plain("".join(capsys.readouterr()))
    for part in parts:
        assert part in printed
    assert "Traceback" not in printed


def help_page(parse, toml: str | None) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as caught:
        parse(toml, "--help")
    assert caught.value.code == 0
    return plain(output.getvalue())


@pytest.mark.parametrize("toml", [None, TOML], ids=["no source", "with sources"])
def test_help_shows_every_setting_and_the_fields_of_a_source(parse, toml):
    page = help_page(parse, toml)
    data = page[page.index("data options Where") :]
    for field in dataclasses.fields(Data):
        name = field.name.replace("_", "-")
        assert re.search(rf"--data\.{name}[ ,]", data) or field.name in ("sources", "validation_sources", "stages")
    assert "[[data.sources]]" in data and "[[data.validation_sources]]" in data and "[[data.stages]]" in data
    for field in dataclasses.fields(SourceConfig):
        assert re.search(rf"\b{field.name}\b", data)
    if toml is not None:
        for field in dataclasses.fields(SourceConfig):
            assert f"--data.sources.0.{field.name.replace('_', '-')}" in data


def test_help_describes_each_setting(parse):
    page = help_page(parse, None)
    assert "Seed of the order of the data" in page
    assert '"stock" is TorchTitan\'s own' in page
    # And upstream's, whose source is read from another file.
    assert "Local batch size (i.e., per-device batch size)" in page


def test_every_field_of_the_settings_has_a_real_type():
    # Upstream's reader and the merge of custom configs look at field types, and do nothing with strings.
    for field in dataclasses.fields(JobConfig):
        assert isinstance(field.type, type) and dataclasses.is_dataclass(field.type), field.name
    for cls in (Data, DataConfig, SourceConfig):
        assert not any(isinstance(field.type, str) for field in dataclasses.fields(cls))


# Custom config modules


@dataclasses.dataclass
class ExtraData:
    window: int = 3


@dataclasses.dataclass
class Extra:
    rate: float = 0.5


@dataclasses.dataclass
class CustomJobConfig:
    data: ExtraData = dataclasses.field(default_factory=ExtraData)
    extra: Extra = dataclasses.field(default_factory=Extra)


@pytest.fixture
def custom_module(monkeypatch):
    module = types.ModuleType("a_custom_config_module")
    module.JobConfig = CustomJobConfig
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def test_a_custom_config_is_merged_with_the_data_table(parse, custom_module):
    toml = TOML.replace("seed = 4", "seed = 4\nwindow = 8") + "\n[extra]\nrate = 0.25\n"
    config = parse(toml, "--job.custom_config_module", custom_module, "--data.sources.0.path", "x")
    assert isinstance(config, JobConfig)
    assert isinstance(config.data, Data)
    assert (config.data.window, config.data.seed, config.extra.rate) == (8, 4, 0.25)
    assert config.data.sources == [SourceConfig("web", "x"), SourceConfig("books", "books", "body")]


def test_a_custom_config_is_checked_too(parse, custom_module):
    toml = f"[job]\ncustom_config_module = '{custom_module}'\n[data]\nwndow = 8\n"
    with pytest.raises(ConfigError, match=r"'wndow'.*window"):
        parse(toml)
    with pytest.raises(ConfigError, match="loading_strategy"):
        parse(toml.replace("wndow = 8", "loading_strategy = 'x'"))
