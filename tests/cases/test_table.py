"""The table of faults and tests in README.md is whole, and names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NUMBERS = {
    "A": [1, 3, 4, 5, 7, 8, 9, 12],
    "B": [1, 3, 4, 5, 7, 8, 10, 14, 15],
    "C": [1, 2, 4, 7, 8],
    "D": [1, 2, 3, 6, 7, 10, 11, 12, 14],
    "E": [1, 2, 3, 5, 7, 8, 10, 12, 15, 17, 19],
    "F": [1, 3, 5, 8, 9, 10, 11],
    "G": [1, 3, 5, 6, 8, 10, 12, 13],
    "H": [1, 2, 4, 5, 7, 8, 11, 13],
    "I": [1, 3, 4, 7, 8, 10],
    "J": [1, 3, 5, 6, 7, 10],
    "K": [1, 2, 4],
}
FAULTS = [f"{group}{number:02}" for group, numbers in NUMBERS.items() for number in numbers]
CORPORA = {"D60", "E48"}  # names of the like
FAULT = re.compile(r"\b[A-K]\d\d\b")


@cache
def table() -> dict[str, list[str]]:
    """The tests of each fault."""
    lines = (Path(__file__).parent / "README.md").read_text().splitlines()
    rows = [re.fullmatch(r"\| ([A-Z]\d\d) \| (.*) \| (.*) \|", line) for line in lines]
    cells = [row.groups() for row in rows if row]
    faults = [fault for fault, _, _ in cells]
    assert faults == sorted(set(faults)), "each fault has one row, in order"
    return {fault: re.findall(r"`([^`]*)`", tests) for fault, tests, _ in cells}


@cache
def functions(file: Path) -> dict[str, ast.FunctionDef]:
    """The tests of a file by name."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_each_fault_is_in_the_table():
    assert list(table()) == FAULTS


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_tests_that_exist(fault):
    assert table()[fault]
    for test in table()[fault]:
        file, name = test.split("::")
        assert name in functions(TESTS / file), test


def test_what_docstrings_name_is_in_the_table():
    named = {
        fault
        for file in TESTS.rglob("test_*.py")
        for node in functions(file).values()
        for fault in FAULT.findall(ast.get_docstring(node) or "")
    }
    assert len(named) > 70
    assert named - CORPORA <= table().keys()
