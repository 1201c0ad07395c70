"""What the documentation names is there, and what is there is named."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from zephon_patches.config import Data, SourceConfig

REPOSITORY = Path(__file__).parents[1]
PAGES = [
    path.relative_to(REPOSITORY).as_posix()
    for path in (
        REPOSITORY / "README.md",
        REPOSITORY / "zephon_patches/README.md",
        REPOSITORY / "tests/cases/README.md",
        *sorted((REPOSITORY / "docs").glob("*.md")),
    )
]


def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def prose_of(page: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_code_is_closed_in_its_block_or_paragraph(page):
    assert len(re.findall(r"^ *```", text_of(page), re.MULTILINE)) % 2 == 0
    for paragraph in re.split(r"\n\s*\n", prose_of(page)):
        assert paragraph.count("`") % 2 == 0, paragraph


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for name, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", prose_of(page)):
        if name.startswith("http"):
            continue
        target = REPOSITORY / page if not name else (REPOSITORY / page).parent / name
        assert target.exists(), name
        assert not anchor or anchor in anchors_of(target), anchor


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    folders = "tests|scripts|benchmarks|docs|train_configs|zephon_patches"
    names = re.findall(rf"(?<![\w/])(?:{folders})/[\w./-]*\w", text_of(page))
    assert [name for name in names if not (REPOSITORY / name).exists()] == []


def names_of_tests(file: str) -> Iterator[str]:
    """Names of a file's tests, or of those of a folder's files."""
    path = REPOSITORY / file
    for each in path.rglob("test_*.py") if path.is_dir() else [path]:
        for node in ast.walk(ast.parse(each.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield node.name


@pytest.mark.parametrize("page", PAGES)
def test_commands_choose_tests_that_exist(page):
    for command in re.findall(r"`([^`]*tests/[^`]* -k [^`]*)`", prose_of(page)):
        files = re.findall(r"tests/[\w/]+(?:\.py)?", command)
        [(quoted, word)] = re.findall(r'-k (?:"([^"]*)"|(\S+))', command)
        terms = (quoted or word).split(" or ")
        for file in files:
            assert any(term in name for term in terms for name in names_of_tests(file)), (command, file)
        for term in terms:
            assert any(term in name for file in files for name in names_of_tests(file)), (command, term)


def test_the_tour_names_every_module():
    package = REPOSITORY / "zephon_patches"
    modules = [path.relative_to(package) for path in package.rglob("*.py") if path.name != "__init__.py"]
    tour = text_of("zephon_patches/README.md")
    assert [str(name) for name in modules if name.parts[0] != "cli" and f"`{name.as_posix()}`" not in tour] == []
    named = re.findall(r"`((?:\w+/)?\w+\.py)`", tour)
    assert [name for name in named if not (package / name).exists()] == []


def rows_of_settings() -> Iterator[tuple[str, str]]:
    """Each key of the README's tables of settings, and its default as written."""
    for line in text_of("README.md").splitlines():
        if line.startswith("| `"):
            keys, default = line.split("|")[1:3]
            yield from ((key, default.strip()) for key in re.findall(r"`(?:\[\[data\.)?(\w+)(?:\]\])?`", keys))


def test_the_readme_has_every_setting():
    settings = {field.name for each in (Data, SourceConfig) for field in dataclasses.fields(each)}
    assert {key for key, _ in rows_of_settings()} == settings


def test_the_readme_has_the_defaults():
    rows = dict(reversed(list(rows_of_settings())))  # of keys that a source has too, the first
    compared = 0
    for field in dataclasses.fields(Data):
        default = field.default
        if isinstance(default, bool | int | float) or (isinstance(default, str) and default):
            shown = f'`"{default}"`' if isinstance(default, str) else f"{default:g}"
            assert rows[field.name] == (str(default).lower() if isinstance(default, bool) else shown), field.name
            compared += 1
    assert compared > 15


def test_each_benchmark_has_a_line_that_says_how_it_is_run():
    page = text_of("docs/benchmarks.md")
    for path in sorted((REPOSITORY / "benchmarks").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in source:
            assert f"PYTHONPATH=. python benchmarks/{path.name}" in ast.get_docstring(ast.parse(source)), path.name
            assert f"`{path.stem}`" in page, path.name
