"""A start that would tokenize for too long stops with the command that does it ahead of time."""

import itertools
import json
import logging
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.corpora import D60, Corpus, make_corpus
from tests.prepare.stores import contents
from zephon_patches import build_loader
from zephon_patches.cli.__main__ import main
from zephon_patches.config import DataConfig, SourceConfig
from zephon_patches.errors import ConfigError
from zephon_patches.prepare import estimate
from zephon_patches.prepare.build import Building, open_or_build
from zephon_patches.prepare.builder import Builder
from zephon_patches.prepare.shards import RecordInput
from zephon_patches.prepare.tokenizers import TextTokenizer


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Texts that are large enough to be worth an estimate here, on a path that a shell would take apart."""
    monkeypatch.setattr(estimate, "_ESTIMATED_BYTES", 1000)
    monkeypatch.setattr(estimate, "_SAMPLE_BYTES", 300)
    return make_corpus(tmp_path / "my texts", D60, files=2)


def start(config: DataConfig, corpus: Corpus):
    return build_loader(config, corpus.tokenizer, seq_len=8, global_batch_size=12, local_batch_size=12)


def refusal(config: DataConfig, corpus: Corpus) -> str:
    with pytest.raises(ConfigError) as caught:
        start(config, corpus)
    return str(caught.value)


def command_of(text: str) -> list[str]:
    """The arguments of ``zephon-data`` in a message."""
    _, found, command = text.partition("on any machine that has the data: ")
    assert found
    python, flag, module, *arguments = shlex.split(command)
    assert (python, flag, module) == (sys.executable, "-m", "zephon_patches.cli")
    return arguments


def stores_in(cache: Path) -> list[Path]:
    return sorted(path.parent for path in cache.glob("*/*/manifest.json"))


def test_a_build_that_would_take_too_long_is_refused_with_its_size_its_time_and_the_limit(corpus):
    text = refusal(corpus.config(max_build_minutes=0), corpus)
    assert re.search(r"source 'web': tokenizing 0 MB would take about \d+\.\d minutes here", text)
    assert "above data.max_build_minutes = 0, while all ranks wait" in text
    assert stores_in(corpus.folder / "cache") == []


class Clock:
    """Moves only while texts are tokenized: by a second for every 100 characters."""

    def __init__(self, monkeypatch) -> None:
        self.seconds = 0.0
        self.encoded = 0
        encode = TextTokenizer.encode_batch

        def slow(tokenizer, texts):
            self.encoded += sum(map(len, texts))
            self.seconds += sum(map(len, texts)) / 100
            return encode(tokenizer, texts)

        monkeypatch.setattr(TextTokenizer, "encode_batch", slow)
        monkeypatch.setattr(estimate.time, "monotonic", lambda: self.seconds)


@pytest.mark.parametrize("shard_bytes", [0, 900, 50])
def test_the_estimate_is_the_time_that_it_takes_though_little_is_tokenized_for_it(corpus, monkeypatch, shard_bytes):
    monkeypatch.setattr(estimate, "_SAMPLE_SECONDS", 1e9)
    clock = Clock(monkeypatch)
    texts = sum(len(json.loads(line)["text"]) for path in corpus.texts.iterdir() for line in path.open())
    text = refusal(corpus.config(shard_bytes=shard_bytes, max_build_minutes=0.05), corpus)
    [minutes] = re.findall(r"about ([\d.]+) minutes", text)
    assert clock.encoded < texts / 3
    assert float(minutes) == pytest.approx(texts / 100 / 60, abs=0.15)


@pytest.mark.parametrize("settings", [{}, {"shard_bytes": 900}, {"name": "a.b-c"}])
def test_the_command_prepares_the_store_that_the_run_then_opens(corpus, monkeypatch, tmp_path, settings):
    config = corpus.config(max_build_minutes=0, **settings)
    arguments = command_of(refusal(config, corpus))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(arguments) == 0
    assert list(elsewhere.iterdir()) == []
    [store] = stores_in(corpus.folder / "cache")
    before = contents(store)
    loader = start(config, corpus)
    next(iter(loader))
    assert stores_in(corpus.folder / "cache") == [store]
    assert contents(store) == before


def test_the_command_is_right_for_relative_paths_a_glob_and_another_field(corpus, monkeypatch, tmp_path):
    for path in corpus.texts.iterdir():
        path.write_text(path.read_text().replace('"text"', '"the content"'))
    monkeypatch.chdir(corpus.folder)
    source = SourceConfig("web", "texts/*.jsonl", text_field="the content")
    config = DataConfig(sources=[source], cache_dir="tokens here", max_build_minutes=0)
    with pytest.raises(ConfigError) as caught:
        build_loader(config, "tokenizer", seq_len=8, global_batch_size=12, local_batch_size=12)
    monkeypatch.chdir(tmp_path)
    assert main(command_of(str(caught.value))) == 0
    monkeypatch.chdir(corpus.folder)
    assert len(stores_in(Path("tokens here"))) == 1
    build_loader(config, "tokenizer", seq_len=8, global_batch_size=12, local_batch_size=12)
    assert len(stores_in(Path("tokens here"))) == 1


def test_a_finished_store_needs_no_estimate(corpus, monkeypatch):
    start(corpus.config(), corpus)

    def forbidden(*arguments):
        raise AssertionError("nothing is to be tokenized")

    monkeypatch.setattr(TextTokenizer, "encode_batch", forbidden)
    start(corpus.config(max_build_minutes=0), corpus)


def test_a_finished_store_whose_files_have_other_times_needs_none_either(corpus):
    start(corpus.config(), corpus)
    for path in corpus.texts.iterdir():
        os.utime(path, ns=(0, 1))
    start(corpus.config(max_build_minutes=0), corpus)


def test_only_what_is_left_of_a_build_is_estimated(corpus, monkeypatch, caplog):
    config = corpus.config(shard_bytes=900, max_build_minutes=0)
    real = Builder._build

    def dies_at_unit_2(self, number, *rest):
        if number == 2:
            raise KeyboardInterrupt
        return real(self, number, *rest)

    monkeypatch.setattr(Builder, "_build", dies_at_unit_2)
    with pytest.raises(KeyboardInterrupt):
        start(corpus.config(shard_bytes=900), corpus)
    monkeypatch.setattr(Builder, "_build", real)
    caplog.set_level(logging.INFO)
    refusal(config, corpus)
    assert "source 'web': tokenizing 2 of 4 units (0.0 MB), about 0.0 minutes" in caplog.text
    monkeypatch.setattr(estimate, "_ESTIMATED_BYTES", 2000)  # what is left is less than that, all of it more
    start(config, corpus)


def test_little_text_is_never_refused(corpus, monkeypatch):
    monkeypatch.setattr(estimate, "_ESTIMATED_BYTES", 10**6)
    start(corpus.config(max_build_minutes=0), corpus)


def test_preparing_ahead_has_no_limit(corpus, tmp_path, capsys):
    config = tmp_path / "run.toml"
    config.write_text(
        f"""
        [data]
        max_build_minutes = 0
        cache_dir = "{corpus.folder / "cache"}"
        [[data.sources]]
        name = "web"
        path = "{corpus.texts}"
        [model]
        hf_assets_path = "{corpus.tokenizer}"
        """
    )
    assert main(["prepare", "--config", str(config)]) == 0
    assert re.search(r"^web +training +60 +660 ", capsys.readouterr().out, re.M)
    start(corpus.config(max_build_minutes=0), corpus)


def registered(documents: int, folder: Path | None = None) -> RecordInput:
    return RecordInput("set", {"dataset": "set"}, lambda: iter(range(documents)), lambda i: "0_0 " * 9, folder)


def test_a_registered_data_set_has_no_command_and_the_message_says_what_to_do_instead(corpus, tmp_path):
    source = registered(100, corpus.texts)
    with pytest.raises(ConfigError, match="Start once with NGPU=1 and a larger data.max_build_minutes"):
        open_or_build(source, TextTokenizer(corpus.tokenizer), tmp_path / "cache", 0, building=Building(max_minutes=0))
    store = open_or_build(
        source, TextTokenizer(corpus.tokenizer), tmp_path / "cache", 0, building=Building(max_minutes=60)
    )
    assert store.manifest.documents == 100


def test_a_data_set_of_unknown_size_stops_at_the_limit_and_goes_on_at_the_next_start(corpus, tmp_path, monkeypatch):
    Clock(monkeypatch)  # a shard of 1,000 bytes takes 10 s
    tokenizer = TextTokenizer(corpus.tokenizer)
    starts = 0
    while True:
        starts += 1
        try:
            store = open_or_build(
                registered(200), tokenizer, tmp_path / "cache", 1000, building=Building(max_minutes=0.5)
            )
            break
        except ConfigError as error:
            assert "tokenizing is not done after data.max_build_minutes = 0.5; what is done is kept" in str(error)
        assert starts < 10, "nothing is kept"
    assert starts > 1
    at_once = open_or_build(registered(200), tokenizer, tmp_path / "other", 1000)
    assert contents(store.folder) == contents(at_once.folder)


@pytest.mark.parametrize(
    ("table", "source", "expected"),
    [
        ({}, {}, [True]),
        ({"add_eos": False}, {}, [False]),
        ({"add_eos": False}, {"add_eos": True}, [True]),
        ({"add_eos": True}, {"add_eos": False}, [False]),
    ],
)
def test_eos_is_as_the_data_or_the_source_says_and_the_command_prepares_that(corpus, table, source, expected):
    config = corpus.config(max_build_minutes=0, **table)
    for key, value in source.items():
        setattr(config.sources[0], key, value)
    arguments = command_of(refusal(config, corpus))
    assert main(arguments) == 0
    (store,) = stores_in(corpus.folder / "cache")
    loader = start(config, corpus)
    assert [store] == stores_in(corpus.folder / "cache")
    rows = [labels for _, labels in itertools.islice(loader, 30)]
    eos = TextTokenizer(corpus.tokenizer).eos_id
    assert [any((labels == eos).any() for labels in rows)] == expected


def test_bos_that_the_tokenizer_lacks_is_refused_with_the_source(corpus):
    text = refusal(corpus.config(add_bos=True), corpus)
    assert re.search(r"source 'web': add_bos = true, but the tokenizer in .* has no BOS \(bos_token of", text)
