"""``zephon-data prepare``: from a config or for one source, what it prints, its errors and its exit status."""

import argparse
import json
import os
import re
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
        "source  role        documents  tokens  mean  largest    share  shards  skipped  folder",
        f"web     training           60     660  11.0       18  100.0 %       4  -        {stores[1]}",
        f"check   validation          2      11   5.5        6        -       1  -        {stores[0]}",
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
    assert re.search(r"^fields +training +1 +3 +3\.0 +3 ", capsys.readouterr().out, re.M)
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


# --- shares, skipped records, lengths ---


def mixture(corpus, *sources: str) -> Path:
    """A config with these [[data.sources]] and no others."""
    tables = "".join(f"[[data.sources]]\n{source}\n" for source in sources)
    head = CONFIG[: CONFIG.index("[[data.sources]]")] + tables + "[model]" + CONFIG.partition("[model]")[2]
    config = corpus.folder / "mixture.toml"
    config.write_text(head.format(folder=corpus.folder))
    return config


def test_a_source_that_no_mixture_draws_from_is_not_prepared(corpus, capsys):
    web = 'name = "web"\npath = "{folder}/texts"\nweight = 1'
    off = 'name = "old"\npath = "{folder}/gone"\nweight = 0'
    config = mixture(corpus, web, off)
    assert prepare("--config", config) == 0
    said = capsys.readouterr().out
    assert said.startswith("old: off (its weight is 0, and no stage draws from it), so it is not prepared\n")
    assert [store.parent.name for store in stores_in(corpus.folder / "cache")] == ["web"]
    # A stage turns it on again, and then it has to be there, before anything is built.
    config.write_text(config.read_text().replace("shard_bytes = 900", "shard_bytes = 901"))
    config.write_text(config.read_text() + "[[data.stages]]\nat = 100\nweights = {{ old = 1 }}\n".format())
    assert prepare("--config", config) == 1
    assert "source 'old': " in capsys.readouterr().err
    assert len(stores_in(corpus.folder / "cache")) == 1


def test_the_table_has_shares_of_the_training_tokens_longest_documents_and_what_was_skipped(corpus, capsys):
    write_jsonl(corpus.folder / "more" / "a.jsonl", [219])
    bad = corpus.folder / "more" / "b.jsonl"
    bad.write_text('{"text": 1}\n{\n{}\n{}\n')
    config = (corpus.folder / "run.toml").read_text()
    config = config.replace(
        "[[data.validation",
        f"[[data.sources]]\nname = 'more'\npath = '{bad.parent}'\non_bad_record = 'skip'\n[[data.validation",
    )
    (corpus.folder / "run.toml").write_text(config)
    assert prepare("--config", corpus.folder / "run.toml") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines[1:]}
    assert len({line.index(str(corpus.folder)) for line in rows.values()}) == 1
    assert " 75.0 % " in rows["web"] and " 25.0 % " in rows["more"]
    assert re.search(r"more +training +1 +220 +220.0 +220 .* 2 no field, 1 not JSON, 1 wrong type  /", rows["more"])


def test_an_index_that_is_cut_off_is_named(corpus, capsys):
    assert prepare("--config", corpus.folder / "run.toml") == 0
    path = stores_in(corpus.folder / "cache")[1] / "000002-000.idx"
    path.write_bytes(path.read_bytes()[:50])
    assert prepare("--config", corpus.folder / "run.toml") == 1
    assert f"{path}: cut off, or no index; zephon-data verify finds all damage" in capsys.readouterr().err
    path.unlink()
    os.mkfifo(path)
    assert prepare("--config", corpus.folder / "run.toml") == 1
    assert f"{path}: cut off, or no index" in capsys.readouterr().err
    path.unlink()
    assert prepare("--config", corpus.folder / "run.toml") == 1
    assert f"{path}: cannot be read" in capsys.readouterr().err


# --- several commands, parts, the plan ---


def test_parts_at_once_make_the_store_and_say_how_it_goes_on(corpus, capsys):
    arguments = ["prepare", "--config", corpus.folder / "run.toml"]
    assert prepare(*arguments[1:], "--cache-dir", corpus.folder / "whole") == 0
    parts = [
        subprocess.Popen(
            [sys.executable, "-m", "zephon_patches.cli", *map(str, arguments), "--part", f"{index}/3"],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(3)
    ]
    outputs = [part.communicate(timeout=60) for part in parts]
    assert [part.returncode for part in parts] == [0, 0, 0], outputs
    outs = [out for out, _ in outputs]
    assert any(re.search(r"^web +training +60 +660 ", out, re.M) for out in outs)
    for index, out in enumerate(outs):
        if not re.search(r"^web +training", out, re.M):
            assert re.search(rf"^web: part {index}/3 is done, and the store is not closed: \d of 4 units done, ", out)
            assert "or the same command without --part, which builds what is missing" in out
    whole, parted = stores_in(corpus.folder / "whole"), stores_in(corpus.folder / "cache")
    assert [contents(store) for store in parted] == [contents(store) for store in whole]


def test_a_dry_run_says_what_would_be_built_and_writes_nothing(corpus, capsys):
    config = corpus.folder / "run.toml"

    def rows() -> list[list[str]]:
        assert prepare("--config", config, "--dry-run") == 0
        return [line.split("  ") for line in capsys.readouterr().out.splitlines()]

    def first_cells(row: list[str]) -> list[str]:
        return [cell.strip() for cell in row if cell.strip()][:4]

    header, web, check = rows()
    assert first_cells(header) == ["source", "store", "units done", "units"]
    assert [first_cells(web), first_cells(check)] == [["web", "not begun", "0", "4"], ["check", "not begun", "0", "1"]]
    assert not (corpus.folder / "cache").exists()
    assert prepare("--config", config, "--part", "0/2") == 0
    capsys.readouterr()
    before = contents(corpus.folder / "cache")
    _, web, check = rows()
    assert [first_cells(web), first_cells(check)[:2]] == [["web", "partly built", "2", "4"], ["check", "finished"]]
    assert contents(corpus.folder / "cache") == before


def test_interrupted_while_it_is_imported_it_ends_with_one_line(corpus, capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "add_to", interrupted)
    assert prepare("--config", corpus.folder / "run.toml") == 130
    assert capsys.readouterr().err == "zephon-data: interrupted; start it again to go on\n"


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
        (["--config", "run.toml", "--workers", "0"], "--workers 0: expected 1 to 1,024"),
        (["--config", "run.toml", "--workers", "1000000"], "--workers 1000000: expected 1 to 1,024"),
        (["--config", "run.toml", "--part", "3/3"], "--part 3/3: expected I/N with 0 <= I < N, such as 0/8"),
        (["--config", "run.toml", "--part", "x/3"], "--part x/3: expected I/N"),
        (["--config", "run.toml", "--part", "0/" + "9" * 5000], "9: expected I/N"),
        (["--source", "web=" + "x" * 300, "--tokenizer", "tokenizer"], "x matches no file"),
        (["--source", "web=texts", "--tokenizer", "tokenizer", "--cache-dir", "x" * 300], "File name too long"),
        (["--source", "web=texts", "--tokenizer", "tokenizer", "--cache-dir", "circle"], "levels of symbolic links"),
        (["--config", "run.toml", "--part", "1"], "--part 1: expected I/N"),
        (["--config", "absent.toml"], "absent.toml: cannot be read (No such file or directory)"),
    ],
)
def test_a_mistake_is_told_on_standard_error_with_status_1(corpus, monkeypatch, capsys, arguments, text):
    monkeypatch.chdir(corpus.folder)
    Path("circle").symlink_to("circle")
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
        ('[[data.sources]]\nname = "web"\npath = "a\\u0000"', r"path = 'a\x00': no path has a NUL"),
        ('[data]\ncache_dir = "a\\u0000"', r"data.cache_dir = 'a\x00': no path has a NUL"),
        (
            '[model]\nhf_assets_path = "a\\u0000"\n[[data.sources]]\nname = "web"\npath = "texts"',
            r"tokenizer folder 'a\x00': no path has a NUL",
        ),
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


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonesuch"],
        ["prepare", "--nonesuch"],
        ["prepare", "--shard-bytes", "x"],
        ["prepare", "--source", "a=a", "--source", "b=b"],
    ],
)
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
    command.add_to(parser)
    data, tokenizer, _ = command._settings(parser.parse_args(["--config", str(path)]))
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
    assert [text.split(" ")[0] for text in done.stdout.splitlines()] == ["source", "web", "check"]
    assert "source 'web': tokenizing 4 of 4 units" in done.stderr
    done = run("prepare", "--config", corpus.folder / "absent.toml")
    assert (done.returncode, done.stdout) == (1, "")
    assert "absent.toml: cannot be read" in done.stderr


def shell(corpus, line: str) -> subprocess.CompletedProcess:
    """Runs a line of bash with the command as ``zd`` in the corpus's folder."""
    return subprocess.run(
        ["bash", "-c", f'zd() {{ "{sys.executable}" -m zephon_patches.cli "$@"; }}\n{line}'],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=corpus.folder,
        capture_output=True,
        text=True,
    )


def test_standard_output_that_nobody_reads_or_that_is_full_costs_no_traceback(corpus):
    assert prepare("--config", corpus.folder / "run.toml") == 0
    done = shell(corpus, 'zd verify cache | true; echo "${PIPESTATUS[0]}"')
    assert (done.stdout, done.stderr) == ("141\n", "")
    done = shell(corpus, "zd verify cache > /dev/full")
    assert (done.returncode, done.stderr) == (1, "zephon-data verify: [Errno 28] No space left on device\n")


def test_standard_streams_that_are_closed_cost_no_file_its_number(corpus):
    done = shell(corpus, "zd prepare --config run.toml --workers 2 <&- >&- 2>&-")
    assert done.returncode == 0
    assert len(stores_in(corpus.folder / "cache")) == 2
    assert main(["verify", str(corpus.folder / "cache")]) == 0


def test_any_name_is_printed_whatever_the_encoding(corpus):
    done = shell(corpus, "PYTHONIOENCODING=ascii zd prepare --config run.toml --cache-dir t\u00f6kens")
    assert done.returncode == 0, done.stderr
    assert "t\\xf6kens/web" in done.stdout
    assert len(stores_in(corpus.folder / "t\u00f6kens")) == 2


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


# --- packings ---


def test_the_plans_of_a_config_s_packing_are_made_and_what_they_leave_out_is_told(corpus, capsys):
    config = corpus.folder / "run.toml"
    text = config.read_text().replace("[data]\n", '[data]\npacking = "best_fit"\n')
    config.write_text(text + "\n[training]\nseq_len = 8\n[validation]\nseq_len = 4\n")
    assert prepare("--config", config) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert lines[0] == "source  role        packing   seq_len  samples     fill  left out"
    assert re.fullmatch(r"web     training    best_fit        8 +\d+ +9\d\.\d\d % +0", lines[1])
    assert re.fullmatch(r"check   validation  best_fit        4 +3 +75\.00 % +0", lines[2])
    check, web = stores_in(corpus.folder / "cache")
    before = contents(web)
    assert {"best_fit-8.json", "000000-000.best_fit-8"} <= before.keys()
    assert {"best_fit-4.json", "000000-000.best_fit-4"} <= contents(check).keys()
    # The run finds them, and a second command leaves them alone.
    loader = build_loader(
        corpus.config(shard_bytes=900, packing="best_fit"),
        corpus.tokenizer,
        seq_len=8,
        global_batch_size=12,
        local_batch_size=12,
    )
    next(iter(loader))
    assert prepare("--config", config) == 0
    assert contents(web) == before
    assert prepare("--config", config, "--seq-len", 16) == 0
    assert "best_fit-16.json" in contents(web)


def test_the_packing_of_one_source_needs_a_length(corpus, capsys):
    source = ["--source", f"web={corpus.texts}", "--tokenizer", corpus.tokenizer, "--cache-dir", corpus.folder / "c"]
    assert prepare(*source, "--packing", "document") == 1
    assert "give --seq-len too" in capsys.readouterr().err
    assert prepare(*source, "--packing", "document", "--seq-len", 0) == 1
    assert "seq_len = 0 of training: expected a number of tokens" in capsys.readouterr().err
    assert prepare(*source, "--packing", "document", "--seq-len", 8) == 0
    assert "document-8.json" in contents(stores_in(corpus.folder / "c")[0])
    assert prepare("--config", corpus.folder / "run.toml", "--packing", "document") == 1
    assert "--packing goes with --source" in capsys.readouterr().err
