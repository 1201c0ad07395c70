"""How long ``zephon-data show`` takes for a far step of a source of 10^5 shards and 10^12 samples, from start to exit.

    PYTHONPATH=. python benchmarks/show_far.py

The store is real but for its size: a whole manifest, and one shard's index, origins and (sparse) tokens, to which those
of the others are linked, so all name the first file. Its texts are gone, as on a laptop. Runs the command in a process
of its own, in turn with one that only starts Python and imports numpy. Prints the time of each and what the processor
worked for it, the medians, and the ratio; absolute times depend on the machine, and on what else it does.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.corpora import write_tokenizer
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.store.indexed import encode_index
from zephon_patches.store.manifest import FORMAT, MANIFEST, FileRecord, InputRange, Manifest, ShardRecord

SEQ_LEN, DOCUMENTS = 8, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description="zephon-data show for a far step of a huge source")
    parser.add_argument("--shards", type=int, default=100_000, help="shards (100,000)")
    parser.add_argument("--samples", type=int, default=10**12, help="samples of all shards (10^12)")
    parser.add_argument(
        "--step", type=int, default=7 * 10**10, help="the step that is shown, of 12 samples (7 * 10^10)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements (5)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        config = write_source(Path(name), args.shards, args.samples // args.shards)
        show = [sys.executable, "-m", "zephon_patches.cli", "show", "--config", str(config), "--step", str(args.step)]
        print(subprocess.run(show, check=True, capture_output=True, text=True).stdout)
        shown, started = [], []
        for _ in range(args.rounds):
            shown.append(timed(show))
            started.append(timed([sys.executable, "-c", "import numpy"]))
            print(
                "show {:.3f} s ({:.3f} s of work), Python and numpy {:.3f} s ({:.3f})".format(*shown[-1], *started[-1])
            )
        wall, work, least, least_work = (
            statistics.median(entry[i] for entry in times) for times in (shown, started) for i in (0, 1)
        )
        print(
            f"medians: show {wall:.3f} s ({work:.3f} s of work), {wall / least:.1f} times Python and numpy "
            f"({work / least_work:.1f} times its work)"
        )


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds from start to exit, and of the processor."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_source(folder: Path, shards: int, samples: int) -> Path:
    """A source of equal shards, and a config that names it; returns the config's path."""
    tokens = samples * SEQ_LEN + 1
    tokenizer = TextTokenizer(write_tokenizer(folder / "tokenizer", [9] * 100))
    recipe = {"format": FORMAT, "shard_bytes": 0, "tokenizer": tokenizer.identity, "text_field": "text"}
    per_file = 100
    files = [FileRecord(f"part-{i:05d}.jsonl", 10**12, 1_700_000_000 * 10**9) for i in range(-(-shards // per_file))]
    records = [
        ShardRecord(
            f"{i:06d}-000",
            DOCUMENTS,
            tokens,
            f"{i:016x}",
            "b" * 16,
            "c" * 16,
            [InputRange(i // per_file, i % per_file * 10**10, (i % per_file + 1) * 10**10, DOCUMENTS, "d" * 32)],
        )
        for i in range(shards)
    ]
    manifest = Manifest(recipe, "<u2", files, records)
    store = folder / "cache" / "web" / manifest.key
    store.mkdir(parents=True)
    (store / MANIFEST).write_bytes(manifest.to_json())
    lengths = np.full(DOCUMENTS, tokens // DOCUMENTS, dtype=np.int32)
    lengths[-1] += tokens % DOCUMENTS
    (store / "000000-000.idx").write_bytes(encode_index(lengths, np.dtype("<u2")))
    with open(store / "000000-000.bin", "wb") as file:
        file.truncate(2 * tokens)
    origin = np.stack([np.zeros(DOCUMENTS, np.int64), np.arange(DOCUMENTS)], axis=1)  # of file 0, for all of them
    (store / "000000-000.origin").write_bytes(origin.tobytes())
    for number in range(1, shards):
        for kind in ("idx", "bin", "origin"):
            (store / f"{number:06d}-000.{kind}").symlink_to(f"000000-000.{kind}")
    config = folder / "run.toml"
    config.write_text(
        f'[data]\ncache_dir = "{folder / "cache"}"\n[[data.sources]]\nname = "web"\npath = "{folder / "texts"}"\n'
        f'[model]\nhf_assets_path = "{folder / "tokenizer"}"\n[training]\nseq_len = {SEQ_LEN}\nglobal_batch_size = 12\n'
    )
    return config


if __name__ == "__main__":
    main()
