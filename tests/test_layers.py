"""Imports point downwards only, as DESIGN.md's layers say."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zephon_patches

PACKAGE = Path(zephon_patches.__file__).parent

# Height of each part; a part imports from lower ones, and from itself.
HEIGHT = {
    "errors": 0,
    "config": 1,
    "keys": 1,
    "training_config": 2,
    "mapping": 2,
    "order": 2,
    "store": 2,
    "samples": 3,
    "prepare": 3,
    "loader": 4,
    "trace": 5,
    "titan": 6,
    "cli": 6,
    "train": 6,
    "launch": 6,
}

# What each part needs beyond numpy and the standard library is its own affair; these packages are not.
MAY_IMPORT_TORCH = {"loader", "trace", "titan", "launch"}
MAY_IMPORT_TORCHTITAN = {"titan", "train"}
ARITHMETIC = {"mapping", "order"}
ARITHMETIC_IMPORTS = {
    "bisect",
    "collections",
    "dataclasses",
    "fractions",
    "functools",
    "math",
    "numpy",
    "typing",
    "zephon_patches",
}

FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def imports_of(file: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            # `from zephon_patches import mapping` names the part only in the list.
            if node.module == "zephon_patches":
                yield from (f"zephon_patches.{alias.name}" for alias in node.names)
            else:
                yield node.module


def test_every_file_belongs_to_a_layer():
    assert {part_of(file) for file in FILES} <= set(HEIGHT)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_point_downwards(file: Path):
    part = part_of(file)
    for name in imports_of(file):
        if name.startswith("zephon_patches."):
            other = name.split(".")[1]
            if other in HEIGHT:
                assert other == part or HEIGHT[other] < HEIGHT[part], f"{file} imports {name}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_torch_and_torchtitan_stay_in_the_upper_layers(file: Path):
    roots = {name.split(".")[0] for name in imports_of(file)}
    part = part_of(file)
    assert "torch" not in roots or part in MAY_IMPORT_TORCH, f"{file} imports torch"
    assert "torchtitan" not in roots or part in MAY_IMPORT_TORCHTITAN, f"{file} imports torchtitan"


@pytest.mark.parametrize("file", [file for file in FILES if part_of(file) in ARITHMETIC], ids=str)
def test_order_and_mapping_are_arithmetic(file: Path):
    roots = {name.split(".")[0] for name in imports_of(file)}
    assert roots <= ARITHMETIC_IMPORTS, f"{file} imports {sorted(roots - ARITHMETIC_IMPORTS)}"


def test_importing_the_package_imports_neither_torch_nor_torchtitan():
    code = (
        "import sys, zephon_patches\n"
        "zephon_patches.DataConfig(sources=[zephon_patches.SourceConfig(name='a', path='b')])\n"
        "print(sorted({'torch', 'torchtitan', 'numpy'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_looking_at_data_imports_neither_torch_nor_torchtitan():
    code = (
        "import sys\n"
        "from zephon_patches.prepare import build\n"
        "from zephon_patches.trace import audit, plot, steps, view\n"
        "print(sorted({'torch', 'torchtitan', 'datasets', 'matplotlib'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
