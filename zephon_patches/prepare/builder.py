"""One builder's work on a store, beside any number of others: in this process, in others, on other machines.

A builder comes to work by the plan that is there, or makes it. It goes over the units that are not finished, takes
the lock of each without waiting, looks again at what is finished of the unit, and builds the rest. What others hold
it comes back to, so it takes over the unit of one that died. Whoever finds all units finished closes the store: puts
the records together into the manifest. All of that gives the same bytes whoever does it, and a finished shard is
never written again.
"""

import errno
import json
import logging
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zephon_patches.config import TokenizerEngine
from zephon_patches.errors import ConfigError, InputError, StoreError
from zephon_patches.prepare.encoding import Encoder
from zephon_patches.prepare.exactness import EngineDistrusted
from zephon_patches.prepare.progress import Live, Standing
from zephon_patches.prepare.shards import SKIPPED, Input, shard_bytes_for
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.prepare.unfinished import Unfinished, Unit, held
from zephon_patches.store.atomic import atomic_file, write_atomic
from zephon_patches.store.indexed import dtype_for
from zephon_patches.store.manifest import MANIFEST, Manifest, ShardRecord
from zephon_patches.store.writer import ShardWriter

__all__ = ["WHOLE", "Builder", "Job", "Part", "errors_explained"]

logger = logging.getLogger(__name__)

# What systems answer where locks are not supported, as on Lustre mounted without flock.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
# A builder that was begun in time may end a little late.
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS, _QUIET_SECONDS, _REPORT_SECONDS = 0.2, 1.0, 10.0


@dataclass(frozen=True)
class Part:
    """Every ``count``-th unit from unit ``index`` on, for array jobs."""

    index: int
    count: int


WHOLE = Part(0, 1)


@dataclass(frozen=True)
class Job:
    """What a builder in another process is told; pickled, so it is small, and each process reads its own tokenizer."""

    source: Input
    folder: Path
    """Of the store"""
    recipe: dict[str, Any]
    tokenizer_folder: Path
    add_bos: bool | None
    add_eos: bool | None
    tokenizer_engine: TokenizerEngine
    exact: bool
    tokenizer_identity: str
    part: Part = WHOLE

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer, read from its folder.

        Raises:
            InputError: Its files are not those that the job was made from.
        """
        tokenizer = TextTokenizer(self.tokenizer_folder, self.tokenizer_engine, self.exact)
        tokenizer = tokenizer.with_ends(self.add_bos, self.add_eos, f"source {self.source.name!r}")
        if tokenizer.identity != self.tokenizer_identity:
            raise InputError(f"{self.tokenizer_folder}: the tokenizer changed while it was used; start again")
        return tokenizer

    def builder(self, tokenizer: TextTokenizer) -> "Builder":
        """The builder, in the process that it works in."""
        return Builder(self.source, tokenizer, self.folder, self.recipe, part=self.part)


class Builder:
    """Builds a store, or a part of its units.

    Args:
        source: What to read.
        tokenizer: Turns its texts into tokens.
        folder: Of the store.
        recipe: Of the store; ``shard_bytes`` in it is as set.
        max_minutes: The longest to wait for others, and to build a source of unknown size; None for any.
        part: The units to build.
    """

    def __init__(
        self,
        source: Input,
        tokenizer: TextTokenizer,
        folder: Path,
        recipe: dict[str, Any],
        max_minutes: float | None = None,
        part: Part = WHOLE,
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.folder = folder
        self.recipe = recipe
        self.part = part
        in_place = source.in_place
        self._dtype = dtype_for(tokenizer.largest_id) if in_place is None else in_place.dtype
        self.store = Unfinished(folder, self._dtype, in_place is not None, tokenizer.exact)
        self._encoder = Encoder(tokenizer, folder, source.name)
        self.shard_bytes = shard_bytes_for(recipe["shard_bytes"], sum(file.bytes for file in source.files))
        self._max_minutes = max_minutes
        self.started = time.monotonic()
        self._waited = 0.0
        self._reported = float("-inf")
        self._temporary: dict[int, list[Path]] | None = None
        self.on_progress: Callable[[Live], None] = lambda live: None
        self.on_wait: Callable[[], None] = lambda: None

    def job(self) -> Job:
        """What other processes need to build along."""
        tokenizer = self.tokenizer
        return Job(
            source=self.source,
            folder=self.folder.absolute(),
            recipe=self.recipe,
            tokenizer_folder=tokenizer.folder.absolute(),
            add_bos=tokenizer.add_bos,
            add_eos=tokenizer.add_eos,
            tokenizer_engine=tokenizer.engine,
            exact=tokenizer.exact,
            tokenizer_identity=tokenizer.identity,
            part=self.part,
        )

    def advice(self) -> str:
        """What to do where a build takes too long."""
        arguments = self.source.prepare_arguments()
        if arguments is None:
            return "Start once with NGPU=1 and a larger data.max_build_minutes"
        arguments += ["--tokenizer", str(self.tokenizer.folder.absolute())]
        for option, value in (("add-bos", self.tokenizer.add_bos), ("add-eos", self.tokenizer.add_eos)):
            arguments += [] if value is None else [f"--{option}" if value else f"--no-{option}"]
        if self.tokenizer.engine != "auto":
            arguments += ["--tokenizer-engine", self.tokenizer.engine]
        arguments += ["--cache-dir", str(self.folder.parent.parent.absolute())]
        arguments += ["--shard-bytes", str(self.recipe["shard_bytes"])]
        command = shlex.join([sys.executable, "-m", "zephon_patches.cli", "prepare", *arguments])
        return f"Do it ahead of time, once, on any machine that has the data: {command}"

    @contextmanager
    def at_work(self) -> Iterator[list[Unit] | None]:
        """Comes to work and goes when the block ends: gives the units, or None where the store is closed already."""
        standing = Standing(self.store)
        while True:
            with held(self.store.plan_lock()) as locked:
                what = "its plan, which another process makes"
                if locked:
                    if self.store.is_closed():
                        presence, units = None, None
                        break
                    units = self._planned()
                    if units is not None:
                        presence = self.store.join()
                        break
                    what = "the builders at work on it, who read its files with other times"
            if self.store.is_closed():
                presence, units = None, None
                break
            self.wait(what, standing)
        try:
            yield units
        finally:
            if presence is not None:
                self.store.leave(presence)

    def _planned(self) -> list[Unit] | None:
        """The units: those of the plan that is there, or new ones; None if a plan that has to go is in use."""
        store, name = self.store, self.source.name
        changed, problem = False, ""
        try:
            units = store.plan(self.source.files)
            if units is not None:
                return units
            changed, problem = True, "its files changed since the build began"
        except FileNotFoundError:
            pass
        except ValueError:
            problem = "its plan is damaged"
        if store.is_in_use():
            if changed:
                return None
            # Nothing of ours does that. To wait would be for ever, if it is our own parent that is at work.
            raise StoreError(
                f"{self.folder}: the plan was damaged or removed under the builders at work; stop them first"
            )
        if problem:
            logger.warning("source %r: %s; the build starts anew", name, problem)
        units = self.source.units(self.shard_bytes)
        store.replace_plan(self.source.files, units)
        return units

    def build(self, units: list[Unit], standing: Standing, wait: bool = True) -> bool:
        """Builds what is left, beside others.

        Args:
            units: All of the plan; only those of this builder's part are built.
            standing: Says how far the store is, where this builder has to wait.
            wait: Whether to wait for units that others hold, and to close the store.

        Returns:
            Whether the store is closed. With ``wait`` it is, unless units of other parts are missing.
        """
        own = list(range(self.part.index, len(units), self.part.count))
        while True:
            pending, encoder = own, self._encoder
            while pending := [number for number in pending if not self._build(number, units[number])]:
                if not wait:
                    return False
                self.wait(f"{len(pending):,} units that other builders hold", standing)
            if self._encoder is not encoder:
                continue  # the engine was distrusted on the way, and with it units that were finished before
            if not wait:
                return False
            closed = self._close(len(units), standing)
            if closed or self.part.count > 1:
                return closed

    def build_unit(self, units: list[Unit], number: int, patience: float) -> None:
        """Builds one unit; leaves it to its builder where another holds it for longer than ``patience`` seconds."""
        self._build(number, units[number], patience)

    def _build(self, number: int, unit: Unit, patience: float = 0.0) -> bool:
        """Builds what is missing of a unit; False if another holds it."""
        while not self.store.shards(number)[1]:
            with held(self.store.unit_lock(number), patience) as locked:
                if not locked:
                    return False
                try:
                    self._build_rest(number, unit)
                except EngineDistrusted:
                    self._encoder = Encoder(self.tokenizer, self.folder, self.source.name)
        return True

    def _build_rest(self, number: int, unit: Unit) -> None:
        """Builds what is missing of a unit, whose lock is held."""
        records, complete = self.store.shards(number)  # another may have built it between the two looks
        self._waited = 0.0
        self._remove_temporary(number)
        live = Live(unit=number)
        while not complete:
            before = len(records)
            self._build_from(number, unit, records, live)
            records, complete = self.store.shards(number)
            if len(records) == before:
                self._encoder.check_trusted()  # what it wrote may count no longer
                raise StoreError(f"{self.folder}: shard {number:06d}-{before:03d} is not there as it was written")

    def _build_from(self, number: int, unit: Unit, records: list[ShardRecord], live: Live) -> None:
        """Builds the shards of a unit behind its first ones, up to its end or to a shard that is finished already."""
        skip = sum(piece.records for record in records for piece in record.ranges)
        pieces = self.source.pieces(unit, self.shard_bytes, skip)
        for part, piece in enumerate(pieces, start=len(records)):
            live.shard, live.documents, live.tokens = f"{number:06d}-{part:03d}", 0, 0
            with ShardWriter(self.folder, live.shard, self._dtype, self.source.in_place is not None) as writer:
                for batch in self._encoder.batches(piece):
                    writer.add(batch.tokens, batch.lengths, batch.origins, batch.mask)
                    live.documents += len(batch.lengths)
                    live.tokens += len(batch.tokens)
                    live.unit_text_bytes += batch.text_bytes
                    self.on_progress(live)
                # In order: records are read ahead of where conversations turn out to have no label.
                skipped = sorted(piece.skipped)
                record = writer.finish(piece.ranges, dict(Counter(reason for _, _, reason in skipped)))
            self._encoder.check_trusted()
            self.store.mark(record, piece.last, skipped, self._encoder.is_proven)
            if self._max_minutes is not None and not any(map(self.source.num_bytes, unit)):
                self._check_time(self._max_minutes)
            if self.store.has(number, part + 1):  # the one before it was lost
                return

    def _remove_temporary(self, number: int) -> None:
        """Removes what dead builders left of a unit; its lock is held."""
        if self._temporary is None:  # one look at the folders serves all units until this builder has to wait
            self._temporary = self.store.temporary()
        for path in self._temporary.pop(number, []):
            path.unlink(missing_ok=True)

    def wait(self, what: str, standing: Standing) -> None:
        """Waits a moment for others; says what for now and then.

        Raises:
            ConfigError: It took too long.
        """
        now = time.monotonic()
        self._temporary = None
        self._waited = self._waited or now
        # Moments need no line, such as those of a thousand ranks that come at once.
        if now - self._waited >= _QUIET_SECONDS and now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            standing.update()
            logger.info("source %r: waiting for %s; %s", self.source.name, what, standing)
        if self._max_minutes is not None and now - self._waited > 60 * self._max_minutes + _PATIENCE_SECONDS:
            standing.update()
            raise ConfigError(
                f"source {self.source.name!r}: its store is not finished after waiting for data.max_build_minutes = "
                f"{self._max_minutes:g} ({standing}); start again when it is, or raise the setting"
            )
        self.on_wait()
        time.sleep(_POLL_SECONDS)

    def _check_time(self, max_minutes: float) -> None:
        """Ends a build whose size was not known, so that it could not be estimated, when it takes too long."""
        if time.monotonic() - self.started > 60 * max_minutes:
            raise ConfigError(
                f"source {self.source.name!r}: tokenizing is not done after data.max_build_minutes = "
                f"{max_minutes:g}; what is done is kept, and the next start goes on from there. {self.advice()}"
            )

    # --- closing ---

    def _close(self, num_units: int, standing: Standing) -> bool:
        """Writes the manifest, if all units are finished; says whether the store has it."""
        while True:
            with held(self.store.plan_lock()) as locked:
                if self.store.is_closed():
                    return True
                if locked:
                    return self._write_manifest(num_units)
            self.wait("another process that closes it", standing)

    def _write_manifest(self, num_units: int) -> bool:
        records: list[ShardRecord] = []
        for number in range(num_units):
            shards, complete = self.store.shards(number)
            if not complete:
                return False
            records += shards
        in_place = self.source.in_place is not None
        manifest = Manifest(self.recipe, self._dtype.str, self.source.files, records, in_place)
        if manifest.skipped:
            self._list_skipped(manifest)
        write_atomic(self.folder / MANIFEST, manifest.to_json())
        logger.info(
            "source %r: %s documents, %s tokens in %s shards, built in %.0f s: %s",
            self.source.name,
            f"{manifest.documents:,}",
            f"{manifest.tokens:,}",
            f"{len(records):,}",
            time.monotonic() - self.started,
            self.folder,
        )
        if manifest.skipped:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in manifest.skipped.items())
            total, path = sum(manifest.skipped.values()), self.folder / SKIPPED
            logger.warning(
                "source %r: skipped %s records (%s), listed in %s", self.source.name, f"{total:,}", reasons, path
            )
        return True

    def _list_skipped(self, manifest: Manifest) -> None:
        """Puts the shards' lists into one, with names of files and numbers of records in them."""
        before: Counter[int] = Counter()  # records of a file in the shards so far
        with atomic_file(self.folder / SKIPPED) as out:
            for shard in manifest.shards:
                if shard.skipped:
                    for line in self.store.skipped_path(shard.name).read_bytes().splitlines():
                        file, record, reason = json.loads(line)
                        name = manifest.files[file].name
                        entry = {"file": name, "record": before[file] + record, "reason": reason}
                        out.write((json.dumps(entry) + "\n").encode("ascii"))
                for piece in shard.ranges:
                    before[piece.file] += piece.records


@contextmanager
def errors_explained(source: Input, folder: Path) -> Iterator[None]:
    """Says what a failure of the system means for the store.

    Raises:
        StoreError: The block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise StoreError(
                f"{folder}: this file system has no file locks ({error}), which building a store needs; set "
                "data.cache_dir to one that has, or prepare the store there and copy its folder here"
            ) from error
        if isinstance(error, FileNotFoundError) and folder.is_dir():
            raise StoreError(
                f"{folder}: a file went away under its builder ({error}); either someone removed it, and starting "
                "again helps, or builders on other machines do not see this one's locks (Lustre: mount with flock, not "
                "localflock), and then build on one machine alone"
            ) from error
        raise StoreError(
            f"{folder}: the store of source {source.name!r} is not finished and cannot be built here ({error})"
            "; set data.cache_dir to a folder with room that can be written to"
        ) from error
