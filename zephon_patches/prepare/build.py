"""Builds the token store of a source, or finds the one that is there.

The store lies at ``cache_dir/<source>/<recipe>-<files>``: a hash of how texts become tokens, and one of the
files' names and sizes. Neither holds an absolute path, so texts and stores may be moved. First the plan is
written, then shard by shard, then the manifest that closes the store. A shard's record in ``units/`` marks it
as finished, so a build goes on where a killed one stopped, and its bytes are the same as in one go.

One process builds, holding a lock that the system releases when it dies; the others watch the folder. They
do not wait in a collective, so a long build runs into no timeout of the process group.
"""

import errno
import json
import logging
import os
import shlex
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import filelock
from tqdm import tqdm

from zephon_patches.config import DataConfig
from zephon_patches.errors import ConfigError, InputError, StoreError
from zephon_patches.keys import canonical_json, fingerprint
from zephon_patches.prepare.encoding import encoded_batches
from zephon_patches.prepare.shards import Input, Piece, shard_bytes_for
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.store.atomic import TEMPORARY_SUFFIX, atomic_file, write_atomic
from zephon_patches.store.indexed import dtype_for, index_bytes
from zephon_patches.store.manifest import FORMAT, MANIFEST, FileRecord, InputRange, Manifest, ShardRecord, shard_record
from zephon_patches.store.reader import TokenStore
from zephon_patches.store.writer import ShardWriter

__all__ = ["PLAN", "UNITS", "open_or_build", "plan_json", "record_json", "store_locked", "tokenizer_for"]

logger = logging.getLogger(__name__)

PLAN, UNITS, PROGRESS, LOCK = "plan.json", "units", "progress.json", "build.lock"
SKIPPED = "skipped.jsonl"

# What is tokenized to estimate the time, and the least text for which that is worth it.
_SAMPLE_BYTES, _SAMPLE_SECONDS, _ESTIMATED_BYTES = 1 << 20, 10.0, 64 << 20
# What systems answer where locks are not supported, as on Lustre mounted without flock.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
# A builder that was begun in time may end a little late.
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS, _PROGRESS_SECONDS, _REPORT_SECONDS = 0.2, 1.0, 10.0


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
    max_minutes: float | None = None,
) -> TokenStore:
    """Opens the store of a source; builds it, or waits for its builder, if it is not finished.

    Args:
        source: What to read.
        tokenizer: Turns its texts into tokens.
        cache_dir: Folder of all stores.
        shard_bytes: ``data.shard_bytes``.
        patience: Seconds to leave the building to another process before trying to be the builder.
        max_minutes: The longest build to begin, as far as it can be estimated; None for any.

    Raises:
        ConfigError: The stores would lie in the source's folder, or building would take too long.
        InputError: The input is missing, or a record of it cannot be read.
        StoreError: A finished store is damaged, or its input was edited since.
    """
    _check_apart(source, Path(cache_dir))
    recipe = {"format": FORMAT, "shard_bytes": shard_bytes, "tokenizer": tokenizer.identity, **source.recipe()}
    parent = Path(cache_dir) / source.name
    if (standing := _store_of_version(source, parent, fingerprint(recipe))) is not None:
        return TokenStore(standing)
    if source.has_files and not source.files:
        return TokenStore(_only_store(source, parent, fingerprint(recipe)))
    files_key = fingerprint([[file.name, file.bytes] for file in source.files])
    folder = parent / f"{fingerprint(recipe)}-{files_key}"
    tokens_root = None if source.in_place is None else source.in_place.root
    builder = _Builder(source, tokenizer, folder, recipe, shard_bytes, max_minutes)
    deadline = time.monotonic() + patience
    while not builder.is_finished() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if not builder.is_finished():
        _build_or_wait(builder)
    return TokenStore(folder, tokens_root)


def _check_apart(source: Input, cache_dir: Path) -> None:
    """A store in its source's folder would be taken for input at the next start."""
    root, cache = Path(source.path).resolve(), cache_dir.resolve()
    if not (source.has_files and root.is_dir() and cache.is_relative_to(root)):
        return
    # Names that are skipped when a folder is searched are harmless.
    if not any(part.startswith((".", "_")) for part in cache.relative_to(root).parts):
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


def _build_or_wait(builder: "_Builder") -> None:
    folder = builder.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Without the system's locks the library would take a file that is there for a lock: one that a killed
        # builder left would be waited for, for ever.
        lock = filelock.FileLock(folder / LOCK, fallback_to_soft=False)
        started = time.monotonic()
        reported = -_REPORT_SECONDS
        while not builder.is_finished():
            try:
                with lock.acquire(timeout=0):
                    if not builder.is_finished():  # another may have finished between the two looks
                        builder.build()
                return
            except filelock.Timeout:
                if time.monotonic() - reported >= _REPORT_SECONDS:
                    logger.info("source %r: waiting for its store, %s", builder.source.name, _progress_of(folder))
                    reported = time.monotonic()
                builder.check_wait(started)
                time.sleep(_POLL_SECONDS)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise StoreError(
                f"{folder}: this file system has no file locks ({error}), which building a store needs; set "
                "data.cache_dir to one that has, or prepare the store there and copy its folder here"
            ) from error
        if builder.is_closed():  # on a read-only disk, say: nothing has to be written to use it
            builder.build()
            return
        raise StoreError(
            f"{folder}: the store of source {builder.source.name!r} is not finished and cannot be built here ({error})"
            "; set data.cache_dir to a folder with room that can be written to"
        ) from error


@contextmanager
def store_locked(folder: Path) -> Iterator[None]:
    """Keeps builders out of a store.

    Raises:
        StoreError: A builder is in it.
    """
    try:
        with filelock.FileLock(folder / LOCK, fallback_to_soft=False).acquire(timeout=0):
            yield
    except filelock.Timeout:
        raise StoreError(f"{folder}: another process builds this store; try again when it is done") from None


def plan_json(files: list[FileRecord], units: Sequence[Sequence[tuple[int, int, int]]]) -> bytes:
    """The bytes of a plan: its files, and (file, start, stop) of the ranges of each unit."""
    content = {"files": [asdict(file) for file in files], "units": units}
    return (canonical_json(content) + "\n").encode("ascii")


def record_json(record: ShardRecord, last: bool) -> bytes:
    """The bytes of the mark of a finished shard."""
    return canonical_json({**record.to_dict(), "last": last}).encode("ascii")


def _progress_of(folder: Path) -> str:
    try:
        progress = json.loads((folder / PROGRESS).read_bytes())
        return (
            f"built by process {progress['pid']} on {progress['host']}: unit {progress['unit'] + 1:,} of "
            f"{progress['units']:,}, {progress['documents']:,} documents, {progress['tokens']:,} tokens"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "whose builder has not said yet how far it is"


class _Builder:
    """Builds one store; the caller holds the lock."""

    def __init__(
        self,
        source: Input,
        tokenizer: TextTokenizer,
        folder: Path,
        recipe: dict[str, Any],
        shard_bytes: int,
        max_minutes: float | None,
    ) -> None:
        self.source = source
        self.folder = folder
        self._tokenizer = tokenizer
        self._recipe = recipe
        in_place = source.in_place
        self._dtype = dtype_for(tokenizer.largest_id) if in_place is None else in_place.dtype
        self._max_minutes = max_minutes
        self._shard_bytes = shard_bytes_for(shard_bytes, sum(file.bytes for file in source.files))

    def is_closed(self) -> bool:
        """Whether the store has its manifest."""
        return os.path.exists(self.folder / MANIFEST)  # a folder that may not be entered is no store of ours

    def is_finished(self) -> bool:
        """Whether the store is closed and its input is what it was built from, going by the files' times."""
        if not self.is_closed():
            return False
        times = self._times(Manifest.read(self.folder).files)
        return times == self._times(self.source.files) or self._checked_marker().exists()

    def build(self) -> None:
        """Builds the store, goes on with one, or checks a finished one whose input has other times."""
        if self.is_closed():
            self._check_content()
            return
        started = time.monotonic()
        self._remove_leftovers()
        units = self._plan()
        self._announce(units)
        sizes = [sum(self.source.num_bytes(piece) for piece in unit) for unit in units]
        records: list[ShardRecord] = []
        with closing(_Progress(self.source.name, self.folder, sizes)) as progress:
            for number, unit in enumerate(units):
                for record in self._unit(number, unit, progress):
                    records.append(record)
                    if not sum(sizes):
                        self._check_time(started)
                progress.end_unit()
        in_place = self.source.in_place is not None
        manifest = Manifest(self._recipe, self._dtype.str, self.source.files, records, in_place)
        if manifest.skipped:
            self._list_skipped(manifest)
        write_atomic(self.folder / MANIFEST, manifest.to_json())
        shutil.rmtree(self.folder / UNITS, ignore_errors=True)
        (self.folder / PROGRESS).unlink(missing_ok=True)
        logger.info(
            "source %r: %s documents, %s tokens in %s shards, built in %.0f s: %s",
            self.source.name,
            f"{manifest.documents:,}",
            f"{manifest.tokens:,}",
            f"{len(records):,}",
            time.monotonic() - started,
            self.folder,
        )
        if manifest.skipped:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in manifest.skipped.items())
            total, path = sum(manifest.skipped.values()), self.folder / SKIPPED
            logger.warning(
                "source %r: skipped %s records (%s), listed in %s", self.source.name, f"{total:,}", reasons, path
            )

    def _plan(self) -> list[list[InputRange]]:
        """The units: those of the plan that is there, or new ones."""
        path = self.folder / PLAN
        files = [asdict(file) for file in self.source.files]
        (self.folder / UNITS).mkdir(exist_ok=True)
        try:
            plan = json.loads(path.read_bytes())
            if plan["files"] == files:
                return [[InputRange(*piece) for piece in unit] for unit in plan["units"]]
            logger.info("source %r: its files changed since the build began, which starts anew", self.source.name)
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            logger.warning("source %r: %s is damaged; the build starts anew", self.source.name, path)
        units = self.source.units(self._shard_bytes)
        # The records before the shards, so that none ever stands for a shard that is gone.
        for old in [*(self.folder / UNITS).iterdir(), *self.folder.glob("[0-9]*-*.*"), *self.folder.glob(SKIPPED)]:
            old.unlink()
        write_atomic(path, plan_json(self.source.files, [[(p.file, p.start, p.stop) for p in unit] for unit in units]))
        return units

    def _announce(self, units: list[list[InputRange]]) -> None:
        """Says what is to be done and about how long it takes; refuses where that is too long."""
        todo = [unit for number, unit in enumerate(units) if not self._is_done(number)]
        size = sum(self.source.num_bytes(piece) for unit in todo for piece in unit)
        minutes = self._minutes_for(todo, size) if size >= _ESTIMATED_BYTES else 0.0
        name = self.source.name
        if todo and not size:
            limit = "" if self._max_minutes is None else f"; stops after {self._max_minutes:g} minutes if not done then"
            logger.info("source %r: tokenizing an unknown amount of text%s", name, limit)
        else:
            about = f", about {minutes:,.1f} minutes" if minutes else ""
            counts = f"{len(todo):,} of {len(units):,}"
            logger.info("source %r: tokenizing %s units (%s MB)%s", name, counts, f"{size / 1e6:,.1f}", about)
        if self._max_minutes is not None and minutes > self._max_minutes:
            raise ConfigError(
                f"source {name!r}: tokenizing {size / 1e6:,.0f} MB would take about {minutes:,.1f} minutes here, above "
                f"data.max_build_minutes = {self._max_minutes:g}, while all ranks wait. {self.advice()}"
            )

    def _is_done(self, number: int) -> bool:
        part = 0
        while (done := self._finished_shard(number, part)) is not None:
            if done[1]:
                return True
            part += 1
        return False

    def _minutes_for(self, units: list[list[InputRange]], size: int) -> float:
        """About how long ``size`` bytes of input take, from the first documents of some units."""
        started = time.monotonic()
        sampled = 0
        for unit in units:
            piece, piece_size = self.source.sample(unit, _SAMPLE_BYTES)
            sampled_texts = 0
            for batch in encoded_batches(piece, self._tokenizer):
                sampled_texts += batch.text_bytes
                if time.monotonic() - started > _SAMPLE_SECONDS:  # a large row group; its texts will do
                    piece_size = sampled_texts
                    break
            sampled += piece_size
            if sampled >= _SAMPLE_BYTES or time.monotonic() - started > _SAMPLE_SECONDS:
                break
        return (time.monotonic() - started) / max(sampled, 1) * size / 60

    def check_wait(self, started: float) -> None:
        """Ends the waiting for another builder when it takes too long."""
        if self._max_minutes is not None and time.monotonic() - started > 60 * self._max_minutes + _PATIENCE_SECONDS:
            raise ConfigError(
                f"source {self.source.name!r}: its store is not finished after waiting for data.max_build_minutes = "
                f"{self._max_minutes:g} ({_progress_of(self.folder)}); start again when it is, or raise the setting"
            )

    def _check_time(self, started: float) -> None:
        """Ends a build whose size was not known, so that it could not be estimated, when it takes too long."""
        minutes = (time.monotonic() - started) / 60
        if self._max_minutes is not None and minutes > self._max_minutes:
            raise ConfigError(
                f"source {self.source.name!r}: tokenizing is not done after data.max_build_minutes = "
                f"{self._max_minutes:g}; what is done is kept, and the next start goes on from there. {self.advice()}"
            )

    def advice(self) -> str:
        arguments = self.source.prepare_arguments()
        if arguments is None:
            return "Start once with NGPU=1 and a larger data.max_build_minutes"
        arguments += ["--tokenizer", str(self._tokenizer.folder.absolute())]
        for option, value in (("add-bos", self._tokenizer.add_bos), ("add-eos", self._tokenizer.add_eos)):
            arguments += [] if value is None else [f"--{option}" if value else f"--no-{option}"]
        arguments += ["--cache-dir", str(self.folder.parent.parent.absolute())]
        arguments += ["--shard-bytes", str(self._recipe["shard_bytes"])]
        command = shlex.join([sys.executable, "-m", "zephon_patches.cli", "prepare", *arguments])
        return f"Do it ahead of time, once, on any machine that has the data: {command}"

    def _unit(self, number: int, unit: list[InputRange], progress: "_Progress") -> Iterator[ShardRecord]:
        """The shards of a unit: those that are finished, then the rest."""
        part, skip = 0, 0
        while (done := self._finished_shard(number, part)) is not None:
            record, last = done
            progress.skip(record)
            yield record
            part, skip = part + 1, skip + sum(piece.records for piece in record.ranges)
            if last:
                return
        for piece in self.source.pieces(unit, self._shard_bytes, skip):
            record = self._shard(f"{number:06d}-{part:03d}", piece, progress)
            if piece.skipped:  # before the record that says the shard is finished
                lines = [json.dumps(entry) + "\n" for entry in piece.skipped]
                write_atomic(self._skipped_path(record), "".join(lines).encode("ascii"))
            write_atomic(self._record_path(number, part), record_json(record, piece.last))
            yield record
            part += 1

    def _finished_shard(self, number: int, part: int) -> tuple[ShardRecord, bool] | None:
        """A shard that was finished before, and whether it is its unit's last."""
        try:
            content = json.loads(self._record_path(number, part).read_bytes())
            last = content.pop("last")
            record = shard_record(content)
            kind = "bin" if self.source.in_place is None else "idx"
            size = (self.folder / f"{record.name}.{kind}").stat().st_size
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return None  # lost or damaged is as good as not there
        if record.skipped and not self._skipped_path(record).exists():
            return None
        whole = record.tokens * self._dtype.itemsize if kind == "bin" else index_bytes(record.documents)
        return (record, last) if size == whole else None

    def _shard(self, name: str, piece: Piece, progress: "_Progress") -> ShardRecord:
        with ShardWriter(self.folder, name, self._dtype, in_place=self.source.in_place is not None) as writer:
            for batch in encoded_batches(piece, self._tokenizer):
                writer.add(batch.tokens, batch.lengths, batch.origins)
                progress.add(len(batch.lengths), batch.text_bytes, len(batch.tokens))
            return writer.finish(piece.ranges, dict(Counter(reason for _, _, reason in piece.skipped)))

    def _record_path(self, number: int, part: int) -> Path:
        return self.folder / UNITS / f"{number:06d}-{part:03d}.json"

    def _skipped_path(self, record: ShardRecord) -> Path:
        return self.folder / UNITS / f"{record.name}.skipped"

    def _list_skipped(self, manifest: Manifest) -> None:
        """Puts the shards' lists into one, with names of files and numbers of records in them."""
        before: Counter[int] = Counter()  # records of a file in the shards so far
        with atomic_file(self.folder / SKIPPED) as out:
            for shard in manifest.shards:
                if shard.skipped:
                    for line in self._skipped_path(shard).read_bytes().splitlines():
                        file, record, reason = json.loads(line)
                        name = manifest.files[file].name
                        entry = {"file": name, "record": before[file] + record, "reason": reason}
                        out.write((json.dumps(entry) + "\n").encode("ascii"))
                for piece in shard.ranges:
                    before[piece.file] += piece.records

    def _remove_leftovers(self) -> None:
        """Temporary files of builders that died; the lock says that none is at work."""
        for path in [*self.folder.glob(f".*{TEMPORARY_SUFFIX}"), *(self.folder / UNITS).glob(f".*{TEMPORARY_SUFFIX}")]:
            path.unlink(missing_ok=True)

    # --- a finished store whose input has other times ---

    @staticmethod
    def _times(files: list[FileRecord]) -> list[list[Any]]:
        return [[file.name, file.mtime_ns] for file in files]

    def _checked_marker(self) -> Path:
        """Exists where files with these times were found to have the right content."""
        return self.folder / f"checked-{fingerprint(self._times(self.source.files))}"

    def _check_content(self) -> None:
        manifest = Manifest.read(self.folder)
        logger.info("source %r: its files have other times than when they were read; comparing", self.source.name)
        changed = self.source.check_content(piece for shard in manifest.shards for piece in shard.ranges)
        if changed is not None:
            raise StoreError(
                f"{changed}: edited since the store {self.folder} was built from it (same size, other content); bring "
                f"the old file back, or remove {self.folder} to build the store anew"
            )
        try:
            write_atomic(self._checked_marker(), b"")
        except OSError:
            logger.info("source %r: unchanged, but %s cannot be written to keep that", self.source.name, self.folder)


class _Progress:
    """Says how far a build is: a bar on a terminal, log lines elsewhere, and a file for those who wait.

    How far is counted in bytes of input. Inside a unit only its texts can be measured, and they may be shorter
    than the input (JSON) or longer (parquet is compressed): the units finished so far tell by how much.
    """

    def __init__(self, name: str, folder: Path, sizes: Sequence[int]) -> None:
        self._name = name
        self._path = folder / PROGRESS
        self._sizes = sizes  # bytes of each unit
        self._total = sum(sizes)
        self._unit = 0
        self._documents = self._tokens = 0
        self._new_tokens = 0  # of this run; the others were finished before
        self._position = self._new_bytes = 0  # of finished units
        self._texts = self._texts_in_unit = 0
        self._started = time.monotonic()
        self._written = self._logged = float("-inf")
        self._bar = tqdm(
            desc=f"tokenize {name}",
            total=self._total or None,
            unit="B",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
            leave=False,
        )
        self._write()

    def skip(self, record: ShardRecord) -> None:
        """A shard that was finished before."""
        self._documents += record.documents
        self._tokens += record.tokens

    def add(self, documents: int, text_bytes: int, tokens: int) -> None:
        """Documents that are tokenized."""
        self._documents += documents
        self._tokens += tokens
        self._new_tokens += tokens
        self._texts_in_unit += text_bytes
        self._bar.update(self._position + self._inside() - self._bar.n)
        now = time.monotonic()
        if now - self._written >= _PROGRESS_SECONDS:
            self._write()
            rate = self._new_tokens / max(now - self._started, 1e-9)
            self._bar.set_postfix_str(f"{self._documents:,} documents, {self._tokens:,} tokens, {rate:,.0f} tokens/s")
            if self._bar.disable and now - self._logged >= _REPORT_SECONDS:
                self._logged = now
                self._log(rate, now)

    def end_unit(self) -> None:
        size = self._sizes[self._unit]
        self._unit += 1
        self._position += size
        if self._texts_in_unit:
            self._new_bytes += size
            self._texts += self._texts_in_unit
            self._texts_in_unit = 0
            self._bar.update(self._position - self._bar.n)
        elif not self._bar.disable:  # finished before: it says nothing about the speed
            self._bar.initial += size
            self._bar.n += size

    def close(self) -> None:
        self._bar.close()

    def _inside(self) -> int:
        """Bytes of the present unit that are done, estimated."""
        ratio = self._new_bytes / self._texts if self._texts else 1.0
        return min(int(self._texts_in_unit * ratio), self._sizes[self._unit])

    def _log(self, rate: float, now: float) -> None:
        left = ""
        done = self._new_bytes + self._inside()
        if self._total and done:
            seconds = (now - self._started) * (self._total - self._position - self._inside()) / done
            left = f", about {seconds:,.0f} s left"
        logger.info(
            "source %r: tokenizing, unit %s of %s, %s documents, %s tokens, %s tokens/s%s",
            self._name,
            f"{self._unit + 1:,}",
            f"{len(self._sizes):,}",
            f"{self._documents:,}",
            f"{self._tokens:,}",
            f"{rate:,.0f}",
            left,
        )

    def _write(self) -> None:
        self._written = time.monotonic()
        content = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "unit": self._unit,
            "units": len(self._sizes),
            "documents": self._documents,
            "tokens": self._tokens,
        }
        temporary = self._path.with_name(f".{PROGRESS}.{os.getpid()}{TEMPORARY_SUFFIX}")
        temporary.write_text(json.dumps(content))
        os.replace(temporary, self._path)
