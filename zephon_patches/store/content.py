"""Whether an open file is the one that a store's manifest means: by its size, by spots of it, or by all of its bytes.

Spots are up to eight pages, spread evenly from the first byte to the last; of a small file they are all of it. Their
hash costs eight small reads however large the file is. It tells a file from any other one (another shard's, another
store's, of the same size too) and finds an end that was never written. It does not find a flipped bit elsewhere: for
that all bytes are hashed, which reads the whole file.

Files are read here and not looked at through a map: where a file turns out shorter, or the disk fails, reading is an
error, and touching a map ends the process.

Worked case: the spots of 100,000 bytes begin at 0, 13,700, 27,401, 41,101, 54,802, 68,502, 82,203 and 95,904; the last
one ends with the file.
"""

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import xxhash

__all__ = ["check_size", "checksum_of", "read_whole", "spots_of"]

# A manifest has about 400 bytes a shard and 100 a file.
_MOST_BYTES = 1 << 30

_SPOTS, _SPOT_BYTES = 8, 4096
_BLOCK_BYTES = 4 << 20


def read_whole(path: Path) -> bytes:
    """The bytes of a file that is parsed in memory.

    Raises:
        OSError: It cannot be read, is larger than any such file, or no file: a pipe or a device has no end.
    """
    # A pipe would wait for a writer. Given a descriptor, open would leave that of a folder open.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        if status.st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"{status.st_size:,} bytes, more than {_MOST_BYTES:,}")
        return file.read(status.st_size)


def check_size(descriptor: int, expected: int) -> str | None:
    """What is wrong with the kind or the size of an open file, or None."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    return None if status.st_size == expected else f"{status.st_size:,} bytes, but the manifest says {expected:,}"


def spots_of(descriptor: int, size: int) -> str:
    """Hash of the spots of an open file of so many bytes: XXH3-64 in hexadecimal.

    Raises:
        OSError: It cannot be read, or has fewer bytes.
    """
    if size <= _SPOTS * _SPOT_BYTES:
        return checksum_of(descriptor, 0, size)
    last = size - _SPOT_BYTES
    return _hash_of(descriptor, ((spot * last // (_SPOTS - 1), _SPOT_BYTES) for spot in range(_SPOTS)))


def checksum_of(descriptor: int, start: int, size: int) -> str:
    """Hash of the bytes ``[start, start + size)`` of an open file; otherwise as ``spots_of``."""
    stop = start + size
    return _hash_of(descriptor, ((at, min(_BLOCK_BYTES, stop - at)) for at in range(start, stop, _BLOCK_BYTES)))


def _hash_of(descriptor: int, blocks: Iterable[tuple[int, int]]) -> str:
    digest = xxhash.xxh3_64()
    for start, size in blocks:
        data = os.pread(descriptor, size, start)
        if len(data) < size:  # a short read that is not the end may be gone on with
            data = _rest(descriptor, data, start, size)
        digest.update(data)
    return digest.hexdigest()


def _rest(descriptor: int, data: bytes, start: int, size: int) -> bytes:
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), start + len(data))
        if not more:
            raise OSError(f"cut off while it was read, at byte {start + len(data):,}")
        data += more
    return data
