"""Files that appear whole or not at all: written aside, flushed to the disk, then renamed.

A temporary file has a name of its own (host, process, random), so builders do not meet in it, and ends in
``.tmp``, so one that a killed process left behind is recognised. Permissions are those of any new file, by the umask:
who may read the folder may read its stores, and a temporary file holds no more than they do.
"""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["TEMPORARY_SUFFIX", "atomic_file", "sync_folder", "write_atomic"]

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that takes its name only when the block ends without an exception."""
    temporary = path.with_name(
        f".{path.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
    )
    with open(temporary, "xb") as file:  # never through a link that is there
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a small file whole."""
    with atomic_file(path) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder last through a power cut, where the system has a way to."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows does not open folders
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems cannot sync a folder
        pass
    finally:
        os.close(descriptor)
