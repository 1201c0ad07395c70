"""Training configs over small corpora, for the tools that look at them."""

from pathlib import Path
from typing import Any

from tests.corpora import Sources
from zephon_patches.cli.__main__ import main
from zephon_patches.trace.view import DataView, Part
from zephon_patches.training_config import read_training_config


def write_config(
    path: Path, made: Sources, *, weights=None, stages=(), batch: int = 12, local: int = 2, **data
) -> Path:
    """The TOML of a run over sources, with ``seq_len`` 8; ``data`` are settings of ``[data]``, as written there."""
    lines = ["[data]", f'cache_dir = "{made.folder / "cache"}"', *(f"{key} = {value}" for key, value in data.items())]
    for name in made.lengths if weights is None else weights:
        lines += ["[[data.sources]]", f'name = "{name}"', f'path = "{made.texts(name)}"']
        lines += [] if weights is None else [f"weight = {weights[name]}"]
    for at, of in stages:
        lines += ["[[data.stages]]", f"at = {at}", f"weights = {{ {', '.join(f'{n} = {w}' for n, w in of.items())} }}"]
    lines += ["[model]", f'hf_assets_path = "{made.tokenizer}"']
    lines += ["[training]", "seq_len = 8", f"local_batch_size = {local}", f"global_batch_size = {batch}"]
    path.write_text("\n".join(lines) + "\n")
    return path


def view_of(path: Path) -> DataView:
    return DataView(read_training_config(path))


def prepare(path: Path) -> None:
    assert main(["prepare", "--config", str(path), "--workers", "1"]) == 0


def tokens_of(made: Sources, source: str, part: Part) -> list[int]:
    """The tokens of a part of a sample, looked up by file and record in the documents as they were written."""
    assert part.file == "0.jsonl"
    document = made.documents(source)[part.record]
    assert part.tokens == len(document)
    return document[part.start : part.stop]


def files_under(folder: Path) -> dict[str, Any]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) if p.is_file() else None for p in sorted(folder.rglob("*"))}
