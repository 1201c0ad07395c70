"""Builds the token store of a source, or finds the one that is there.

The store lies at ``cache_dir/<source>/<recipe>-<files>``: a hash of how texts become tokens, and one of the
files' names and sizes. Neither holds an absolute path, so texts and stores may be moved. First the plan is
written, then shard by shard, then the manifest that closes the store. A shard's record in ``units/`` marks it
as finished, so a build goes on where a killed one stopped, and its bytes are the same as in one go.

Whoever comes while a store is not finished builds along (``builder.py``), also from other machines. They do not wait
for each other in a collective, so a long build runs into no timeout of the process group.
"""

import logging
import pickle
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zephon_patches.config import DataConfig
from zephon_patches.errors import ConfigError, InputError, StoreError
from zephon_patches.keys import fingerprint
from zephon_patches.prepare import on_ray, parallel
from zephon_patches.prepare.builder import Builder, Part, errors_explained
from zephon_patches.prepare.estimate import estimated_minutes
from zephon_patches.prepare.progress import Progress, Standing
from zephon_patches.prepare.shards import Input, finds
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.prepare.unfinished import SKIPPED, Unfinished, Unit, held, taken
from zephon_patches.store.atomic import write_atomic
from zephon_patches.store.manifest import FORMAT, MANIFEST, FileRecord, Manifest
from zephon_patches.store.reader import TokenStore

__all__ = [
    "Building",
    "Outlook",
    "build_part",
    "check_input",
    "find_store",
    "is_as_read",
    "look_at",
    "open_or_build",
    "tokenizer_for",
]

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Building:
    """Who builds, where a store is not finished; others may build along in any of these ways."""

    workers: int | None = 1
    """Processes; 1 builds in this one, with the tokenizer's threads; None as many as are of use, at most one a core"""
    one_per_machine: bool = False
    """Whether to leave the building to another process of this machine where one is at it, and wait"""
    on_ray: bool = False
    """Whether the units are spread over a Ray cluster"""
    max_minutes: float | None = None
    """The longest build to begin, as far as it can be estimated, and the longest wait; None for any"""


def tokenizer_for(source: Input, config: DataConfig, tokenizer: TextTokenizer) -> TextTokenizer:
    """A tokenizer with BOS and EOS as a source wants them, or else the data's settings.

    Raises:
        ConfigError: The tokenizer lacks what is asked for.
    """
    add_bos = config.add_bos if source.add_bos is None else source.add_bos
    add_eos = config.add_eos if source.add_eos is None else source.add_eos
    return tokenizer.with_ends(add_bos, add_eos, f"source {source.name!r}")


def open_or_build(
    source: Input,
    tokenizer: TextTokenizer,
    cache_dir: str | Path,
    shard_bytes: int,
    patience: float = 0.0,
    building: Building = Building(),
) -> TokenStore:
    """Opens the store of a source; builds it, along with others that do, if it is not finished.

    Args:
        source: What to read.
        tokenizer: Turns its texts into tokens.
        cache_dir: Folder of all stores.
        shard_bytes: ``data.shard_bytes``.
        patience: Seconds to leave the building to another process before joining in.
        building: How to build.

    Raises:
        ConfigError: The stores would lie in the source's folder, or building would take too long.
        InputError: The input is missing, or a record of it cannot be read.
        StoreError: A finished store is damaged, its input was edited since, or it cannot be built here.
    """
    folder, recipe = _find(source, tokenizer, cache_dir, shard_bytes)
    if recipe is None:
        return _open(source, folder)
    builder = Builder(source, tokenizer, folder, recipe, building.max_minutes)
    deadline = time.monotonic() + patience
    while not _is_finished(source, builder.folder) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    _finish(builder, building)
    return _open(source, folder)


def check_input(source: Input, tokenizer: TextTokenizer, cache_dir: str | Path, shard_bytes: int) -> None:
    """Whether a store could be opened or its build begun: of several sources, told before the first one is built.

    Errors as ``open_or_build``.
    """
    _find(source, tokenizer, cache_dir, shard_bytes)


def find_store(source: Input, tokenizer: TextTokenizer, cache_dir: str | Path, shard_bytes: int) -> Path:
    """The folder of a source's finished store, for looking at it: nothing is built, compared or written.

    Raises:
        ConfigError, InputError: As ``open_or_build``.
        StoreError: There is none; the message has the command that makes it.
    """
    if source.version is not None:  # else asking for the files might download them
        recipe = {"format": FORMAT, "shard_bytes": shard_bytes, "tokenizer": tokenizer.identity, **source.recipe()}
        parent = Path(cache_dir) / source.name
        if (standing := _store_of_version(source, parent, fingerprint(recipe))) is not None:
            return standing
        folder = parent / f"{fingerprint(recipe)}-..."
    else:
        folder, found = _find(source, tokenizer, cache_dir, shard_bytes)
        if found is None:
            return folder
        recipe = found
    if not (folder / MANIFEST).exists():
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
    return times == _times(source.files) or _checked_marker(source, folder).exists()


def build_part(
    source: Input,
    tokenizer: TextTokenizer,
    cache_dir: str | Path,
    shard_bytes: int,
    part: Part,
    building: Building = Building(),
) -> TokenStore | Standing:
    """Builds some of a store's units; errors as ``open_or_build``.

    Returns:
        The store, if it is finished now, or how far it is.
    """
    folder, recipe = _find(source, tokenizer, cache_dir, shard_bytes)
    if recipe is None:
        return _open(source, folder)
    builder = Builder(source, tokenizer, folder, recipe, building.max_minutes, part=part)
    standing = _finish(builder, building)
    return _open(source, folder) if standing is None else standing


def _open(source: Input, folder: Path) -> TokenStore:
    store = TokenStore(folder, None if source.in_place is None else source.in_place.root)
    if store.key != folder.name:
        raise StoreError(
            f"{folder}: its {MANIFEST} is that of another store, {store.key}: folders or manifests were mixed up; move "
            f"it back to its own folder, or remove {folder} to build the store anew"
        )
    return store


@dataclass(frozen=True)
class Outlook:
    """What a build would do."""

    folder: Path
    finished: bool
    started: bool
    """Whether a build was begun that the next one goes on with"""
    units: int
    """0 where they are not known"""
    finished_units: int
    bytes: int
    """Of input; 0 where they are not known"""
    missing_bytes: int
    """Of the units that are not finished"""
    minutes: float
    """About how long those take"""


def look_at(source: Input, tokenizer: TextTokenizer, cache_dir: str | Path, shard_bytes: int) -> Outlook:
    """What building a store would do here; writes nothing. Errors as ``open_or_build``."""
    folder, recipe = _find(source, tokenizer, cache_dir, shard_bytes)
    if recipe is None:
        return Outlook(folder, True, True, 0, 0, 0, 0, 0.0)
    builder = Builder(source, tokenizer, folder, recipe)
    total = sum(file.bytes for file in source.files)
    if builder.store.is_closed():
        return Outlook(folder, True, True, 0, 0, total, 0, 0.0)
    try:
        units = builder.store.plan(source.files)
    except (OSError, ValueError):
        units = None
    planned = units is not None
    if units is None:
        units = source.units(builder.shard_bytes)
    missing = [unit for number, unit in enumerate(units) if not (planned and builder.store.shards(number)[1])]
    size = sum(_sizes(source, missing))
    minutes = estimated_minutes(source, tokenizer, missing, size)
    done = len(units) - len(missing)
    return Outlook(folder, False, planned, len(units), done, sum(_sizes(source, units)), size, minutes)


def _find(
    source: Input, tokenizer: TextTokenizer, cache_dir: str | Path, shard_bytes: int
) -> tuple[Path, dict[str, Any] | None]:
    """The folder and the recipe of a source's store; no recipe for a finished store that needs no files."""
    _check_apart(source, Path(cache_dir))
    recipe = {"format": FORMAT, "shard_bytes": shard_bytes, "tokenizer": tokenizer.identity, **source.recipe()}
    if "chat_field" in recipe:
        recipe["chat_template"] = tokenizer.chat_template().identity
    parent = Path(cache_dir) / source.name
    if (standing := _store_of_version(source, parent, fingerprint(recipe))) is not None:
        return standing, None
    if source.has_files and not source.files:
        return _only_store(source, parent, fingerprint(recipe)), None
    files_key = fingerprint([[file.name, file.bytes] for file in source.files])
    return parent / f"{fingerprint(recipe)}-{files_key}", recipe


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


def _is_finished(source: Input, folder: Path) -> bool:
    """Whether a store is closed and its input is what it was built from, going by the files' times."""
    if not Unfinished(folder).is_closed():
        return False
    times = _times(Manifest.read(folder).files)
    return times == _times(source.files) or _checked_marker(source, folder).exists()


def _finish(builder: Builder, building: Building) -> Standing | None:
    """Builds, waits for or checks a store until it is finished; or a part of it, then says how far it is."""
    source, folder = builder.source, builder.folder
    if builder.tokenizer.exact and builder.store.is_closed():
        logger.warning(
            "source %r: its store was finished before, so nothing is compared; to build it anew and compare, remove %s",
            source.name,
            folder,
        )
    try:
        with errors_explained(source, folder):
            while not _is_finished(source, folder):
                if not builder.store.is_closed():
                    folder.mkdir(parents=True, exist_ok=True)
                    standing = _build(builder, building)
                    if standing is not None:
                        return standing
                    continue
                with held(builder.store.plan_lock()) as locked:
                    if locked:
                        if not _is_finished(source, folder):  # another may have compared between the two looks
                            _check_content(source, folder)
                        break
                builder.wait("another process, which compares its files", Standing(builder.store))
    except StoreError as error:
        # On a read-only disk, say: nothing has to be written to use it.
        if not (isinstance(error.__cause__, OSError) and builder.store.is_closed()):
            raise
        if not _is_finished(source, folder):
            _check_content(source, folder)
    builder.store.tidy()
    return None


def _build(builder: Builder, building: Building) -> Standing | None:
    """Builds a store until it is closed; or a part of it, then says how far the store is."""
    source, store = builder.source, builder.store
    with ExitStack() as stack:
        units = stack.enter_context(builder.at_work())
        if units is None:
            return None
        sizes = _sizes(source, units)
        if building.one_per_machine:
            seat, standing = store.seat(), Standing(store, sizes)
            while not taken(seat):
                if store.is_closed():
                    return None
                builder.wait("the process that builds it on this machine", standing)
            stack.callback(seat.release)
            if store.is_closed():
                return None
        builder.started = time.monotonic()
        own = range(builder.part.index, len(units), builder.part.count)
        todo = [number for number in own if not store.shards(number)[1]]
        _announce(builder, units, todo, sum(sizes[number] for number in todo), building.max_minutes)
        with closing(Progress(source.name, store, sizes)) as progress:
            builder.on_progress, builder.on_wait = progress.update, progress.show
            _build_elsewhere(builder, todo, sum(sizes[number] for number in todo), building, progress)
            if builder.build(units, progress.standing):
                return None
            progress.standing.update()
            return progress.standing


def _build_elsewhere(builder: Builder, todo: Sequence[int], size: int, building: Building, progress: Progress) -> None:
    """Lets other processes build, where there are to be some."""
    processes, threads = parallel.share_out(building.workers, len(todo), size)
    if not todo or (processes == 1 and not building.on_ray):
        return
    job = builder.job()
    try:
        pickle.dumps(job)
    except Exception as error:  # whatever the source is made of
        name = builder.source.name
        logger.info("source %r: built in one process, since its input cannot be sent to others (%s)", name, error)
        return
    if building.on_ray:
        on_ray.run_on_ray(job, todo, progress)
    else:
        parallel.run_workers(job, processes, threads, progress)


def _announce(builder: Builder, units: list[Unit], todo: Sequence[int], size: int, max_minutes: float | None) -> None:
    """Says what is to be done and about how long it takes; refuses where that is too long."""
    name = builder.source.name
    minutes = estimated_minutes(builder.source, builder.tokenizer, (units[number] for number in todo), size)
    if todo and not size:
        limit = "" if max_minutes is None else f"; stops after {max_minutes:g} minutes if not done then"
        logger.info("source %r: tokenizing an unknown amount of text%s", name, limit)
    else:
        about = f", about {minutes:,.1f} minutes" if minutes else ""
        counts = f"{len(todo):,} of {len(units):,}"
        logger.info("source %r: tokenizing %s units (%s MB)%s", name, counts, f"{size / 1e6:,.1f}", about)
    if max_minutes is not None and minutes > max_minutes:
        raise ConfigError(
            f"source {name!r}: tokenizing {size / 1e6:,.0f} MB would take about {minutes:,.1f} minutes here, above "
            f"data.max_build_minutes = {max_minutes:g}, while all ranks wait. {builder.advice()}"
        )


def _sizes(source: Input, units: Sequence[Unit]) -> list[int]:
    """Bytes of input of each unit."""
    return [sum(source.num_bytes(piece) for piece in unit) for unit in units]


# --- a finished store whose input has other times ---


def _times(files: list[FileRecord]) -> list[list[Any]]:
    return [[file.name, file.mtime_ns] for file in files]


def _checked_marker(source: Input, folder: Path) -> Path:
    """Exists where files with these times were found to have the right content."""
    return folder / f"checked-{fingerprint(_times(source.files))}"


def _check_content(source: Input, folder: Path) -> None:
    manifest = Manifest.read(folder)
    logger.info("source %r: its files have other times than when they were read; comparing", source.name)
    changed = source.check_content(piece for shard in manifest.shards for piece in shard.ranges)
    if changed is not None:
        raise StoreError(
            f"{changed}: edited since the store {folder} was built from it (same size, other content); bring "
            f"the old file back, or remove {folder} to build the store anew"
        )
    try:
        write_atomic(_checked_marker(source, folder), b"")
    except OSError:
        logger.info("source %r: unchanged, but %s cannot be written to keep that", source.name, folder)
