#!/usr/bin/env python3
"""Makes the demo data: a corpus and a tokenizer, from the Python standard library of whoever runs this.

    python scripts/make_demo_data.py

writes, in a few seconds and once,

    demo_data/corpus/part-0000.jsonl ...    one source file per line: {"text": ..., "path": ...}
    demo_data/tokenizer/tokenizer.json      byte-level BPE, 2,048 entries with <|bos|> and <|eos|>
    demo_data/tokenizer/tokenizer_config.json

The same Python and ``tokenizers`` give the same bytes. Everything is written to a temporary folder beside
``demo_data`` that is renamed at the end, so an interrupted run leaves nothing that looks finished.
"""

import argparse
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

# The vocabulary of TorchTitan's llama3 "debugmodel".
VOCABULARY_SIZE = 2048
BOS, EOS = "<|bos|>", "<|eos|>"

# Not in every install of Python, or not its own.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

DOCUMENTS_PER_FILE = 200
# Of text: training the tokenizer takes about a second for it, and all of the corpus changes little.
TOKENIZER_BYTES = 4_000_000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "demo_data", help="where the demo data goes")
    parser.add_argument("--force", action="store_true", help="make it anew if it is already there")
    options = parser.parse_args(argv)
    try:
        make_demo_data(options.folder, options.force)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def make_demo_data(folder: Path, force: bool = False, library: Path | None = None) -> bool:
    """Makes the demo data in ``folder``.

    Args:
        folder: Made whole or not at all.
        force: Replace what is there.
        library: Folder of Python sources; the standard library by default.

    Returns:
        Whether it was made; ``False`` if it was already there.

    Raises:
        OSError: ``folder`` cannot be written, or something else stands there.
        ValueError: There are no sources.
    """
    if is_complete(folder) and not force:
        return False
    if folder.exists() and not force:
        raise FileExistsError(f"{folder} exists, but is not complete demo data: move it away, or give --force")
    library = library or Path(sysconfig.get_path("stdlib"))
    started = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        num_documents, num_skipped, num_bytes = write_corpus(work / "corpus", library)
        num_tokens = write_tokenizer(work / "tokenizer", sorted((work / "corpus").iterdir()))
        work.chmod(0o755)
        if force and folder.exists():
            shutil.rmtree(folder)
        try:
            os.rename(work, folder)
        except OSError:
            # Another process was faster: its data are the same.
            if not is_complete(folder):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    skipped = f" ({num_skipped:,} skipped: not UTF-8)" if num_skipped else ""
    print(
        f"demo data: {num_documents:,} documents{skipped}, {num_bytes:,} bytes of text, "
        f"tokenizer of {num_tokens:,} entries, in {folder} after {time.monotonic() - started:.1f} s"
    )
    return True


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` has all that a run needs."""
    tokenizer = folder / "tokenizer"
    return (
        any((folder / "corpus").glob("*.jsonl"))
        and (tokenizer / "tokenizer.json").is_file()
        and (tokenizer / "tokenizer_config.json").is_file()
    )


def sources(library: Path) -> Iterator[Path]:
    """The library's Python files, in an order that depends on their names alone."""
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).as_posix()):
        if not SKIPPED_FOLDERS.intersection(path.relative_to(library).parts[:-1]):
            yield path


def write_corpus(folder: Path, library: Path) -> tuple[int, int, int]:
    """Writes the documents.

    Returns:
        Numbers of documents, of files that are skipped since they are not UTF-8, and of bytes of text.
    """
    folder.mkdir(parents=True)
    lines: list[str] = []
    num_documents = num_skipped = num_bytes = num_files = 0

    def flush() -> None:
        nonlocal num_files
        text = "".join(lines)
        (folder / f"part-{num_files:04d}.jsonl").write_text(text, encoding="utf-8", newline="\n")
        num_files += 1
        lines.clear()

    for path in sources(library):
        try:
            text = path.read_bytes().decode("utf-8")
        except (UnicodeDecodeError, OSError):
            num_skipped += 1
            continue
        record = {"text": text, "path": path.relative_to(library).as_posix()}
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        num_documents += 1
        num_bytes += len(text.encode("utf-8"))
        if len(lines) == DOCUMENTS_PER_FILE:
            flush()
    if lines:
        flush()
    if not num_documents:
        raise ValueError(f"no Python sources in {library}, which should be the standard library")
    return num_documents, num_skipped, num_bytes


def write_tokenizer(folder: Path, files: list[Path]) -> int:
    """Trains a byte-level BPE on documents from all parts of the corpus; the number of its entries."""
    # After the checks above, which need no package.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_excerpts(files, TOKENIZER_BYTES // len(files)), trainer)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return int(tokenizer.get_vocab_size())


def _excerpts(files: list[Path], bytes_per_file: int) -> Iterator[str]:
    for path in files:
        num_bytes = 0
        with path.open(encoding="utf-8") as file:
            for line in file:
                text = json.loads(line)["text"]
                yield text
                num_bytes += len(text.encode("utf-8"))
                if num_bytes >= bytes_per_file:
                    break


if __name__ == "__main__":
    sys.exit(main())
