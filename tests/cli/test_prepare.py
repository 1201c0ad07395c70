"""``zephon-data prepare``: from a config or for one source, what it prints, its errors and its exit status."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpora import D60, make_corpus, write_jsonl
from tests.prepare.stores import contents
from zephon_patches import build_loader
from zephon_patches.cli import prepare as command
from zephon_patches.cli.__main__ import main

REPOSITORY = Path(__file__).parents[2]

CONFIG = """
[job]
description = "all other tables are the trainer's"
[data]
loading_strategy = "zephon"
cache_dir = "{folder}/cache"
shard_bytes = 900
[[data.sources]]
name = "web"
path = "{folder}/texts"
[[data.validation_sources]]
name = "check"
path = "{folder}/check/*.jsonl"
[model]
hf_assets_path = "{folder}/tokenizer"
"""


@pytest.fixture
def corpus(tmp_path):
    corpus = make_corpus(tmp_path, D60, files=3)
    write_jsonl(tmp_path / "check" / "a.jsonl", [4, 5])
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path))
    return corpus


def prepare(*arguments: object) -> int:
    return main(["prepare", *map(str, arguments)])


def stores_in(cache: Path) -> list[Path]:
    return sorted(path.parent for path in cache.glob("*/*/manifest.json"))


def test_all_sources_of_a_config_are_prepared_for_its_run(corpus, capsys):
    assert prepare("--config", corpus.folder / "run.toml") == 0
    stores = stores_in(corpus.folder / "cache")
    assert [store.parent.name for store in stores] == ["check", "web"]
    assert capsys.readouterr().out.splitlines() == [
        f"web: 60 documents, 660 tokens in 4 shards: {stores[1]}",
        f"check: 2 documents, 11 tokens in 1 shards: {stores[0]}",
    ]
    before = [contents(store) for store in stores]
    config = corpus.config(shard_bytes=900)
    loader = build_loader(config, corpus.tokenizer, seq_len=8, global_batch_size=12, local_batch_size=12)
    next(iter(loader))
    assert stores_in(corpus.folder / "cache") == stores
    assert [contents(store) for store in stores] == before


def test_one_source_is_prepared_as_a_config_with_the_same_settings_would_be(corpus):
    source = ["--source", f"web={corpus.texts}", "--tokenizer", corpus.tokenizer, "--shard-bytes", 900]
    assert prepare(*source, "--cache-dir", corpus.folder / "other") == 0
    assert prepare("--config", corpus.folder / "run.toml") == 0
    [alone] = stores_in(corpus.folder / "other")
    _, from_config = stores_in(corpus.folder / "cache")
    assert alone.name == from_config.name
    assert contents(alone) == contents(from_config)


def test_options_win_over_the_config(corpus):
    other = make_corpus(corpus.folder / "b", [3])
    for option in (
        ("--cache-dir", corpus.folder / "other"),
        ("--shard-bytes", 0),
        ("--tokenizer", other.tokenizer),
    ):
        assert prepare("--config", corpus.folder / "run.toml", *option) == 0
    assert len(stores_in(corpus.folder / "other")) == 2
    manifests = [json.loads((store / "manifest.json").read_text()) for store in stores_in(corpus.folder / "cache")]
    web = [manifest for manifest in manifests if len(manifest["files"]) == 3]
    assert sorted(manifest["recipe"]["shard_bytes"] for manifest in web) == [0, 900]
    assert len({manifest["recipe"]["tokenizer"] for manifest in web}) == 2


def test_a_field_other_than_text(corpus, capsys):
    path = corpus.folder / "fields" / "a.jsonl"
    path.parent.mkdir()
    path.write_text('{"content": "0_0 0_1"}\n')
    arguments = ["--source", f"fields={path}", "--tokenizer", corpus.tokenizer, "--cache-dir", corpus.folder / "cache"]
    assert prepare(*arguments, "--text-field", "content") == 0
    assert "fields: 1 documents, 3 tokens" in capsys.readouterr().out
    assert prepare(*arguments) == 1
    assert "content" in capsys.readouterr().err  # the fields that there are


def test_a_prepared_source_is_left_alone_and_an_interrupted_one_continued(corpus):
    assert prepare("--config", corpus.folder / "run.toml") == 0
    _, web = stores_in(corpus.folder / "cache")
    before, times = contents(web), {path.name: path.stat().st_mtime_ns for path in web.iterdir()}
    assert prepare("--config", corpus.folder / "run.toml") == 0
    assert {path.name: path.stat().st_mtime_ns for path in web.iterdir()} == times
    (web / "manifest.json").unlink()
    assert prepare("--config", corpus.folder / "run.toml") == 0
    assert contents(web) == before


# --- errors ---


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([], "give either --config FILE or --source NAME=PATH"),
        (["--config", "run.toml", "--source", "web=texts"], "give either --config FILE or --source NAME=PATH"),
        (["--source", "texts"], "--source texts: expected NAME=PATH, such as web=/data/web"),
        (["--source", "web=texts"], "no tokenizer: give --tokenizer FOLDER (with tokenizer.json)"),
        (["--source", "we/b=texts", "--tokenizer", "tokenizer"], "source name 'we/b' cannot be used"),
        (["--source", "web=", "--tokenizer", "tokenizer"], "source 'web': path is empty"),
        (["--source", "web=absent", "--tokenizer", "tokenizer"], "absent matches no file"),
        (["--source", "web=texts", "--tokenizer", "absent"], "absent/tokenizer.json: not found"),
        (["--source", "web=texts", "--tokenizer", "tokenizer", "--shard-bytes", "-1"], "data.shard_bytes = -1"),
        (["--source", "web=texts", "--tokenizer", "tokenizer", "--cache-dir", ""], "data.cache_dir is empty"),
        (["--source", "web=texts", "--tokenizer", "tokenizer", "--cache-dir", "texts/c"], "lies in the folder of"),
        (["--config", "run.toml", "--text-field", "content"], "--text-field goes with --source"),
        (["--config", "absent.toml"], "absent.toml: cannot be read (No such file or directory)"),
    ],
)
def test_a_mistake_is_told_on_standard_error_with_status_1(corpus, monkeypatch, capsys, arguments, text):
    monkeypatch.chdir(corpus.folder)
    assert prepare(*arguments) == 1
    out, err = capsys.readouterr()
    assert err.startswith("zephon-data prepare: ")
    assert text in err
    assert out == ""
    assert "Traceback" not in err
    assert not Path("cache").exists() and not Path("data_cache").exists()


@pytest.mark.parametrize(
    "content, text",
    [
        ("[data", "run.toml: not TOML ("),
        ("\xff", "run.toml: not TOML ("),
        ("", "run.toml: no [[data.sources]]; data sets of TorchTitan's registry are tokenized by the run itself"),
        ("data = 3", "run.toml: data must be one [data] table, found 3"),
        ("[[data]]", "run.toml: data must be one [data] table, found [{}]"),
        ("model = 3\n[[data.sources]]\nname = 'web'\npath = 'texts'", "run.toml: model must be one [model] table"),
        ("[model]\nhf_assets_path = 3\n[[data.sources]]\nname = 'web'\npath = 'texts'", "hf_assets_path = 3"),
        ("[data]\nsed = 1", "[data]: unknown key 'sed'"),
        ("[[data.sources]]\nname = 'web'", "[[data.sources]] number 1: 'path' is missing"),
        ("[[data.sources]]\nname = 'web'\npath = 'texts'", "no tokenizer: give --tokenizer FOLDER"),
        ("[data]\nseed = -1", "run.toml: [data]: data.seed = -1"),
    ],
)
def test_a_mistake_in_the_config_is_told_with_its_place(corpus, monkeypatch, capsys, content, text):
    monkeypatch.chdir(corpus.folder)
    Path("run.toml").write_text(content, encoding="latin-1")
    assert prepare("--config", "run.toml") == 1
    err = capsys.readouterr().err
    assert err.startswith("zephon-data prepare: ")
    assert text in err


@pytest.mark.parametrize("arguments", [[], ["nonesuch"], ["prepare", "--nonesuch"], ["prepare", "--shard-bytes", "x"]])
def test_a_command_line_that_cannot_be_read_has_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: zephon-data" in capsys.readouterr().err


def test_the_help_has_a_line_to_run_for_each_way(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["prepare", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "zephon-data prepare --config " in out
    assert "zephon-data prepare --source " in out


@pytest.mark.parametrize("path", sorted((REPOSITORY / "train_configs").glob("*.toml")), ids=lambda path: path.name)
def test_the_repository_s_own_configs_are_read(path):
    # Whether their texts are here is another matter.
    parser = argparse.ArgumentParser()
    command.add_to(parser.add_subparsers())
    data, tokenizer = command._settings(parser.parse_args(["prepare", "--config", str(path)]))
    assert data.sources and tokenizer


# --- as a program ---


def run(*arguments: object, code: str | None = None) -> subprocess.CompletedProcess:
    program = ["-m", "zephon_patches.cli"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd="/",
        capture_output=True,
        text=True,
    )


def test_as_a_program_it_prints_to_standard_output_what_is_there_and_logs_to_standard_error(corpus):
    done = run("prepare", "--config", corpus.folder / "run.toml")
    assert done.returncode == 0, done.stderr
    assert [text.split(":")[0] for text in done.stdout.splitlines()] == ["web", "check"]
    assert "source 'web': tokenizing 4 of 4 units" in done.stderr
    done = run("prepare", "--config", corpus.folder / "absent.toml")
    assert (done.returncode, done.stdout) == (1, "")
    assert "absent.toml: cannot be read" in done.stderr


PROGRAM = """
import sys
from zephon_patches.cli.__main__ import main
status = main(sys.argv[1:])
loaded = [name for name in ("torch", "torchtitan", "torchdata", "datasets") if name in sys.modules]
sys.exit(f"status {status}, imported {loaded}" if status or loaded else 0)
"""


def test_it_imports_neither_torch_nor_torchtitan(corpus):
    done = run("prepare", "--config", corpus.folder / "run.toml", code=PROGRAM)
    assert done.returncode == 0, done.stderr
    assert len(stores_in(corpus.folder / "cache")) == 2
