"""Stores for benchmarks of what must not depend on the size of the data: their files are holes."""

from collections.abc import Sequence
from pathlib import Path

from zephon_patches.store.manifest import MANIFEST, Manifest, ShardRecord

__all__ = ["table", "write_sparse_store"]


def write_sparse_store(folder: Path, shards: int, shard_tokens: int, files: bool = True) -> None:
    """A store that opens as any other, and whose tokens are all 0: its files are holes.

    Args:
        folder: Made where it is not there.
        shards: How many.
        shard_tokens: Of each shard.
        files: Whether the shards have files; else the manifest alone is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        ShardRecord(f"{n:06d}-000", 1, shard_tokens, f"{n:016x}", f"{2**63 + n:016x}", "c" * 16) for n in range(shards)
    ]
    (folder / MANIFEST).write_bytes(Manifest({}, "<u2", [], records).to_json())
    if files:
        for record in records:
            with open(folder / f"{record.name}.bin", "wb") as file:
                file.truncate(2 * shard_tokens)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; the first column is of words."""
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
