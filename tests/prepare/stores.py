"""Corpora in mixed formats, their stores, and the way from a token back to its line."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tests.corpora import D60, line, words, write_tokenizer
from zephon_patches.config import SourceConfig
from zephon_patches.prepare.build import open_or_build
from zephon_patches.prepare.shards import FileInput
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.store.manifest import Manifest
from zephon_patches.store.reader import TokenStore

LENGTHS = D60
SHARD_BYTES = 500


def document(i: int) -> str:
    return " ".join(words(i, LENGTHS[i]))


def write_mixed(folder: Path) -> Path:
    """60 numbered documents over four files, with blank lines: 8 units of ``SHARD_BYTES``."""
    texts = folder / "texts"
    (texts / "d").mkdir(parents=True)
    lines = [line(i, LENGTHS[i]) for i in range(20)]
    (texts / "a.jsonl").write_text("\n" + "".join(lines[:7]) + "  \n\n" + "".join(lines[7:]) + "\n")
    table = pa.table({"id": list(range(20, 40)), "text": [document(i) for i in range(20, 40)]})
    pq.write_table(table, texts / "b.parquet", row_group_size=6, compression="none")
    (texts / "c.txt").write_text(document(40))
    (texts / "d" / "e.jsonl").write_text("".join(line(i, LENGTHS[i]) for i in range(41, 60)).rstrip("\n"))
    write_tokenizer(folder / "tokenizer", LENGTHS)
    return folder


def write_compressed(folder: Path) -> Path:
    """60 numbered documents over five files, three of them compressed."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    lines = [line(i, LENGTHS[i]).encode() for i in range(60)]
    (texts / "a.jsonl").write_bytes(b"".join(lines[:5]))
    data = b"\n" + b"".join(lines[5:20]) + b"  \r\n" + b"".join(lines[20:40])
    (texts / "b.json.gz").write_bytes(gzip.compress(data[:700], mtime=0) + gzip.compress(data[700:], mtime=0))
    (texts / "c.txt.zst").write_bytes(zstandard.compress(document(40).encode()))
    (texts / "d.jsonl").write_bytes(b"".join(lines[41:50]))
    (texts / "e.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines[50:])))
    write_tokenizer(folder / "tokenizer", LENGTHS)
    return folder


def file_input(folder: Path, **settings) -> FileInput:
    return FileInput(SourceConfig(**{"name": "web", "path": str(folder / "texts"), **settings}))


def open_store(folder: Path, cache: str = "cache", shard_bytes: int = SHARD_BYTES, **settings) -> TokenStore:
    tokenizer = TextTokenizer(folder / settings.pop("tokenizer", "tokenizer"))
    return open_or_build(file_input(folder, **settings), tokenizer, folder / cache, shard_bytes)


def process(
    folder: Path,
    seconds: float,
    cache: str = "cache",
    moment: int | str | None = None,
    one_per_machine: bool = False,
    begin: bool = True,
) -> subprocess.Popen:
    """A builder of the same store in a process of its own; without ``begin`` it waits for ``begin_together``."""
    arguments = [folder / "texts", folder / "tokenizer", folder / cache, SHARD_BYTES, seconds, int(one_per_machine)]
    arguments += [] if moment is None else [moment]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.prepare.slow_build", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL if begin else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def begin_together(builders: list[subprocess.Popen]) -> None:
    """Lets builders begin at one moment, however long their starts took."""
    for builder in builders:
        assert builder.stdout.readline() == "ready\n"
    for builder in builders:
        builder.stdin.write("\n")
        builder.stdin.flush()


def until_one_builds(folder: Path) -> None:
    """Waits for the first shard that is being written."""
    deadline = time.monotonic() + 60
    while not list(folder.glob("cache/web/*/.*.tmp")):
        assert time.monotonic() < deadline, "nobody builds"
        time.sleep(0.01)


def contents(folder: Path) -> dict[str, bytes]:
    """All that a store's folder holds but for its lock, and those of builders that may have been killed."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".lock", ".builder")
    }


def documents_of(store: TokenStore) -> list[list[int]]:
    """The tokens of every document, in the order of the store, by lengths in the index alone."""
    found = []
    for number, shard in enumerate(store.manifest.shards):
        lengths = np.fromfile(store.folder / f"{shard.name}.idx", "<i4", shard.documents, offset=34)
        found += [part.tolist() for part in np.split(store.tokens(number), np.cumsum(lengths)[:-1])][: len(lengths)]
    return found


def places_of(manifest: Manifest, folder: Path) -> list[tuple[str, int]]:
    """(file, record in the file) of every document, by the rule of docs/store.md."""
    read: dict[int, int] = {}  # file -> its records in the ranges so far
    places = []
    for shard in manifest.shards:
        origin = np.fromfile(folder / f"{shard.name}.origin", "<i8").reshape(-1, 2)  # shape: (documents, 2)
        for file, record in origin.tolist():
            places.append((manifest.files[file].name if file >= 0 else "", read.get(file, 0) + record))
        for piece in shard.ranges:
            read[piece.file] = read.get(piece.file, 0) + piece.records
    return places


def text_at(root: Path, name: str, record: int) -> str:
    """Reads a record from its file as a person would look it up."""
    path = root / name
    if path.suffix == ".parquet":
        return pq.read_table(path)["text"][record].as_py()
    if path.suffix == ".arrow":
        with pa.ipc.open_stream(str(path)) as reader:
            return reader.read_all()["text"][record].as_py()
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".zst":
        data = zstandard.decompress(data)
    if ".txt" in path.suffixes:
        assert record == 0
        return data.decode()
    return json.loads(data.split(b"\n")[record])["text"]


def command(folder: Path, *arguments: object, seconds: float = 0.0, cache: str = "cache") -> subprocess.Popen:
    """``zephon-data prepare`` of the same store, in a process group of its own, with SECONDS for each record."""
    program = ["-m", "zephon_patches.cli", "prepare", "--source", f"web={folder / 'texts'}"]
    program += ["--tokenizer", folder / "tokenizer", "--cache-dir", folder / cache, "--shard-bytes", SHARD_BYTES]
    program += ["--processor", "tests.prepare.slowly:text", *arguments]
    return subprocess.Popen(
        [sys.executable, *map(str, program)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "SLOWLY": str(seconds)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_of(group: int) -> list[int]:
    """The living processes of a process group (Linux)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # ended just now
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def workers_of(group: int) -> list[int]:
    """The worker processes in a process group."""
    found = []
    for pid in processes_of(group):
        try:
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found
