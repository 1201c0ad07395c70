"""What a source reads, by its path: files of texts or ids, Megatron's pairs in place, or a data set of the hub."""

from zephon_patches.config import HUB, SourceConfig
from zephon_patches.prepare.hub import HubInput
from zephon_patches.prepare.megatron import MegatronInput, find_pairs
from zephon_patches.prepare.shards import FileInput, Input, list_files

__all__ = ["make_input"]


def make_input(source: SourceConfig) -> Input:
    """The input of a source.

    Raises:
        ConfigError: A setting does not go with what the path names.
        InputError: A file cannot be read, or is of a kind that is not. No file at all is no error here: a store may
            still be there.
    """
    if source.path.startswith(HUB):
        return HubInput(source)
    found = list_files(source.path)
    pairs = find_pairs(source.path, found)
    return FileInput(source, found) if pairs is None else MegatronInput(source, pairs)
