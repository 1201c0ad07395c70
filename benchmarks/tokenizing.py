"""How fast texts become a token store, against what others do with the same tokenizer, in one run.

    PYTHONPATH=. python benchmarks/real_text.py --folder /tmp/real_text
    PYTHONPATH=. python benchmarks/tokenizing.py --folder /tmp/real_text --tokenizer bpe32k

Each round measures, one after the other, in text a second:

    encode_batch       `tokenizers` alone, of texts that are in memory; nothing is read or written: the yardstick
    encode_batch_fast  the same without places in the text, which our builds use as the reference
    datasets.map       `map(batched=True, num_proc=CORES)` over a data set that is loaded already
    process pool       a call of `tokenizers` for each document in a pool of CORES processes, as Megatron prepares data
    jsonl, ...         a store of each format with each engine: reading, tokenizing, comparing, writing
    ..., whole         the same, with the start of Python and the loading of the tokenizer

and prints the speed, its ratio to the yardstick of the round, and the same ratio for text in a second of CPU time,
which depends less on what else the machine does. Of our builds there is also the peak of the memory that all their
processes hold alone. The slow ones read the first --part megabytes, and our build with a slow engine the first file. At
the end are the medians of the ratios.
"""

import argparse
import logging
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from zephon_patches import SourceConfig
from zephon_patches.prepare.build import Building, open_or_build
from zephon_patches.prepare.encoding import Encoder
from zephon_patches.prepare.shards import FileInput, Piece, shard_bytes_for
from zephon_patches.prepare.tokenizers import TextTokenizer

BATCH_CHARACTERS = 4 << 20

Cost = tuple[float, float]  # seconds that pass, and of CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="what real_text.py wrote")
    parser.add_argument("--tokenizer", default="bpe32k", help="folder in it: bpe32k, llama3 or llama3_ranks (bpe32k)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--part", type=int, default=40, help="megabytes of text for what is slow (40)")
    parser.add_argument(
        "--profile", action="store_true", help="show where the CPU time of a build goes, and nothing else"
    )
    parser.add_argument("--build", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        build_here(*args.build)
        return
    if args.profile:
        for kind in ("jsonl", "parquet", "zst"):
            profile(args.folder, args.folder / args.tokenizer, kind)
        return
    cores = len(os.sched_getaffinity(0))
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    logging.disable(logging.WARNING)
    tokenizer = args.folder / args.tokenizer
    # The tokenizer.json of the same ranks, for those that take no ranks.
    json_folder = args.folder / "llama3" if args.tokenizer == "llama3_ranks" else tokenizer
    reference = "tiktoken" if args.tokenizer == "llama3_ranks" else "tokenizers"
    files = sorted((args.folder / "jsonl").iterdir())
    sizes = [bytes_of(texts_of(file)) for file in files]
    part = first_part(texts_of(files[0]), args.part * 1_000_000)
    print(f"{sum(sizes) / 1e6:,.0f} MB of text, {cores} cores; slow ones: {bytes_of(part) / 1e6:,.0f} MB")
    ratios: dict[str, list[Cost]] = {}
    for number in range(1, args.rounds + 1):
        print(f"round {number:24}       MB/s    ratio   ratio of CPU time")
        yardstick: Cost | None = None

        def show(name: str, size: int, cost: Cost, more: str = "") -> None:
            nonlocal yardstick
            speed = (size / cost[0], size / cost[1])
            yardstick = yardstick or speed
            ratio = (speed[0] / yardstick[0], speed[1] / yardstick[1])
            ratios.setdefault(name, []).append(ratio)
            print(f"  {name:28} {speed[0] / 1e6:10.1f} {ratio[0]:8.2f} {ratio[1]:8.2f}   {more}", flush=True)

        show("encode_batch", bytes_of(part), encode_batch(json_folder, part, "encode_batch"))
        show("encode_batch_fast", bytes_of(part), encode_batch(json_folder, part, "encode_batch_fast"))
        show("datasets.map", bytes_of(part), datasets_map(json_folder, part, cores))
        show("process pool", bytes_of(part), process_pool(json_folder, part, cores))
        for kind, engine in (("jsonl", "auto"), ("parquet", "auto"), ("zst", "auto"), ("jsonl", reference)):
            source, size = args.folder / kind, sum(sizes)
            if engine == reference:
                source, size = files[0], sizes[0]
            cost, whole, memory = build(args.folder, tokenizer, source, engine)
            show(f"{kind}, {engine}", size, cost, f"peak {memory / 1e6:,.0f} MB")
            show(f"{kind}, {engine}, whole", size, whole)
    print("medians of the ratios            ratio   ratio of CPU time")
    for name, values in ratios.items():
        median, median_cpu = (statistics.median(value[i] for value in values) for i in range(2))
        print(f"  {name:28} {median:8.2f} {median_cpu:8.2f}")


def texts_of(path: Path) -> list[str]:
    return [orjson.loads(line)["text"] for line in path.read_bytes().split(b"\n") if line]


def bytes_of(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def first_part(texts: list[str], size: int) -> list[str]:
    part: list[str] = []
    for text in texts:
        part.append(text)
        size -= len(text.encode())
        if size <= 0:
            break
    return part


def cost_of(work: Callable[[], object]) -> Cost:
    """What a call costs, with its threads, and with processes that are gone when it returns."""
    started, cpu = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - started, cpu_seconds() - cpu


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def encode_batch(folder: Path, texts: list[str], method: str) -> Cost:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    batches: list[list[str]] = [[]]
    characters = 0
    for text in texts:
        batches[-1].append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            batches.append([])
            characters = 0
    encode = getattr(tokenizer, method)
    return cost_of(lambda: [encode(batch) and None for batch in batches])


def datasets_map(folder: Path, texts: list[str], cores: int) -> Cost:
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(f"{cache}/data")
        data = datasets.load_from_disk(f"{cache}/data")
        function = MapFunction(str(folder / "tokenizer.json"))
        target = f"{cache}/tokens.arrow"
        return cost_of(
            lambda: data.map(function, batched=True, num_proc=cores, remove_columns=["text"], cache_file_name=target)
        )


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


def process_pool(folder: Path, texts: list[str], cores: int) -> Cost:
    lines = [orjson.dumps({"text": text}) for text in texts]
    arguments = (str(folder / "tokenizer.json"),)

    def work() -> None:
        pool = multiprocessing.get_context("spawn").Pool(cores, start_pool_worker, arguments)
        for _ in pool.imap(encode_line, lines, 32):
            pass
        pool.close()
        pool.join()

    return cost_of(work)


worker: dict[str, Tokenizer] = {}


def start_pool_worker(path: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    worker["tokenizer"] = Tokenizer.from_file(path)


def encode_line(line: bytes) -> list[int]:
    ids: list[int] = worker["tokenizer"].encode(orjson.loads(line)["text"]).ids
    return ids


def build(folder: Path, tokenizer: Path, source: Path, engine: str) -> tuple[Cost, Cost, int]:
    """What a build costs, what its process costs, and the bytes that its processes held at the most."""
    cache = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, __file__, "--folder", str(folder), "--build", str(source), str(tokenizer), engine]
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    memory, found = 0, ""

    def run() -> None:
        nonlocal memory, found
        process = subprocess.Popen([*command, str(cache)], env=environment, stdout=subprocess.PIPE, text=True)
        while process.poll() is None:
            memory = max(memory, private_memory(process.pid))
            time.sleep(0.05)
        assert process.stdout is not None
        found = process.stdout.read()
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed")

    try:
        whole = cost_of(run)
        seconds, cpu = map(float, found.split())
        return (seconds, cpu), whole, memory
    finally:
        shutil.rmtree(cache)


def build_here(source: str, tokenizer: str, engine: Any, cache: str) -> None:
    """Prints what a build costs, as `zephon-data prepare` does it, once the tokenizer is loaded."""
    loaded = TextTokenizer(tokenizer, engine)
    loaded.fast()
    building = Building(workers=None)
    files = FileInput(SourceConfig("text", source))
    print(*cost_of(lambda: open_or_build(files, loaded, cache, 0, building=building)))


def profile(folder: Path, tokenizer: Path, kind: str) -> None:
    """Prints the shares of CPU time: of each step, what a build takes longer with it than without it."""
    loaded = TextTokenizer(tokenizer)
    loaded.fast()
    files = FileInput(SourceConfig("text", str(folder / kind)))

    def pieces() -> Iterator[Piece]:
        shard_bytes = shard_bytes_for(0, sum(file.bytes for file in files.files))
        for unit in files.units(shard_bytes):
            yield from files.pieces(unit, shard_bytes, 0)

    def encode(store: Path | None) -> None:
        encoder = Encoder(loaded, store, "text")
        for piece in pieces():
            for _ in encoder.batches(piece):
                pass

    with tempfile.TemporaryDirectory(dir=folder) as name:
        cache = Path(name)
        encode(None)  # fills the engine's own caches
        steps = {
            "reading, parsing, hashing": lambda: [document and None for piece in pieces() for document in piece],
            "encoding": lambda: encode(None),
            "comparing": lambda: encode(cache),
            "writing, hashing, syncing": lambda: open_or_build(files, loaded, cache, 0),
        }
        seconds = [
            min(cost_of(step)[1] for _ in range(1 if step is steps["writing, hashing, syncing"] else 3))
            for step in steps.values()
        ]
    print(f"{kind}: {len(steps)} steps, shares of the CPU time")
    for step, before, after in zip(steps, [0.0, *seconds], seconds, strict=False):
        print(f"  {step:28} {100 * (after - before) / seconds[-1]:5.1f} %")


def private_memory(process: int) -> int:
    """Bytes that a process and those below it hold alone; pages of files, which the system may drop, do not count."""
    total = 0
    try:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_Dirty"):
                total += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{process}/task").iterdir():
            total += sum(private_memory(int(child)) for child in (task / "children").read_text().split())
    except (OSError, ValueError):  # gone meanwhile
        pass
    return total


if __name__ == "__main__":
    main()
