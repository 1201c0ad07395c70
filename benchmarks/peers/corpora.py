"""The documents that all loaders read: real text with its tokens, a part of it, and the corpus of identities."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.peers.adapters import Documents

ROOT = Path(__file__).resolve().parents[2]
_ENCODE_AT_ONCE = 1000
_LONGEST_IDENTITY = 600  # tokens of a document; longer than the rows of 128 there


def real(folder: Path, megabytes: int) -> Documents:
    """Text of this machine, by ``benchmarks/real_text.py``, and its tokens by a BPE of 32,000 entries."""
    if not (folder / "lengths.npy").is_file():
        command = [sys.executable, str(ROOT / "benchmarks" / "real_text.py"), "--folder", str(folder)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*command, "--megabytes", str(megabytes)], env=environment, check=True, stdout=sys.stderr)
        if not (folder / "tokenizer").is_dir():
            shutil.copytree(folder / "bpe32k", folder / "tokenizer")
        _write_tokens(folder, _encode(folder))
    return Documents(folder)


def part_of(documents: Documents, folder: Path, megabytes: int, files: int = 4) -> Documents:
    """The first of real text, in so many files, with its tokens."""
    if not (folder / "lengths.npy").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "jsonl").mkdir(parents=True)
        lines = list(_until(documents.texts, megabytes * 1_000_000))
        for number in range(files):
            part = lines[number * len(lines) // files : (number + 1) * len(lines) // files]
            (folder / "jsonl" / f"{number:03d}.jsonl").write_bytes(b"".join(part))
        shutil.copytree(documents.tokenizer, folder / "tokenizer")
        lengths = documents.lengths[: len(lines)]
        np.save(folder / "tokens.npy", documents.tokens[: lengths.sum()])
        np.save(folder / "lengths.npy", lengths)
    return Documents(folder)


def _until(texts: Iterable[Path], size: int) -> Iterator[bytes]:
    for path in texts:
        with path.open("rb") as lines:
            for line in lines:
                yield line
                size -= len(line)
                if size <= 0:
                    return


def identities(folder: Path, tokens: int, files: int = 4) -> Documents:
    """Documents whose tokens are all different: 1, 2, 3 and so on, also as text with a tokenizer of whole numbers."""
    if not (folder / "lengths.npy").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "jsonl").mkdir(parents=True)
        cuts = np.random.default_rng(0).integers(1, _LONGEST_IDENTITY, tokens).cumsum()
        cuts = [0, *cuts[cuts < tokens].tolist(), tokens]
        documents = [np.arange(a + 1, b + 1, dtype=np.int32) for a, b in itertools.pairwise(cuts)]
        for number in range(files):
            part = documents[number * len(documents) // files : (number + 1) * len(documents) // files]
            lines = (json.dumps({"text": " ".join(map(str, ids.tolist()))}) + "\n" for ids in part)
            (folder / "jsonl" / f"{number:03d}.jsonl").write_text("".join(lines))
        tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(tokens + 1)}, unk_token="0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        (folder / "tokenizer").mkdir()
        tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
        (folder / "tokenizer" / "tokenizer_config.json").write_text("{}")
        _write_tokens(folder, documents)
    return Documents(folder)


def _encode(folder: Path) -> Iterable[np.ndarray]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    bos, eos = (tokenizer.token_to_id(token) for token in ("<|bos|>", "<|eos|>"))
    for path in sorted((folder / "jsonl").glob("*.jsonl")):
        lines = path.read_bytes().splitlines()
        for start in range(0, len(lines), _ENCODE_AT_ONCE):
            texts = [json.loads(line)["text"] for line in lines[start : start + _ENCODE_AT_ONCE]]
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                yield np.array([bos, *encoding.ids, eos], np.uint16)


def _write_tokens(folder: Path, documents: Iterable[np.ndarray]) -> None:
    documents = list(documents)
    np.save(folder / "tokens.npy", np.concatenate(documents))
    np.save(folder / "lengths.npy", np.array([len(ids) for ids in documents], np.int64))  # last: it says all is there
