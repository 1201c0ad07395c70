"""Reads the files of a tokenizer's folder, which fit into memory."""

import stat
from pathlib import Path
from typing import Any

import orjson

from zephon_patches.errors import InputError

__all__ = ["read_object", "read_whole"]


def read_whole(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        FileNotFoundError: There is none.
        InputError: It cannot be read, or it is no file: a pipe would be waited for, and a device has no end.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{path}: cannot be read (no regular file)")
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # a name that no file can have
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        FileNotFoundError: There is no file.
        InputError: It cannot be read, or is no JSON object.
    """
    try:
        content = orjson.loads(read_whole(path))
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: damaged, not JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object")
    return content
