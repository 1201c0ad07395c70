"""A data set of the Hugging Face hub by its name: ``hf://allenai/c4``.

``datasets.load_dataset`` downloads it and writes Arrow files into a cache of its own; those are read as any ``.arrow``
files are. It is asked for one commit, so the files are those of a revision and nothing newer. Their names in a store
are ``COMMIT/FILE``: nothing of the machine is in them, and a revision that moved gives another store.

A finished store of the commit is found without the files, so a node that trains from it downloads nothing. Without a
network the commit is the one that the revision had when the hub was last asked, as its cache remembers.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from zephon_patches.config import HUB, SourceConfig
from zephon_patches.prepare.shards import FileInput, FoundFiles, InPlace, Piece, file_record
from zephon_patches.store.manifest import FileRecord, InputRange

__all__ = ["HubInput"]

logger = logging.getLogger(__name__)

_COMMIT_DIGITS = 40
_TIMEOUT_SECONDS = 30.0


class HubInput:
    """One split of a data set of the hub. Nothing is loaded before its files are asked for.

    Args:
        source: Its path is ``hf://NAME`` or ``hf://ORGANISATION/NAME``.
    """

    def __init__(self, source: SourceConfig) -> None:
        self.name = source.name
        self.path = source.path
        self.has_files = True
        self.in_place: InPlace | None = None
        self._source = source
        self._name = source.path.removeprefix(HUB)
        self._settings = FileInput(source, (Path(), []))
        self.add_bos, self.add_eos = self._settings.add_bos, self._settings.add_eos
        self._faults: list[str] = []  # why the hub, or the data set, could not be had

    @cached_property
    def version(self) -> str | None:
        """The commit that is read; None if neither the hub nor its cache says."""
        revision = self._source.revision or "main"
        if len(revision) == _COMMIT_DIGITS and set(revision) <= set("0123456789abcdef"):
            return revision
        import huggingface_hub
        from huggingface_hub.constants import HF_HUB_CACHE
        from huggingface_hub.file_download import repo_folder_name

        try:
            found = huggingface_hub.HfApi().dataset_info(self._name, revision=revision, timeout=_TIMEOUT_SECONDS)
            logger.info("source %r: %s, revision %s is commit %s", self.name, self.path, revision, found.sha)
            return str(found.sha)
        except Exception as error:  # of the library, of its HTTP client, of the system: whatever keeps it from the hub
            self._faults.append(f"the hub cannot be asked ({_first_line(error)})")
        known = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=self._name, repo_type="dataset") / "refs" / revision
        try:
            commit = known.read_text().strip()
        except OSError:
            return None
        logger.warning(
            "source %r: %s; going on with commit %s, which revision %s of %s had when it was last asked",
            self.name,
            self._faults[-1],
            commit,
            revision,
            self.path,
        )
        return commit

    @property
    def files(self) -> list[FileRecord]:
        """The files of the split; none if it can be had neither from the hub nor from the cache of ``datasets``."""
        return self._files.files

    @cached_property
    def _files(self) -> FileInput:
        found = self._load()
        return self._settings if found is None else FileInput(self._source, found)

    def _load(self) -> FoundFiles | None:
        commit = self.version
        if Path(self._name).exists():
            self._faults.append(f"{Path(self._name).absolute()} is there, and `datasets` would load that instead")
            return None
        source = self._source
        if commit is None and source.revision:
            self._faults.append(f"nothing here says which commit revision {source.revision} is")
            return None
        import datasets
        import huggingface_hub

        # Leaves a note in the hub's cache which commit the revision is; `datasets` is asked for the commit, and keeps
        # none. The file need not be there.
        if not self._faults:
            with contextlib.suppress(Exception):
                revision = source.revision or None
                huggingface_hub.hf_hub_download(self._name, "README.md", repo_type="dataset", revision=revision)
        logger.info("source %r: loading split %s of %s", self.name, source.split or "train", self.path)
        try:
            loaded = datasets.load_dataset(
                self._name,
                source.subset or None,
                split=source.split or "train",
                revision=commit,
                keep_in_memory=False,
            )
            paths = sorted({Path(entry["filename"]) for entry in loaded.cache_files})
        except Exception as error:  # as above, and of every reader of files
            self._faults.append(f"`datasets` cannot load it ({_first_line(error)})")
            return None
        if not paths:
            self._faults.append(f"split {source.split or 'train'} is empty")
            return None
        folder = paths[0].parent
        # Where the hub cannot be reached, `datasets` takes what it loaded last, whatever the revision.
        if commit is not None and folder.name != commit:
            self._faults.append(f"`datasets` has commit {folder.name} in its cache, and not {commit}")
            return None
        logger.info("source %r: commit %s of %s, from %s", self.name, folder.name, self.path, folder)
        return folder.parent, [file_record(folder.parent, f"{folder.name}/{path.name}") for path in paths]

    def missing(self) -> tuple[str, str]:
        what = "; ".join(self._faults)
        return f"{self.path} cannot be had: {what}", (
            "correct path, subset, split and revision; or reach the hub once (HF_TOKEN for private data), on any "
            "machine, with zephon-data prepare, and bring the store or the caches (HF_HOME) here"
        )

    def recipe(self) -> dict[str, Any]:
        source = self._source
        return {**self._settings.recipe(), "hub": [self._name, source.subset, source.split, source.revision]}

    def units(self, shard_bytes: int) -> list[list[InputRange]]:
        return self._files.units(shard_bytes)

    def pieces(self, unit: Sequence[InputRange], shard_bytes: int, skip_records: int) -> Iterator[Piece]:
        return self._files.pieces(unit, shard_bytes, skip_records)

    def num_bytes(self, piece: InputRange) -> int:
        return self._files.num_bytes(piece)

    def sample(self, unit: Sequence[InputRange], room: int) -> tuple[Piece, int]:
        return self._files.sample(unit, room)

    def prepare_arguments(self) -> list[str] | None:
        arguments = ["--source", f"{self.name}={self.path}", *self._settings.prepare_options]
        for key in ("subset", "split", "revision"):
            value = getattr(self._source, key)
            arguments += [f"--{key}", value] if value else []
        return arguments

    def check_content(self, ranges: Iterable[InputRange]) -> str | None:
        return self._files.check_content(ranges)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
