"""The folder of a store while it is built: the plan, the marks of finished shards, and who is at work.

Any number of builders work in it, on any machines that share the file system. What keeps them apart are locks that
the system frees when their holder dies:

- ``plan.lock``: making or replacing the plan, closing the store, coming and the clean-up at going. Held for moments.
- ``units/UNIT.lock``: the files of one unit. Held while the unit is built.
- ``units/NAME.builder``: says that a builder is at work. It comes under the plan's lock and holds its own file until it
  goes. As long as one does, the plan is not replaced, no lock file is deleted and no repair begins, so two never hold
  "the" lock of a unit by two files of the same name. The last one to leave a closed store removes ``units/``.
"""

import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from zephon_patches.errors import StoreError
from zephon_patches.keys import canonical_json, fingerprint
from zephon_patches.prepare.exactness import is_distrusted
from zephon_patches.prepare.shards import SKIPPED, Skipped
from zephon_patches.store.atomic import TEMPORARY_SUFFIX, write_atomic
from zephon_patches.store.indexed import index_bytes
from zephon_patches.store.manifest import MANIFEST, FileRecord, InputRange, ShardRecord, shard_record

__all__ = ["PLAN", "UNITS", "Unfinished", "Unit", "file_lock", "held", "store_locked", "taken"]

PLAN, UNITS, PLAN_LOCK = "plan.json", "units", "plan.lock"

# To remove what is left of a finished build; it does no harm if that is not done.
_TIDY_SECONDS = 5.0

_TEMPORARY = re.compile(rf"\.(\d{{6,}})-.*{re.escape(TEMPORARY_SUFFIX)}")

Unit = list[InputRange]
"""The input of one unit of work"""


def file_lock(path: Path) -> filelock.BaseFileLock:
    """A lock that the system frees when its holder dies."""
    # Without the system's locks the library would take a file that is there for a lock: one that a killed
    # builder left would be waited for, for ever.
    return filelock.FileLock(path, fallback_to_soft=False)


def taken(lock: filelock.BaseFileLock, timeout: float = 0.0) -> bool:
    """Takes a lock, if it can be had in time."""
    try:
        lock.acquire(timeout=timeout)
    except filelock.Timeout:
        return False
    return True


@contextmanager
def held(lock: filelock.BaseFileLock, timeout: float = 0.0) -> Iterator[bool]:
    """Holds a lock during the block, if it can be had in time; says whether it does."""
    if not taken(lock, timeout):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


@contextmanager
def store_locked(folder: Path) -> Iterator[None]:
    """Keeps builders out of a store.

    Raises:
        StoreError: A builder is in it.
    """
    store = Unfinished(folder)
    with held(store.plan_lock()) as locked:
        if not locked or store.is_in_use():
            raise StoreError(f"{folder}: another process builds this store; try again when it is done")
        yield


def sealed(content: dict[str, Any]) -> bytes:
    """Plain data with a hash of it, by which damage is noticed."""
    return (canonical_json({**content, "hash": fingerprint(content)}) + "\n").encode("ascii")


def unsealed(data: bytes) -> dict[str, Any]:
    """What was sealed.

    Raises:
        ValueError: It is damaged.
    """
    try:
        content = json.loads(data)
        if isinstance(content, dict) and content.pop("hash", None) == fingerprint(content):
            return content
    except RecursionError:
        pass
    raise ValueError("damaged: its hash does not match")


class Unfinished:
    """A store's folder, as builders see it.

    Args:
        folder: Of the store.
        dtype: Of its tokens; only what asks for shards needs it.
        in_place: Whether its tokens lie in the source's own files, so that shards have no ``.bin``.
        exact: Whether shards do not count that were compared with the reference engine by a sample alone.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype | None = None, in_place: bool = False, exact: bool = False
    ) -> None:
        self.folder = folder
        self._units = folder / UNITS
        self._dtype = dtype
        self._kind = "idx" if in_place else "bin"
        self._exact = exact

    def is_closed(self) -> bool:
        """Whether the store has its manifest."""
        return os.path.exists(self.folder / MANIFEST)  # a folder that may not be entered is no store of ours

    # --- the plan; changed under its lock alone ---

    def plan_lock(self) -> filelock.BaseFileLock:
        return file_lock(self.folder / PLAN_LOCK)

    def plan(self, files: list[FileRecord]) -> list[Unit] | None:
        """The units of the plan that is there; None if it is one of other files or times.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is damaged.
        """
        try:
            content = unsealed((self.folder / PLAN).read_bytes())
            if content["files"] != [asdict(file) for file in files]:
                return None
            return [[InputRange(*piece) for piece in unit] for unit in content["units"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"no plan: {error!r}") from error

    def replace_plan(self, files: list[FileRecord], units: list[Unit]) -> None:
        """Writes a plan, and removes what was built by another; the caller holds the lock, and nobody is at work."""
        self._units.mkdir(exist_ok=True)
        self.forget_all()
        # The records went before the shards, so that none ever stands for a shard that is gone.
        for old in [*self.folder.glob("[0-9]*-*.*"), *self.folder.glob(SKIPPED)]:
            old.unlink()
        ranges = [[(piece.file, piece.start, piece.stop) for piece in unit] for unit in units]
        write_atomic(self.folder / PLAN, sealed({"files": [asdict(file) for file in files], "units": ranges}))

    # --- who is at work ---

    def is_in_use(self) -> bool:
        """Whether a builder is at work; the caller holds the plan's lock. Removes the files of dead ones."""
        for path in self._units.glob("*.builder"):
            with held(file_lock(path)) as dead:
                if not dead:
                    return True
                path.unlink(missing_ok=True)
        return False

    def join(self) -> filelock.BaseFileLock:
        """Comes to work: returns what ``leave`` wants back; the caller holds the plan's lock."""
        self._units.mkdir(exist_ok=True)
        host = re.sub(r"[^0-9A-Za-z-]", "_", socket.gethostname())
        lock = file_lock(self._units / f"{host}-{os.getpid()}-{secrets.token_hex(4)}.builder")
        lock.acquire(timeout=0)
        return lock

    def leave(self, lock: filelock.BaseFileLock) -> None:
        """Goes from work."""
        with suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()
        self.tidy(_TIDY_SECONDS)

    def tidy(self, timeout: float = 0.0) -> None:
        """Removes what builders left in a closed store, if none is at work and the folder can be written to."""
        if not (self.is_closed() and self._units.exists()):
            return
        with suppress(OSError), held(self.plan_lock(), timeout) as locked:
            if locked and self.is_closed() and not self.is_in_use():
                self.remove_temporary()
                shutil.rmtree(self._units, ignore_errors=True)

    def seat(self) -> filelock.BaseFileLock:
        """The lock of this machine's one builder in a training start; for who is at work."""
        host = re.sub(r"[^0-9A-Za-z-]", "_", socket.gethostname())
        return file_lock(self._units / f"machine-{host}.lock")

    # --- units; changed under their locks alone, by who is at work ---

    def unit_lock(self, number: int) -> filelock.BaseFileLock:
        return file_lock(self._units / f"{number:06d}.lock")

    def shards(self, number: int) -> tuple[list[ShardRecord], bool]:
        """The finished shards of a unit, up to the first that is missing, and whether they are the whole unit."""
        records: list[ShardRecord] = []
        while (found := self._shard(number, len(records))) is not None:
            records.append(found[0])
            if found[1]:
                return records, True
        return records, False

    def _shard(self, number: int, part: int) -> tuple[ShardRecord, bool] | None:
        """A finished shard, and whether it is its unit's last."""
        assert self._dtype is not None
        try:
            record, last = self._read_record(self._record_path(f"{number:06d}-{part:03d}"))
            size = (self.folder / f"{record.name}.{self._kind}").stat().st_size
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # lost or damaged is as good as not there
        if record.skipped and not self.skipped_path(record.name).exists():
            return None
        if record.mask and not (self.folder / f"{record.name}.mask").exists():
            return None
        whole = record.tokens * self._dtype.itemsize if self._kind == "bin" else index_bytes(record.documents)
        return (record, last) if size == whole else None

    def has(self, number: int, part: int) -> bool:
        """Whether a shard is finished."""
        return self._shard(number, part) is not None

    def temporary(self) -> dict[int, list[Path]]:
        """The temporary files of each unit that has some: of builders at work, and of dead ones."""
        found: dict[int, list[Path]] = {}
        for folder in (self.folder, self._units):
            for name in os.listdir(folder):
                if match := _TEMPORARY.fullmatch(name):
                    found.setdefault(int(match.group(1)), []).append(folder / name)
        return found

    def mark(self, record: ShardRecord, last: bool, skipped: Sequence[Skipped] = (), proven: bool = True) -> None:
        """Marks a shard as finished; ``proven`` as in ``Encoder``, of the one who made it."""
        if skipped:  # before the record that says so
            lines = [json.dumps(entry) + "\n" for entry in skipped]
            write_atomic(self.skipped_path(record.name), "".join(lines).encode("ascii"))
        content = {**record.to_dict(), "last": last, "proven": proven}
        write_atomic(self._record_path(record.name), sealed(content))

    def skipped_path(self, name: str) -> Path:
        """The list of the records that were left out of a shard: a line of JSON for each."""
        return self._units / f"{name}.skipped"

    def forget_all(self) -> None:
        """Removes all marks; the caller holds the plan's lock, and nobody is at work."""
        for path in [*self._units.glob("*.json"), *self._units.glob("*.skipped")]:
            path.unlink()
        self.remove_temporary()

    def remove_temporary(self) -> None:
        """Temporary files of dead builders; the caller holds the plan's lock, and nobody writes a shard."""
        for folder in (self.folder, self._units):
            for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
                path.unlink(missing_ok=True)

    def records(self, known: set[str]) -> Iterator[tuple[int, ShardRecord, bool]]:
        """(unit, record, whether it is the unit's last) of the shards that were finished since the last look.

        Args:
            known: The names of those that were given before; those that are given now are added.
        """
        with suppress(OSError):
            for name in sorted(os.listdir(self._units)):
                if name.endswith(".json") and not name.startswith(".") and name not in known:
                    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                        record, last = self._read_record(self._units / name)
                        known.add(name)
                        yield int(name.partition("-")[0]), record, last

    def _read_record(self, path: Path) -> tuple[ShardRecord, bool]:
        """A shard's record, and whether the shard is its unit's last.

        Raises:
            FileNotFoundError, ValueError, KeyError, TypeError, AttributeError: There is none that counts.
        """
        content = unsealed(path.read_bytes())
        last = content.pop("last")
        if not content.pop("proven") and (self._exact or is_distrusted(self.folder)):
            raise ValueError("what a fast engine made does not count here")
        record = shard_record(content)
        if path.name != f"{record.name}.json":
            raise ValueError(f"the record of {record.name}")
        return record, last

    def _record_path(self, name: str) -> Path:
        return self._units / f"{name}.json"
