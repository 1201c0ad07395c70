"""Where the store of a source is: found by its input, tokenizer and settings; nothing is built or compared here.

The store lies at ``cache_dir/<source>/<recipe>-<files>``: a hash of how texts become tokens, and one of the
files' names and sizes. Neither holds an absolute path, so texts and stores may be moved.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zephon_patches.config import DataConfig
from zephon_patches.errors import ConfigError, InputError, StoreError
from zephon_patches.keys import fingerprint
from zephon_patches.prepare.shards import SKIPPED, Input, finds
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.store.manifest import FORMAT, MANIFEST, FileRecord, Manifest

__all__ = ["check_input", "checked_marker", "find_store", "is_as_read", "locate", "times_of", "tokenizer_for"]

logger = logging.getLogger(__name__)


def tokenizer_for(source: Input, config: DataConfig, tokenizer: TextTokenizer) -> TextTokenizer:
    """A tokenizer with BOS and EOS as a source wants them, or else the data's settings.

    Raises:
        ConfigError: The tokenizer lacks what is asked for.
    """
    add_bos = config.add_bos if source.add_bos is None else source.add_bos
    add_eos = config.add_eos if source.add_eos is None else source.add_eos
    return tokenizer.with_ends(add_bos, add_eos, f"source {source.name!r}")


def check_input(source: Input, tokenizer: TextTokenizer, cache_dir: str | Path, shard_bytes: int) -> None:
    """Whether a store could be opened or its build begun: of several sources, told before the first one is built.

    Errors as ``build.open_or_build``.
    """
    locate(source, tokenizer, cache_dir, shard_bytes)


def find_store(source: Input, tokenizer: TextTokenizer, cache_dir: str | Path, shard_bytes: int) -> Path:
    """The folder of a source's finished store, for looking at it: nothing is built, compared or written.

    Raises:
        ConfigError, InputError: As ``build.open_or_build``.
        StoreError: There is none; the message has the command that makes it.
    """
    if source.version is not None:  # else asking for the files might download them
        recipe = _recipe(source, tokenizer, shard_bytes)
        parent = Path(cache_dir) / source.name
        if (standing := _store_of_version(source, parent, fingerprint(recipe))) is not None:
            return standing
        folder = parent / f"{fingerprint(recipe)}-..."
    else:
        folder, found = locate(source, tokenizer, cache_dir, shard_bytes)
        if found is None:
            return folder
        recipe = found
    if not (folder / MANIFEST).exists():
        from zephon_patches.prepare.builder import Builder  # with all that building takes

        builder = Builder(source, tokenizer, folder, recipe)
        raise StoreError(
            f"source {source.name!r}: {folder} is no finished store, and looking builds none. {builder.advice()}"
        )
    return folder


def is_as_read(source: Input, folder: Path, files: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a source's files have the times they were read with, or were compared since, or are not here at all.

    Args:
        files: As in the manifest of the store.
    """
    if source.version is not None or not (source.has_files and source.files):
        return True
    times = [[file["name"], file["mtime_ns"]] for file in files]
    return times == times_of(source.files) or checked_marker(source, folder).exists()


def locate(
    source: Input, tokenizer: TextTokenizer, cache_dir: str | Path, shard_bytes: int
) -> tuple[Path, dict[str, Any] | None]:
    """The folder and the recipe of a source's store; no recipe for a finished store that needs no files."""
    _check_apart(source, Path(cache_dir))
    recipe = _recipe(source, tokenizer, shard_bytes)
    parent = Path(cache_dir) / source.name
    if (standing := _store_of_version(source, parent, fingerprint(recipe))) is not None:
        return standing, None
    if source.has_files and not source.files:
        return _only_store(source, parent, fingerprint(recipe)), None
    files_key = fingerprint([[file.name, file.bytes] for file in source.files])
    return parent / f"{fingerprint(recipe)}-{files_key}", recipe


def _recipe(source: Input, tokenizer: TextTokenizer, shard_bytes: int) -> dict[str, Any]:
    """How a source's records become tokens."""
    recipe = {"format": FORMAT, "shard_bytes": shard_bytes, "tokenizer": tokenizer.identity, **source.recipe()}
    if "chat_field" in recipe:
        recipe["chat_template"] = tokenizer.chat_template().identity
    return recipe


def _check_apart(source: Input, cache_dir: Path) -> None:
    """Stores that lie where their source finds files would be taken for input at the next start."""
    if not source.has_files:
        return
    names = [MANIFEST, "000000-000.bin", "000000-000.idx"]
    if "on_bad_record" in source.recipe():
        names.append(SKIPPED)
    if any(finds(source.path, cache_dir / source.name / "recipe-files" / name) for name in names):
        raise ConfigError(
            f"data.cache_dir {cache_dir} lies in the folder of source {source.name!r}, {source.path}, so its files "
            "would be read as texts; set one of them to another folder"
        )


def _store_of_version(source: Input, parent: Path, recipe_key: str) -> Path | None:
    """A finished store of the version that a source would read; its files need not be here."""
    if source.version is not None:
        for path in sorted(parent.glob(f"{recipe_key}-*/{MANIFEST}")):
            files = Manifest.read(path.parent).files
            if files and all(file.name.startswith(f"{source.version}/") for file in files):
                return path.parent
    return None


def _only_store(source: Input, parent: Path, recipe_key: str) -> Path:
    """The one finished store of a source whose texts are gone."""
    stores = sorted(path.parent for path in parent.glob(f"{recipe_key}-*/{MANIFEST}"))
    missing, advice = source.missing()
    if not stores:
        raise InputError(
            f"source {source.name!r}: {missing}, and {parent} has no finished store of it for this tokenizer and these "
            f"settings; {advice}"
        )
    if len(stores) > 1:
        raise InputError(
            f"source {source.name!r}: {missing}, and there are {len(stores)} stores to choose "
            f"from: {', '.join(map(str, stores))}; remove all but the one to use, or bring the files back"
        )
    logger.info("source %r: %s; using its store %s", source.name, missing, stores[0])
    return stores[0]


def times_of(files: list[FileRecord]) -> list[list[Any]]:
    return [[file.name, file.mtime_ns] for file in files]


def checked_marker(source: Input, folder: Path) -> Path:
    """Exists where files with these times were found to have the right content."""
    return folder / f"checked-{fingerprint(times_of(source.files))}"
