"""Each command imports what it uses, and no more: nobody waits for another command's libraries."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpora import D60, make_sources
from tests.trace.runs import prepare, write_config
from zephon_patches.cli.__main__ import COMMANDS

REPOSITORY = Path(__file__).parents[2]

# What is not needed for one thing or another; all that is imported by no command without a need.
LIBRARIES = {
    "datasets",
    "fastokens",
    "filelock",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "multiprocessing",
    "numpy",
    "orjson",
    "pyarrow",
    "ray",
    "tiktoken",
    "tokenizers",
    "torch",
    "torchtitan",
    "tqdm",
    "transformers",
    "triton",
    "xxhash",
    "zstandard",
}
LOOKS = {"numpy", "orjson", "tokenizers", "xxhash", "zstandard"}  # the order, the stores, the tokenizer's identity
CHECKS = {"filelock"}  # locks of a build that may be at it

# What a command may import, where it has its work done.
USES = {
    "prepare": LOOKS | CHECKS | {"multiprocessing", "tqdm", "fastokens", "tiktoken"},
    "verify": {"numpy", "orjson", "xxhash"},
    "show": LOOKS,
    "order": LOOKS,
    "find": LOOKS,
    "plot": {"numpy"},
}


def imports_of(*commands: list[str]) -> list[dict]:
    """Of each command its status, what it printed and the listed libraries that it imported."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.cli.imports_of", json.dumps(commands)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    for each in found:
        each["libraries"] = {module.partition(".")[0] for module in each["modules"]} & LIBRARIES
    return found


def test_help_imports_no_library_and_no_other_command():
    names = list(COMMANDS)
    for name, found in zip(["", *names], imports_of(["--help"], *([name, "--help"] for name in names)), strict=True):
        assert found["status"] == 0, found["printed"]
        assert found["printed"].startswith("usage: zephon-data " + name), found["printed"]
        assert found["libraries"] == set(), name
        others = {f"zephon_patches.cli.{other}" for other in names if other != name}
        assert not others & set(found["modules"]), name


def test_a_wrong_command_is_told_all_of_them():
    (found,) = imports_of(["shwo", "--at", "1"])
    assert found["status"] == 2
    assert all(name in found["printed"] for name in COMMANDS), found["printed"]
    assert found["libraries"] == set()


@pytest.fixture
def config(tmp_path, capsys):
    made = make_sources(tmp_path, web=D60)
    path = write_config(tmp_path / "run.toml", made)
    prepare(path)
    capsys.readouterr()
    return path


def test_a_command_imports_only_what_it_uses(config):
    commands = {
        "prepare": ["--config", str(config)],  # the store is there
        "verify": [str(config.parent / "cache")],
        "show": ["--config", str(config), "--at", "0:4", "--text"],
        "order": ["--config", str(config), "--at", "0:24", "--dp", "3"],
        "find": ["--config", str(config), "--document", "0.jsonl:17"],
        "plot": [str(config.parent / "nothing"), "-o", str(config.parent / "run.png")],  # has no traces
    }
    found = imports_of(*([name, *arguments] for name, arguments in commands.items()))
    for name, each in zip(commands, found, strict=True):
        assert each["status"] == (1 if name == "plot" else 0), each["printed"]
        assert each["libraries"] - USES[name] == set(), name
    assert {"numpy", "tokenizers"} <= found[0]["libraries"]  # or it would not have run


def test_settings_import_no_library():
    code = (
        "import sys, zephon_patches\n"
        "zephon_patches.DataConfig(sources=[zephon_patches.SourceConfig(name='a', path='b')])\n"
        "print(*{module.partition('.')[0] for module in sys.modules})\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert "zephon_patches" in ended.stdout.split(), ended.stderr
    assert not LIBRARIES & set(ended.stdout.split())
