"""Plans of packings on the disk: one file for each shard, packing and ``seq_len``, beside the shard.

``NAME.best_fit-2048``, all little-endian; sizes in bytes::

    8     magic, ZPHNPLAN
    8     u64: version, 1
    16    name of the packing, ASCII, filled up with NULs
    16    checksum of NAME.idx, as the manifest has it: the plan is one of these documents. Of a shard with a NAME.mask
          the fingerprint of both checksums: pieces without a label that counts are in no sample
    8     u64: seq_len
    8     u64: samples, s
    8     u64: pieces, p
    8     u64: documents that are left out, since they have no label
    8     u64: XXH3-64 of all other bytes of the file
    8 s + 8   int64: first piece of each sample, and p
    16 p      int64: first token in the shard, and tokens, of each piece

The file is mapped, so what processes of one machine use is in memory once. Opening reads it once: nothing that it
says is believed before the size of the file bears it out, then its checksum and that every sample lies in the shard and
in ``seq_len`` places are checked, so that rows can be filled without looking. That is some ms for 10**6 documents.

A plan is made from the lengths in the index alone, so it may be removed at any time: it is made again, with the same
bytes. It is written whole or not at all, and a good one is left alone.
"""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from zephon_patches.errors import StoreError
from zephon_patches.keys import fingerprint
from zephon_patches.samples.best_fit import plan_best_fit
from zephon_patches.samples.pieces import Plan, plan_documents
from zephon_patches.store.atomic import atomic_file
from zephon_patches.store.indexed import HEADER as INDEX_HEADER
from zephon_patches.store.indexed import index_bytes
from zephon_patches.store.manifest import ShardRecord
from zephon_patches.store.reader import compare_index, map_file, open_mask

__all__ = ["PLANNERS", "ensure_plan", "key_of", "lengths_of", "open_plan", "plan_checksum", "plan_path", "write_plan"]

PLANNERS: dict[str, Callable[[np.ndarray, int, np.ndarray | None], Plan]] = {
    "best_fit": plan_best_fit,
    "document": plan_documents,
}

_MAGIC = b"ZPHNPLAN"
_VERSION = 1
_HEADER = struct.Struct("<8sQ16s16sQQQQQ")
_CHECKSUM = struct.Struct("<Q")  # the last field


def plan_path(folder: Path, shard: ShardRecord, packing: str, seq_len: int) -> Path:
    """Where the plan of a shard is."""
    return folder / f"{shard.name}.{packing}-{seq_len}"


def ensure_plan(folder: Path, shard: ShardRecord, packing: str, seq_len: int) -> Plan:
    """Opens the plan of a shard; makes it if there is none that is good. Several may do so at once.

    Args:
        folder: Of the store.
        packing: One of ``PLANNERS``.

    Raises:
        StoreError: The index is missing, has another size, or lengths that are not the shard's.
        OSError: The plan cannot be written.
    """
    try:
        return open_plan(folder, shard, packing, seq_len)
    except StoreError:
        pass
    compare_index(folder, shard)  # a plan of another shard's documents would stand for this one's from now on
    lengths = lengths_of(folder, shard)
    try:
        plan = PLANNERS[packing](lengths, seq_len, open_mask(folder, shard, "checksum") if shard.mask else None)
    except ValueError as error:
        raise StoreError(f"{folder / shard.name}.idx: {error}; zephon-data verify finds what is damaged") from None
    write_plan(plan_path(folder, shard, packing, seq_len), plan, packing, seq_len, key_of(shard))
    return open_plan(folder, shard, packing, seq_len)


def key_of(shard: ShardRecord) -> str:
    """What a plan was made from: the checksum of the index; with a mask, a hash of both checksums."""
    return fingerprint([shard.idx, shard.mask]) if shard.mask else shard.idx


def write_plan(path: Path, plan: Plan, packing: str, seq_len: int, idx: str) -> None:
    """Writes a plan whole.

    Args:
        idx: What it was made from, by ``key_of``.
    """
    fields = (_VERSION, packing.encode("ascii"), idx.encode("ascii"), seq_len, plan.num_samples, len(plan.pieces))
    header = _HEADER.pack(_MAGIC, *fields, plan.left_out, 0)[: -_CHECKSUM.size]
    with atomic_file(path) as file:
        for part in (header, _CHECKSUM.pack(_checksum(header, plan)), _bytes(plan.starts), _bytes(plan.pieces)):
            file.write(part)


def open_plan(folder: Path, shard: ShardRecord, packing: str, seq_len: int) -> Plan:
    """Maps the plan of a shard; its arrays are read-only views of the file.

    Raises:
        StoreError: There is none, or it is damaged, or another's: of other documents, another packing or ``seq_len``.
    """
    path = plan_path(folder, shard, packing, seq_len)
    try:
        size = path.stat().st_size
        if size < _HEADER.size:
            raise StoreError(f"{path}: {size:,} bytes are no plan of a packing")
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened ({error.strerror})") from None
    data = map_file(path, 0, size)
    magic, version, name, idx, length, samples, pieces, left_out, checksum = _HEADER.unpack(data[: _HEADER.size])
    if (magic, version) != (_MAGIC, _VERSION):
        raise StoreError(f"{path}: starts with {magic!r}, version {version}; expected {_MAGIC!r}, version {_VERSION}")
    found = (name.rstrip(b"\0"), length, idx)
    expected = (packing.encode("ascii"), seq_len, key_of(shard).encode("ascii"))
    if found != expected:
        raise StoreError(f"{path}: is a plan of (packing, seq_len, index) {found}, expected {expected}")
    needed = _HEADER.size + 8 * (samples + 1) + 16 * pieces
    if size != needed:
        raise StoreError(f"{path}: {size:,} bytes, but its {samples:,} samples of {pieces:,} pieces take {needed:,}")
    body = np.frombuffer(data, "<i8", offset=_HEADER.size)
    plan = Plan(body[: samples + 1], body[samples + 1 :].reshape(pieces, 2), left_out)
    present = _checksum(data[: _HEADER.size - _CHECKSUM.size], plan)
    if present != checksum:
        raise StoreError(f"{path}: its checksum is {present:016x}, but {checksum:016x} stands in it")
    if not _is_sound(plan, shard.tokens, seq_len):
        raise StoreError(f"{path}: its samples do not lie in the shard, or not in {seq_len:,} places each")
    return plan


def plan_checksum(path: Path) -> str:
    """The checksum that stands in a plan, in hexadecimal; for a plan that was opened."""
    with open(path, "rb") as file:
        (checksum,) = _CHECKSUM.unpack(file.read(_HEADER.size)[-_CHECKSUM.size :])
    return f"{checksum:016x}"


def _is_sound(plan: Plan, num_tokens: int, seq_len: int) -> bool:
    starts, pieces = plan.starts, plan.pieces
    if starts[0] != 0 or starts[-1] != len(pieces) or not (np.diff(starts) > 0).all():
        return False
    if not len(pieces):
        return True
    first, tokens = pieces.T
    if first.min() < 0 or tokens.min() < 2 or tokens.max() > seq_len + 1 or (first > num_tokens - tokens).any():
        return False
    return bool(np.add.reduceat(tokens - 1, starts[:-1]).max() <= seq_len)


def _checksum(header: bytes | memoryview, plan: Plan) -> int:
    digest = xxhash.xxh3_64(header)
    digest.update(_bytes(plan.starts))
    digest.update(_bytes(plan.pieces))
    return int(digest.intdigest())


def _bytes(array: np.ndarray) -> memoryview:
    """An array as the file has it; a view if it is little-endian."""
    return np.ascontiguousarray(array, "<i8").reshape(-1).view(np.uint8).data


def lengths_of(folder: Path, shard: ShardRecord) -> np.ndarray:
    """The tokens of each document, int32, from a shard's index.

    Raises:
        StoreError: It is missing, has another size, or lengths that are not the shard's.
    """
    path = folder / f"{shard.name}.idx"
    try:
        size = path.stat().st_size
        if size == index_bytes(shard.documents):
            lengths = np.fromfile(path, "<i4", shard.documents, offset=INDEX_HEADER.size)
            if int(lengths.sum(dtype=np.int64)) == shard.tokens:
                return lengths
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
    raise StoreError(
        f"{path}: {size:,} bytes whose lengths are not those of {shard.documents:,} documents of {shard.tokens:,} "
        "tokens; zephon-data verify finds what is damaged"
    )
