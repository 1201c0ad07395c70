"""Builds the token store of a source, or opens the one that is there (``finding.py`` says where).

First the plan is written, then shard by shard, then the manifest that closes the store. A shard's record in ``units/``
marks it as finished, so a build goes on where a killed one stopped, and its bytes are the same as in one go.

Whoever comes while a store is not finished builds along (``builder.py``), also from other machines. They do not wait
for each other in a collective, so a long build runs into no timeout of the process group.
"""

import logging
import pickle
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from zephon_patches.errors import ConfigError, StoreError
from zephon_patches.prepare import on_ray, parallel
from zephon_patches.prepare.builder import Builder, Part, errors_explained
from zephon_patches.prepare.estimate import estimated_minutes
from zephon_patches.prepare.finding import checked_marker, locate, times_of
from zephon_patches.prepare.progress import Progress, Standing
from zephon_patches.prepare.shards import Input
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.prepare.unfinished import Unfinished, Unit, held, taken
from zephon_patches.store.atomic import write_atomic
from zephon_patches.store.manifest import MANIFEST, Manifest
from zephon_patches.store.reader import TokenStore

__all__ = ["Building", "Outlook", "build_part", "look_at", "open_or_build"]

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
    folder, recipe = locate(source, tokenizer, cache_dir, shard_bytes)
    if recipe is None:
        return _open(source, folder)
    builder = Builder(source, tokenizer, folder, recipe, building.max_minutes)
    deadline = time.monotonic() + patience
    while not _is_finished(source, builder.folder) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    _finish(builder, building)
    return _open(source, folder)


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
    folder, recipe = locate(source, tokenizer, cache_dir, shard_bytes)
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
    folder, recipe = locate(source, tokenizer, cache_dir, shard_bytes)
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


def _is_finished(source: Input, folder: Path) -> bool:
    """Whether a store is closed and its input is what it was built from, going by the files' times."""
    if not Unfinished(folder).is_closed():
        return False
    times = times_of(Manifest.read(folder).files)
    return times == times_of(source.files) or checked_marker(source, folder).exists()


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
        write_atomic(checked_marker(source, folder), b"")
    except OSError:
        logger.info("source %r: unchanged, but %s cannot be written to keep that", source.name, folder)
