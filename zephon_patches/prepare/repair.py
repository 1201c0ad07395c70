"""Turns a damaged store back into an unfinished one, so that the next build makes just what is damaged.

The sound shards get back their records, the marks of finished shards in an unfinished store; the damaged ones get
none, and their files are removed. The manifest goes between the two: at no moment is there a record, or a manifest,
that stands for a shard known to be damaged and has lost its file. A unit of several shards is made again from its
first damaged shard on, since its input can be read in its order only.

If the input's times changed since, the next build starts anew, as with every unfinished store.
"""

import shlex
from pathlib import Path

from zephon_patches.config import HUB
from zephon_patches.errors import StoreError
from zephon_patches.prepare.exactness import is_distrusted
from zephon_patches.prepare.unfinished import PLAN, UNITS, Unfinished, store_locked
from zephon_patches.store.atomic import sync_folder
from zephon_patches.store.manifest import MANIFEST, Manifest
from zephon_patches.store.verify import Damage, verify_store

__all__ = ["rebuild_command", "reopen_store"]


def rebuild_command(folder: Path) -> str:
    """The commands that make the damaged shards of a store anew; TEXTS and TOKENIZER are not in a store."""
    folder = folder.absolute()
    recipe = Manifest.read(folder).recipe
    repair = shlex.join(["zephon-data", "verify", "--repair", str(folder)])
    field = next((key for key in ("text_field", "token_field") if key in recipe), None)
    if field is None and recipe.get("tokens") != "in place":
        return f"{repair}, and the next start of the training run"
    arguments = ["--cache-dir", str(folder.parent.parent), "--shard-bytes", str(recipe.get("shard_bytes", 0))]
    arguments += [] if field is None else [f"--{field.replace('_', '-')}", str(recipe[field])]
    path = "TEXTS"
    if "hub" in recipe:
        name, *values = recipe["hub"]
        path = HUB + name
        for key, value in zip(("subset", "split", "revision"), values, strict=True):
            arguments += [f"--{key}", value] if value else []
    prepare = f"zephon-data prepare --source {shlex.quote(f'{folder.parent.name}={path}')} --tokenizer TOKENIZER"
    return f"{repair} && {prepare} {shlex.join(arguments)}"


def reopen_store(folder: Path) -> list[Damage]:
    """Makes a damaged store an unfinished one; leaves a sound store alone.

    Returns:
        The files that were damaged.

    Raises:
        StoreError: The manifest cannot be used (then nothing is known to be sound), the folder cannot be written
            to, or another process builds the store.
    """
    Manifest.read(folder)  # before a lock file is made in a folder that is no store
    try:
        with store_locked(folder):
            damages = verify_store(folder)
            if damages:
                _reopen(folder, Manifest.read(folder), {damage.shard for damage in damages})
            return damages
    except OSError as error:
        raise StoreError(f"{folder}: cannot be repaired here ({error})") from error


def _reopen(folder: Path, manifest: Manifest, damaged: set[int]) -> None:
    numbered: list[tuple[int, int]] = []  # unit and part of each shard
    for shard in manifest.shards:
        unit, _, part = shard.name.partition("-")
        if not (unit.isdecimal() and part.isdecimal()):
            raise StoreError(f"{folder}: shard {shard.name} has no name that this version gives; it cannot be repaired")
        numbered.append((int(unit), int(part)))
    units: dict[int, list[int]] = {}
    for shard_number, (unit_number, part_number) in enumerate(numbered):
        if part_number != len(units.setdefault(unit_number, [])):
            raise StoreError(f"{folder}: the parts of unit {unit_number} are not in order; it cannot be repaired")
        units[unit_number].append(shard_number)
    if sorted(units) != list(range(len(units))):
        raise StoreError(f"{folder}: its units are not numbered from 0; it cannot be repaired")
    _check_plan(folder, manifest)
    store = Unfinished(folder)
    (folder / UNITS).mkdir(exist_ok=True)
    store.forget_all()  # what a builder that was killed at its very end left
    lost = []
    # A store in which an engine was distrusted was finished without it; of others it is not known any more.
    proven = is_distrusted(folder)
    for shards in units.values():
        sound = next((i for i, number in enumerate(shards) if number in damaged), len(shards))
        for number in shards[:sound]:
            store.mark(manifest.shards[number], last=number == shards[-1], proven=proven)
        lost += shards[sound:]
    (folder / MANIFEST).unlink()
    sync_folder(folder)
    for number in lost:
        for kind in ("bin", "idx", "origin"):
            (folder / f"{manifest.shards[number].name}.{kind}").unlink(missing_ok=True)


def _check_plan(folder: Path, manifest: Manifest) -> None:
    """A store keeps the plan that it was built by; without it, nobody knows what a unit reads.

    Raises:
        StoreError: It is missing or another's.
    """
    try:
        units = Unfinished(folder).plan(manifest.files)
    except (OSError, ValueError):
        units = None
    if units is None:
        raise StoreError(f"{folder}: {PLAN} is missing or damaged, so only a new build helps; remove the folder")
