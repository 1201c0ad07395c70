"""The list of a store's plans: what opening needs to know of them, in one small file beside them.

``best_fit-2048.json``, canonical JSON::

    format           1
    packing, seq_len
    data             fingerprint of the store's data, as the manifest has it
    samples, labels, left_out
                     for each shard: its samples, the labels in them that count, the documents without a label
    plans            for each shard: the checksum that stands in its plan
    hash             over all of that

A source of 10,000 shards has plans of many GB; to read them all at a start would take as long as to make them. The
list closes them as the manifest closes a store: it is written when all are there. A plan is opened and checked when its
shard is first read.
"""

import json
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from zephon_patches.errors import StoreError
from zephon_patches.keys import canonical_json, fingerprint
from zephon_patches.samples.pieces import Plan
from zephon_patches.samples.plan_file import PLANNERS, ensure_plan, lengths_of, open_plan, plan_checksum, plan_path
from zephon_patches.store.atomic import write_atomic
from zephon_patches.store.content import read_whole
from zephon_patches.store.manifest import Manifest
from zephon_patches.store.reader import TokenStore, open_mask

__all__ = ["PlanEntry", "PlanList", "damaged_plans", "entry_of", "list_path", "plan_of", "read_list", "write_list"]

_FORMAT = 1
_MAX_COUNT = 2**60


class PlanEntry(NamedTuple):
    """What the list has of one shard's plan."""

    samples: int
    labels: int
    left_out: int
    checksum: str
    """XXH3-64 in hexadecimal"""


class PlanList(NamedTuple):
    """What is known of all plans of a store without opening one."""

    packing: str
    seq_len: int
    samples: np.ndarray
    """int64, shape ``(shards,)``"""
    labels: np.ndarray
    """int64, shape ``(shards,)``: those that count"""
    left_out: np.ndarray
    """int64, shape ``(shards,)``: documents without a label, which are in no sample"""
    checksums: list[str]

    @property
    def fill(self) -> float:
        """Labels that count by places of all samples, 0 to 1."""
        return float(self.labels.sum()) / max(int(self.samples.sum()) * self.seq_len, 1)

    @property
    def fingerprint(self) -> str:
        """Stands for which tokens make which sample."""
        return fingerprint(self.checksums)


def list_path(folder: Path, packing: str, seq_len: int) -> Path:
    """Where the list is."""
    return folder / f"{packing}-{seq_len}.json"


def entry_of(folder: Path, store: TokenStore, shard: int, packing: str, seq_len: int) -> PlanEntry:
    """Makes a shard's plan, unless a good one is there, and says what the list has of it.

    Errors as ``ensure_plan``.
    """
    record = store.record(shard)
    plan = ensure_plan(folder, record, packing, seq_len)
    checksum = plan_checksum(plan_path(folder, record, packing, seq_len))
    return PlanEntry(plan.num_samples, plan.num_labels, plan.left_out, checksum)


def write_list(folder: Path, data: str, packing: str, seq_len: int, entries: list[PlanEntry]) -> None:
    """Writes the list of plans that are all there.

    Args:
        data: Fingerprint of the store's data.
        entries: One for each shard.
    """
    content = {
        "format": _FORMAT,
        "packing": packing,
        "seq_len": seq_len,
        "data": data,
        "samples": [entry.samples for entry in entries],
        "labels": [entry.labels for entry in entries],
        "left_out": [entry.left_out for entry in entries],
        "plans": [entry.checksum for entry in entries],
    }
    content["hash"] = fingerprint(content)
    write_atomic(list_path(folder, packing, seq_len), (canonical_json(content) + "\n").encode("ascii"))


class PlannedStore(Protocol):
    """What the list of a store's plans is compared with."""

    folder: Path
    tokens_per_shard: np.ndarray

    @property
    def data_fingerprint(self) -> str: ...


def read_list(store: PlannedStore, packing: str, seq_len: int) -> PlanList:
    """Reads the list of a store's plans.

    Raises:
        StoreError: There is none that is whole and of this data.
    """
    path = list_path(store.folder, packing, seq_len)
    try:
        content = json.loads(read_whole(path))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: damaged, not JSON ({error})") from None
    try:
        written = content.pop("hash")
        if written != fingerprint(content):
            raise StoreError(f"{path}: damaged, its hash does not match")
        found = [content["format"], content["packing"], content["seq_len"], content["data"]]
        expected = [_FORMAT, packing, seq_len, store.data_fingerprint]
        if canonical_json(found) != canonical_json(expected):  # to Python true and 1.0 are 1
            raise StoreError(f"{path}: is a list of (format, packing, seq_len, data) {found}, expected {expected}")
        shards = len(store.tokens_per_shard)
        samples, labels, left_out = (_counts(content[key], shards) for key in ("samples", "labels", "left_out"))
        plans = content["plans"]
        if not isinstance(plans, list) or len(plans) != shards or not all(type(plan) is str for plan in plans):
            raise ValueError("plans")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path}: not what this version writes ({error!r})") from None
    return PlanList(packing, seq_len, samples, labels, left_out, plans)


def plan_of(store: TokenStore, shard: int, plans: PlanList) -> Plan:
    """Opens the plan of a shard; makes it again if it is lost or damaged.

    Raises:
        StoreError: It cannot be made again here, or is then another one than the list has.
    """
    record = store.record(shard)
    path = plan_path(store.folder, record, plans.packing, plans.seq_len)
    try:
        plan = ensure_plan(store.folder, record, plans.packing, plans.seq_len)
        checksum = plan_checksum(path)
    except OSError as error:
        raise StoreError(
            f"{path}: is lost or damaged, and cannot be made again here ({error.strerror or error}); make the store's "
            "folder one that can be written to, or copy the plan to it"
        ) from error
    if (checksum, plan.num_samples) != (plans.checksums[shard], int(plans.samples[shard])):
        listed = list_path(store.folder, plans.packing, plans.seq_len)
        raise StoreError(
            f"{path}: has {plan.num_samples:,} samples and the checksum {checksum}, but {listed.name} has "
            f"{plans.samples[shard]:,} and {plans.checksums[shard]}: another version wrote one of them; remove "
            f"{listed} and all plans beside it, and start again"
        )
    return plan


def damaged_plans(folder: Path) -> list[tuple[Path, str]]:
    """Compares all plans of a store, and their lists, with what its indexes give; writes nothing.

    Returns:
        The damaged files and what is wrong in each.

    Raises:
        StoreError: There is no finished store, or an index of it cannot be used.
    """
    store, damages = TokenStore(folder), []
    for packing in PLANNERS:
        for path in sorted(folder.glob(f"{packing}-*.json")):
            try:
                read_list(store, packing, _seq_len(path.stem))
            except StoreError as error:
                damages.append((path, str(error).removeprefix(f"{path}: ")))
    for shard in Manifest.read(folder).shards:
        for packing, planner in PLANNERS.items():
            for path in sorted(folder.glob(f"{shard.name}.{packing}-*")):
                try:
                    seq_len = _seq_len(path.name)
                    plan = open_plan(folder, shard, packing, seq_len)
                except StoreError as error:
                    damages.append((path, str(error).removeprefix(f"{path}: ")))
                    continue
                expected = planner(lengths_of(folder, shard), seq_len, open_mask(folder, shard) if shard.mask else None)
                if not _are_equal(plan, expected):
                    damages.append((path, "is not the plan that this version makes of the shard"))
    return damages


def _are_equal(plan: Plan, other: Plan) -> bool:
    arrays = np.array_equal(plan.starts, other.starts) and np.array_equal(plan.pieces, other.pieces)
    return arrays and plan.left_out == other.left_out


def _seq_len(name: str) -> int:
    digits = name.rpartition("-")[2]
    if not (digits.isascii() and digits.isdecimal()):
        raise StoreError(f"{name}: expected a number behind the last '-'")
    return int(digits)


def _counts(values: object, shards: int) -> np.ndarray:
    if not isinstance(values, list) or len(values) != shards:
        raise ValueError(f"expected {shards:,} counts")
    if not all(type(value) is int and 0 <= value <= _MAX_COUNT for value in values):
        raise ValueError("expected counts")
    return np.array(values, dtype=np.int64)
