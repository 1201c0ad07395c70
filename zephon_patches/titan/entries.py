"""What a DCP checkpoint holds of the loader, read before anything is loaded.

DCP plans a load from the keys that the loader has today and fails on the first that the checkpoint lacks, in
words about keys. So the checkpoint is looked at first: its metadata lists the keys, and the few values that
matter are read from their files alone, without the model.
"""

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

from zephon_patches.errors import StateError

__all__ = ["loader_keys", "read_entries"]

PREFIX = "dataloader."


def loader_keys(checkpoint: str) -> list[str]:
    """The names of the loader's entries in a checkpoint, sorted, without their prefix."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    return sorted(key[len(PREFIX) :] for key in metadata.state_dict_metadata if key.startswith(PREFIX))


def read_entries(checkpoint: str, keys: list[str]) -> dict[str, Any]:
    """Reads entries of the loader, each a plain value.

    Raises:
        StateError: An entry is damaged.
    """
    storage = FileSystemReader(checkpoint).read_metadata().storage_data or {}
    values = {}
    for key in keys:
        try:
            place = storage[MetadataIndex(PREFIX + key)]
            with open(Path(checkpoint) / place.relative_path, "rb") as file:
                file.seek(place.offset)
                values[key] = torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
        except Exception as error:  # torch.load raises many kinds
            raise StateError(
                f"{checkpoint}: the loader's entry {key!r} is damaged ({type(error).__name__}: {error}); resume from "
                "an earlier checkpoint with checkpoint.load_step"
            ) from error
    return values
