"""How fast texts become a token store, against what others do with the same tokenizer, in one run.

    PYTHONPATH=. python benchmarks/real_text.py --folder /tmp/real_text
    PYTHONPATH=. python benchmarks/tokenizing.py --folder /tmp/real_text --tokenizer bpe32k

Each round measures, one after the other, in MB of text a second:

    encode_batch    `tokenizers`, texts that are in memory already, nothing is read or written: the yardstick
    datasets.map    `map(batched=True, num_proc=CORES)` over a data set that is loaded already
    process pool    a call of `tokenizers` for each document in a pool of CORES processes, as Megatron prepares data
    jsonl, ...      a store of each format, with each engine: reading, tokenizing, comparing, writing; behind it
                    the ratio of the whole process, with the start of Python and the loading of the tokenizer

The slow ones read the first --part megabytes, or our build the first file. Of our builds the peak memory is shown too:
what all their processes hold alone (pages of files, which the system may drop, do not count). Ratios are to the
yardstick of the same round; the last lines are the medians.
"""

import argparse
import logging
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from zephon_patches import SourceConfig
from zephon_patches.prepare.build import Building, open_or_build
from zephon_patches.prepare.shards import FileInput
from zephon_patches.prepare.tokenizers import TextTokenizer

BATCH_CHARACTERS = 4 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="what real_text.py wrote")
    parser.add_argument("--tokenizer", default="bpe32k", help="folder in it: bpe32k, llama3 or llama3_ranks (bpe32k)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--part", type=int, default=40, help="megabytes of text for what is slow (40)")
    parser.add_argument("--no-others", action="store_true", help="without datasets.map and the process pool")
    parser.add_argument("--build", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        build_here(*args.build)
        return
    cores = len(os.sched_getaffinity(0))
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    logging.disable(logging.WARNING)
    tokenizer_folder = args.folder / args.tokenizer
    json_folder = args.folder / "llama3" if args.tokenizer == "llama3_ranks" else tokenizer_folder
    texts = list(read_texts(args.folder))
    size = sum(len(text.encode()) for text in texts)
    part = first_part(texts, args.part * 1_000_000)
    part_size = sum(len(text.encode()) for text in part)
    print(
        f"{size / 1e6:,.0f} MB of text, {len(texts):,} documents, {cores} cores; slow ones: {part_size / 1e6:,.0f} MB"
    )
    reference = "tiktoken" if args.tokenizer == "llama3_ranks" else "tokenizers"
    ratios: dict[str, list[float]] = {}
    for number in range(1, args.rounds + 1):
        print(f"round {number}")
        yardstick = part_size / encode_batch(json_folder, part)
        show("encode_batch", yardstick, 1.0)
        if not args.no_others:
            for name, others in (("datasets.map", datasets_map), ("process pool", process_pool)):
                speed = part_size / others(json_folder, part, cores)
                ratios.setdefault(name, []).append(speed / yardstick)
                show(name, speed, speed / yardstick)
        for kind, engine in (("jsonl", "auto"), ("parquet", "auto"), ("zst", "auto"), ("jsonl", reference)):
            slow = engine != "auto"
            seconds, whole, memory = build(args.folder, tokenizer_folder, kind, engine, first_file_only=slow)
            speed = (first_file_size(args.folder) if slow else size) / seconds
            name = f"{kind}, {engine}"
            ratios.setdefault(name, []).append(speed / yardstick)
            ratios.setdefault(f"{name}, whole", []).append(speed * seconds / whole / yardstick)
            more = f"{ratios[f'{name}, whole'][-1]:8.2f} whole   peak {memory / 1e6:,.0f} MB"
            show(name, speed, ratios[name][-1], more)
    print("medians of the ratios to encode_batch")
    for name, values in ratios.items():
        print(f"  {name:25} {statistics.median(values):6.2f}   ({min(values):.2f} to {max(values):.2f})")


def show(name: str, speed: float, ratio: float, more: str = "") -> None:
    print(f"  {name:25} {speed / 1e6:8.1f} MB/s {ratio:8.2f}   {more}", flush=True)


def read_texts(folder: Path) -> Iterator[str]:
    for part in sorted((folder / "jsonl").iterdir()):
        yield from texts_of(part)


def texts_of(path: Path) -> list[str]:
    return [orjson.loads(line)["text"] for line in path.read_bytes().split(b"\n") if line]


def first_file_size(folder: Path) -> int:
    return sum(len(text.encode()) for text in texts_of(min((folder / "jsonl").iterdir())))


def first_part(texts: list[str], size: int) -> list[str]:
    part: list[str] = []
    for text in texts:
        part.append(text)
        size -= len(text.encode())
        if size <= 0:
            break
    return part


def encode_batch(folder: Path, texts: list[str]) -> float:
    """Seconds."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    batches: list[list[str]] = [[]]
    characters = 0
    for text in texts:
        batches[-1].append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            batches.append([])
            characters = 0
    started = time.perf_counter()
    for batch in batches:
        tokenizer.encode_batch(batch)
    return time.perf_counter() - started


def datasets_map(folder: Path, texts: list[str], cores: int) -> float:
    import datasets

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"text": texts})
    with tempfile.TemporaryDirectory() as cache:
        data.save_to_disk(f"{cache}/data")
        data = datasets.load_from_disk(f"{cache}/data")
        started = time.perf_counter()
        data.map(
            MapFunction(str(folder / "tokenizer.json")),
            batched=True,
            num_proc=cores,
            remove_columns=["text"],
            cache_file_name=f"{cache}/tokens.arrow",
        )
        return time.perf_counter() - started


class MapFunction:
    """Loads the tokenizer in the process that uses it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tokenizer: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "tokenizer": None}

    def __call__(self, rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        if self.tokenizer is None:
            self.tokenizer = Tokenizer.from_file(self.path)
        return {"input_ids": [encoding.ids for encoding in self.tokenizer.encode_batch(rows["text"])]}


def process_pool(folder: Path, texts: list[str], cores: int) -> float:
    lines = [orjson.dumps({"text": text}) for text in texts]
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(cores, start_pool_worker, (str(folder / "tokenizer.json"),)) as pool:
        for _ in pool.imap(encode_line, lines, 32):
            pass
        return time.perf_counter() - started


worker: dict[str, Tokenizer] = {}


def start_pool_worker(path: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    worker["tokenizer"] = Tokenizer.from_file(path)


def encode_line(line: bytes) -> list[int]:
    ids: list[int] = worker["tokenizer"].encode(orjson.loads(line)["text"]).ids
    return ids


def build(folder: Path, tokenizer: Path, kind: str, engine: str, first_file_only: bool) -> tuple[float, float, int]:
    """Seconds of a build, seconds of its process, and the bytes that its processes held at the most."""
    source = min((folder / kind).iterdir()) if first_file_only else folder / kind
    cache = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, __file__, "--folder", str(folder), "--build", str(source), str(tokenizer), engine]
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    try:
        started = time.perf_counter()
        process = subprocess.Popen([*command, str(cache)], env=environment, stdout=subprocess.PIPE, text=True)
        memory = 0
        while process.poll() is None:
            memory = max(memory, private_memory(process.pid))
            time.sleep(0.05)
        whole = time.perf_counter() - started
        assert process.stdout is not None
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed")
        return float(process.stdout.read()), whole, memory
    finally:
        shutil.rmtree(cache)


def build_here(source: str, tokenizer: str, engine: Any, cache: str) -> None:
    """Prints the seconds of a build, as `zephon-data prepare` does it."""
    loaded = TextTokenizer(tokenizer, engine)
    loaded.fast()
    started = time.perf_counter()
    files = FileInput(SourceConfig("text", source))
    open_or_build(files, loaded, cache, 0, building=Building(workers=None))
    print(time.perf_counter() - started)


def private_memory(process: int) -> int:
    """Bytes that a process and those below it hold alone."""
    total = 0
    try:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Private_Dirty", "Anonymous")):
                total = max(total, int(line.split()[1]) * 1024)
        for task in Path(f"/proc/{process}/task").iterdir():
            total += sum(private_memory(int(child)) for child in (task / "children").read_text().split())
    except (OSError, ValueError):  # gone meanwhile
        pass
    return total


if __name__ == "__main__":
    main()
