"""Compares this repository's loader with others, and with the limit of the machine.

    PYTHONPATH=. python -m benchmarks.peers --folder /tmp/peers

Makes an environment for each set of packages that go together, collects text from this machine, writes it in every
format, measures, and prints the tables as Markdown. Every figure stands beside that of the other loaders in the same
round; rounds alternate between them; shown is the median, with the smallest and largest. What is in the folder already
(environments, text, formats) is used again.

    --tables a h         some tables, of
                           a  delivering tokens                 e  bytes of a checkpoint
                           b  text to batches                   f  memory
                           c  text to the loader's own format   g  tokens missing or repeated over an epoch
                           d  restoring in mid-epoch            h  restoring at other numbers of ranks
    --peers litdata      some loaders beside this repository and the limit; nothing is kept then
    --write FILE         puts the tables of the last run between the markers of a Markdown file
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers import tables
from benchmarks.peers.adapters import NAMES
from benchmarks.peers.measure import TABLES, Bench, prepare

MARKERS = "<!-- tables: begin -->", "<!-- tables: end -->"
ALWAYS = "limit", "ours"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/peers"), help="where everything is (/tmp/peers)")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="to measure (all)")
    parser.add_argument("--peers", nargs="+", choices=NAMES, help="to compare with (all)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each figure (3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a measurement of table a (2)")
    parser.add_argument("--megabytes", type=int, default=150, help="text to collect (150)")
    parser.add_argument("--text-megabytes", type=int, default=12, help="of it for tables b and c (12)")
    parser.add_argument("--prepare", action="store_true", help="measure nothing: environments, text and formats only")
    parser.add_argument("--keep", action="store_true", help="measure only the tables that the folder does not have")
    parser.add_argument("--print", action="store_true", help="measure nothing, print what the folder has")
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file that gets the tables")
    args = parser.parse_args(argv)
    if args.peers and (args.write or args.print):
        parser.error("--peers measures some loaders and keeps nothing; --write and --print show kept results")
    args.folder.mkdir(parents=True, exist_ok=True)
    results = args.folder / "results"
    results.mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    if not args.print:
        wanted = [table for table in args.tables if not (args.keep and (results / f"{table}.json").is_file())]
        for table, measured in _measure(args, wanted):
            found[table] = measured
            if not args.peers:
                (results / f"{table}.json").write_text(json.dumps(measured, indent=1))
    if not args.peers:
        found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("?.json"))}
    text = "\n".join([*(_shown(table, found[table]) for table in sorted(found)), *_notes(found)])
    print(text)
    if args.write:
        _write(args.write, text)
    return 0


def _measure(args: argparse.Namespace, wanted: Sequence[str]) -> Any:
    peers = [name for name in NAMES if not args.peers or name in (*ALWAYS, *args.peers)]
    folder = args.folder.resolve()
    with Bench(folder, peers, args.rounds, args.seconds, args.megabytes, args.text_megabytes) as bench:
        if args.prepare:
            prepare(bench)
            return
        for table in wanted:
            started = time.monotonic()
            measured = TABLES[table](bench)
            print(f"table {table}: {time.monotonic() - started:.0f} s", file=sys.stderr)
            yield table, {"peers": measured, "about": _about(args, bench, table)}


def _about(args: argparse.Namespace, bench: Bench, table: str) -> dict[str, Any]:
    """What a reader needs to judge the figures and to get them again."""
    greetings = {name: bench.greeting(name) for name in bench.peers}
    versions: dict[str, set[str]] = {"torchtitan-zephon": {version("torchtitan-zephon")}}
    for greeting in greetings.values():
        for package, number in greeting.get("versions", {}).items():
            versions.setdefault(package, set()).add(number)
    settings = f"--rounds {args.rounds} --seconds {args.seconds:g} --megabytes {args.megabytes}"
    return {
        "command": f"python -m benchmarks.peers --tables {table} {settings} --text-megabytes {args.text_megabytes}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {_gigabytes():.0f} GB of memory",
        "python": platform.python_version(),
        "versions": {package: " and ".join(sorted(numbers)) for package, numbers in sorted(versions.items())},
        "titles": {name: greeting["title"] for name, greeting in greetings.items()},
        "notes": {name: greeting.get("notes", []) for name, greeting in greetings.items()},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _gigabytes() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _shown(table: str, found: dict[str, Any]) -> str:
    """A table, with what said no and how it was measured below it."""
    about = found["about"]
    parts = [tables.markdown(table, found["peers"], about["titles"])]
    if table == "h" and (said := tables.refusals(found["peers"], about["titles"])):
        parts.append(f"What those say that refuse:\n\n{said}\n")
    versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
    parts.append(f"`{about['command']}`, {about['date']}, {about['machine']}; Python {about['python']}, {versions}\n")
    return "\n".join(parts)


def _notes(found: dict[str, Any]) -> list[str]:
    """What the adapters say of themselves, once each."""
    notes = {note: None for table in found.values() for name in NAMES for note in table["about"]["notes"].get(name, [])}
    return ["### How each is run\n", *(f"- {note}" for note in notes)] if notes else []


def _write(path: Path, text: str) -> None:
    """Puts the tables between the file's markers."""
    before, begin, rest = path.read_text().partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not begin or not end:
        raise SystemExit(f"{path}: has no lines {MARKERS[0]} and {MARKERS[1]}; put them where the tables belong")
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


if __name__ == "__main__":
    raise SystemExit(main())
