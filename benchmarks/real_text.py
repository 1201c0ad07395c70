"""Collects real text from this machine, and tokenizers for it; the other benchmarks read what it writes.

    PYTHONPATH=. python benchmarks/real_text.py --folder /tmp/real_text

Text is what lies around on a machine with Python packages and documentation: sources in several languages, pages,
notes; no network. Each file is one document; copies are left out. In the folder there are then

    jsonl/, parquet/, zst/   the same documents in each format: {"text": ..., "path": ...}
    bpe32k/, bpe2k/          byte-level BPEs of 32,000 and 2,048 entries with Llama 3's pattern, trained on a part
    llama3/, llama3_ranks/   Llama 3's 128k entries as tokenizer.json, and as ranks, if llama-models is installed
                             (--llama-models FOLDER names another site-packages folder that has it)

What is there already is left alone.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import random
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from zephon_patches.prepare.ranks import Ranks

SUFFIXES = {
    *(
        ".py",
        ".pyi",
        ".c",
        ".h",
        ".hpp",
        ".cpp",
        ".cu",
        ".cuh",
        ".js",
        ".ts",
        ".go",
        ".pl",
        ".pm",
        ".rs",
        ".sh",
        ".cmake",
    ),
    *(".md", ".rst", ".txt", ".html", ".toml", ".css", ".xml"),
}
FILE_BYTES = 1000, 1 << 20  # smaller ones are mostly stubs, larger ones tables
PART_BYTES = 32 << 20
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where everything is written")
    parser.add_argument("--megabytes", type=int, default=160, help="text to collect (160)")
    parser.add_argument("--llama-models", type=Path, help="folder of the packages that has llama_models")
    args = parser.parse_args()
    if not (args.folder / "parquet").is_dir():
        write_text(args.folder, args.megabytes * 1_000_000)
    for name, entries, share in (("bpe32k", 32_000, 10), ("bpe2k", 2048, 100)):
        if not (args.folder / name).is_dir():
            train_bpe(args.folder, name, entries, share)
    if not (args.folder / "llama3_ranks").is_dir():
        write_llama3(args.folder, args.llama_models)
    parts = list((args.folder / "jsonl").iterdir())
    size = sum(part.stat().st_size for part in parts)
    print(f"{args.folder}: {size / 1e6:,.0f} MB of JSON lines in {len(parts)} files")


def write_text(folder: Path, wanted: int) -> None:
    work = folder / ".work"
    shutil.rmtree(work, ignore_errors=True)
    for name in ("jsonl", "parquet", "zst"):
        (work / name).mkdir(parents=True)
    part: list[tuple[str, str]] = []
    number = size = total = documents = 0
    for path, text in real_texts():
        part.append((text, path))
        size += len(text.encode())
        documents += 1
        if size >= PART_BYTES or total + size >= wanted:
            write_part(work, number, part)
            total, number, size, part = total + size, number + 1, 0, []
            if total >= wanted:
                break
    print(f"collected {documents:,} documents, {total / 1e6:,.0f} MB of text")
    for name in ("jsonl", "zst", "parquet"):
        (work / name).rename(folder / name)


def real_texts() -> Iterator[tuple[str, str]]:
    """(path, text) of each file, in an order that mixes the kinds."""
    roots = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/share", "/usr/lib", "/usr/include"}
    found = []
    for root in sorted(roots):
        for folder, folders, names in os.walk(root):
            folders.sort()
            found += [Path(folder, name) for name in sorted(names) if Path(name).suffix in SUFFIXES]
    random.Random(0).shuffle(found)
    seen = set()
    for path in found:
        try:
            if path.is_symlink() or not FILE_BYTES[0] <= path.stat().st_size <= FILE_BYTES[1]:
                continue
            data = path.read_bytes()
            text = data.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(data).digest()
        if digest not in seen:
            seen.add(digest)
            yield str(path), text


def write_part(folder: Path, number: int, part: list[tuple[str, str]]) -> None:
    lines = b"".join(orjson.dumps({"text": text, "path": path}) + b"\n" for text, path in part)
    (folder / "jsonl" / f"{number:03d}.jsonl").write_bytes(lines)
    (folder / "zst" / f"{number:03d}.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    texts, paths = zip(*part, strict=True)
    table = pa.table({"text": texts, "path": paths})
    pq.write_table(table, folder / "parquet" / f"{number:03d}.parquet", row_group_size=1000)


def train_bpe(folder: Path, name: str, entries: int, share: int) -> None:
    tokenizer = new_bpe(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = (line for part in sorted((folder / "jsonl").iterdir()) for line in part.read_bytes().splitlines()[::share])
    tokenizer.train_from_iterator((orjson.loads(line)["text"] for line in lines), trainer)
    save(tokenizer, folder / name, "<|bos|>", "<|eos|>")


def write_llama3(folder: Path, packages: Path | None) -> None:
    ranks_file = llama3_ranks(packages)
    if ranks_file is None:
        print("llama-models is not installed: without Llama 3's tokenizer")
        return
    num_ranks = len(ranks_file.read_bytes().splitlines())
    special = LLAMA3_SPECIAL + [f"<|reserved_special_token_{i}|>" for i in range(2, 256 - len(LLAMA3_SPECIAL) + 2)]
    target = folder / "llama3_ranks"
    target.mkdir()
    shutil.copy(ranks_file, target / "tokenizer.model")
    config = {
        "pattern": PATTERN,
        "special_tokens": {token: num_ranks + i for i, token in enumerate(special)},
        "bos_token": special[0],
        "eos_token": special[1],
    }
    (target / "tiktoken.json").write_text(json.dumps(config, indent=1))
    save(Ranks.read(target).to_tokenizer(), folder / "llama3", special[0], special[1])


def llama3_ranks(packages: Path | None) -> Path | None:
    if packages is None:
        spec = importlib.util.find_spec("llama_models")
        if spec is None or not spec.submodule_search_locations:
            return None
        packages = Path(next(iter(spec.submodule_search_locations))).parent
    path = packages / "llama_models" / "llama3" / "tokenizer.model"
    return path if path.is_file() else None


def new_bpe(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, bos: str, eos: str) -> None:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": eos}))


if __name__ == "__main__":
    main()
