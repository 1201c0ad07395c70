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
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from zephon_patches.errors import StateError

__all__ = [
    "LOADER",
    "METADATA",
    "TRAIN_STATE",
    "another_step",
    "holds_train_state",
    "loader_keys",
    "num_writers",
    "read_entries",
]

METADATA = ".metadata"
# What the keys of an object's entries start with.
LOADER = "dataloader."
TRAIN_STATE = "train_state."


def loader_keys(checkpoint: str) -> list[str]:
    """The names of the loader's entries in a checkpoint, sorted, without their prefix.

    Raises:
        StateError: The checkpoint's metadata are damaged.
    """
    return sorted(key[len(LOADER) :] for key in _metadata(checkpoint).state_dict_metadata if key.startswith(LOADER))


def num_writers(checkpoint: str) -> int:
    """How many processes wrote a checkpoint; DCP's files are named ``__RANK_NUMBER.distcp``."""
    ranks = [path.name.split("_")[2] for path in Path(checkpoint).glob("__*_*.distcp")]
    return 1 + max((int(rank) for rank in ranks if rank.isdecimal()), default=0)


def holds_train_state(checkpoint: str) -> bool:
    """Whether a checkpoint is more than a model."""
    return any(key.startswith(TRAIN_STATE) for key in _metadata(checkpoint).state_dict_metadata)


def read_entries(checkpoint: str, keys: list[str], owner: str = LOADER) -> dict[str, Any]:
    """Reads entries of the loader, or of another object, each a plain value.

    Raises:
        StateError: An entry is missing or damaged.
    """
    storage = _metadata(checkpoint).storage_data or {}
    values = {}
    for key in keys:
        try:
            place = storage[MetadataIndex(owner + key)]
            with open(Path(checkpoint) / place.relative_path, "rb") as file:
                file.seek(place.offset)
                values[key] = torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
        except Exception as error:  # torch.load raises many kinds
            whose = "loader" if owner == LOADER else "trainer"
            raise StateError(
                f"{checkpoint}: the {whose}'s entry {key!r} is damaged ({type(error).__name__}: {error}). "
                f"{another_step(checkpoint)}"
            ) from error
    return values


def another_step(checkpoint: str) -> str:
    """Advice to resume from another checkpoint, with the steps of those that are beside this one and complete."""
    folder = Path(checkpoint)
    steps = [path.parent.name[len("step-") :] for path in folder.parent.glob(f"step-*/{METADATA}")]
    others = sorted((int(step) for step in steps if step.isdigit() and f"step-{step}" != folder.name), reverse=True)
    listed = ", ".join(map(str, others[:5])) or "none is beside it"
    return f"Resume from another one: checkpoint.load_step ({listed})"


def _metadata(checkpoint: str) -> Metadata:
    try:
        return FileSystemReader(checkpoint).read_metadata()
    except Exception as error:  # it is a pickle, so of many kinds
        raise StateError(
            f"{checkpoint}: its {METADATA} cannot be read ({type(error).__name__}: {error}). {another_step(checkpoint)}"
        ) from error
