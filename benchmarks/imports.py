"""What the package and each command take to start, against Python with numpy.

    PYTHONPATH=. python benchmarks/imports.py

Runs, in turn, ``python -c "import numpy"``, imports of the package, the help of each command, and commands that do
their work on a source of 60 documents, each in a process of its own. Prints a table of the modules that each has in
the end and of the medians of what the processor worked for it, as a ratio to numpy's; so another load of the machine
moves it little.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.show_far import timed
from benchmarks.tables import table
from tests.corpora import D60, make_sources
from tests.trace.runs import write_config
from zephon_patches.cli.__main__ import COMMANDS

NUMPY = "import numpy"
IMPORTS = [
    "import zephon_patches",
    NUMPY,
    "import torch",
    "import torch.utils.data",
    "from zephon_patches import build_loader",
]

COUNTED = """
import runpy, sys
sys.argv = ["zephon-data", *{arguments!r}]
try:
    runpy.run_module("zephon_patches.cli", run_name="__main__")
except SystemExit:
    pass
finally:
    print(len(sys.modules), file=sys.stderr)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Start of the package and of each command, against numpy")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, each of all of them (7)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        made = make_sources(Path(name), web=D60)
        config = str(write_config(Path(name) / "run.toml", made))
        command("prepare", "--config", config)
        work = {
            "prepare": ["--config", config],
            "prepare --dry-run": ["--config", config],
            "verify": [str(Path(name) / "cache")],
            "show --at": ["0:4", "--config", config],
            "order --at": ["0:24", "--dp", "3", "--config", config],
            "find --document": ["0.jsonl:17", "--config", config],
        }
        rows: dict[str, list[str]] = {line: ["-c", line] for line in IMPORTS}
        for arguments in (["--help"], *([one, "--help"] for one in COMMANDS)):
            rows[" ".join(["zephon-data", *arguments])] = ["-m", "zephon_patches.cli", *arguments]
        for one, arguments in work.items():
            rows[f"zephon-data {one} ..."] = ["-m", "zephon_patches.cli", *one.split(), *arguments]
        modules = {row: count_modules(arguments) for row, arguments in rows.items()}
        seconds: dict[str, list[float]] = {row: [] for row in rows}
        for _ in range(args.rounds):
            for row, arguments in rows.items():
                seconds[row].append(timed([sys.executable, *arguments])[1])
    ratios = {
        row: statistics.median(a / b for a, b in zip(of, seconds[NUMPY], strict=True)) for row, of in seconds.items()
    }
    print(
        table(
            ["start", "modules", "work, numpy = 1"], [[f"`{r}`", f"{modules[r]:,}", f"{ratios[r]:.2f}"] for r in rows]
        )
    )


def command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "zephon_patches.cli", *arguments], check=True, capture_output=True)


def count_modules(arguments: list[str]) -> int:
    """Modules that a start has imported in the end."""
    kind, what, *rest = arguments
    code = (
        f"{what}; import sys; print(len(sys.modules), file=sys.stderr)"
        if kind == "-c"
        else COUNTED.format(arguments=rest)
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(json.loads(ended.stderr.split()[-1]))


if __name__ == "__main__":
    main()
