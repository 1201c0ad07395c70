"""``zephon-data verify``: checks stores, byte by byte, and takes damaged ones apart for a rebuild of just the damage.

    zephon-data verify data_cache
    zephon-data verify --repair data_cache/web/005b739b872dd637-be9cdd8e36910792

Prints every damaged file and the command that makes it anew. The exit status is 0 if all stores are sound, else 1;
with --repair it is 0 if all stores are sound or were taken apart.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from zephon_patches.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from zephon_patches.store.manifest import Manifest
    from zephon_patches.store.verify import Damage

__all__ = ["add_to"]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.description = __doc__
    parser.add_argument("stores", metavar="STORE", nargs="+", type=Path, help="a store, or a cache folder of stores")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="remove damaged shards, and the manifest, so that the next build makes just them",
    )
    parser.add_argument(
        "--tokens-in",
        metavar="FOLDER",
        type=Path,
        help="folder of the .bin and .idx files of a store whose tokens are in place (such files are not checked)",
    )
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.repair and arguments.tokens_in is not None:
        raise ConfigError("--repair makes the files of a store anew, and --tokens-in names others; leave one out")
    sound = [
        _verify(store, arguments.repair, arguments.tokens_in) for path in arguments.stores for store in _stores_at(path)
    ]
    return 0 if all(sound) else 1


def _stores_at(path: Path) -> list[Path]:
    from zephon_patches.store.manifest import MANIFEST

    if os.path.exists(path / MANIFEST) or not os.path.isdir(path):  # which bear any name, also one that is too long
        return [path]
    found = sorted(manifest.parent for pattern in ("*", "*/*") for manifest in path.glob(f"{pattern}/{MANIFEST}"))
    return found or [path]  # an unfinished store, or none: an error that says so


def _verify(folder: Path, repair: bool, tokens_root: Path | None) -> bool:
    from zephon_patches.store.manifest import Manifest

    try:
        damages = _damages(folder, repair, tokens_root)
        plans_are_sound = bool(damages) or _verify_plans(folder, repair)
        if not damages:
            manifest = Manifest.read(folder)
            if manifest.in_place and tokens_root is None:
                print(
                    f"{folder}: its tokens are in place, in {_names_of(manifest)}: they were NOT checked; give their "
                    "folder with --tokens-in FOLDER"
                )
            counts = f"{manifest.documents:,} documents, {manifest.tokens:,} tokens, {len(manifest.shards):,} shards"
            print(f"{folder}: sound, {counts}")
            return plans_are_sound
        for damage in damages:
            print(f"{damage.path}: {damage.problem}")
        input_files = sorted({damage.path for damage in damages if damage.path.parent != folder})
        if input_files:
            print(
                f"{folder}: {len(input_files):,} files are the source's own; bring back what the store was built from"
            )
        damages = [damage for damage in damages if damage.path not in input_files]
        if not damages:
            return False
        shards = len({damage.shard for damage in damages})
        if repair:
            print(
                f"{folder}: {shards:,} damaged shards removed; the next zephon-data prepare or training run makes them"
            )
            return True
        from zephon_patches.prepare.repair import rebuild_command

        command = rebuild_command(folder)
        print(f"{folder}: {shards:,} damaged shards; to make just them anew: {command}")
        if "TOKENIZER" in command:
            print(
                "  with TEXTS and TOKENIZER, and --[no-]add-bos and --[no-]add-eos if given, as they were at the build"
            )
    except StoreError as error:
        print(error)
    return False


def _damages(folder: Path, repair: bool, tokens_root: Path | None) -> "list[Damage]":
    """The damages of a store; with ``repair`` it is taken apart."""
    if repair:
        from zephon_patches.prepare.repair import reopen_store

        return reopen_store(folder)
    from zephon_patches.store.verify import verify_store

    return verify_store(folder, tokens_root)


def _verify_plans(folder: Path, repair: bool) -> bool:
    """Checks the plans of packings of a store that is sound otherwise; False if damage is left."""
    from zephon_patches.samples.plan_list import damaged_plans

    damages = damaged_plans(folder)
    for path, problem in damages:
        print(f"{path}: {problem}")
        if repair:
            path.unlink()
    if damages:
        what = "removed" if repair else "damaged; zephon-data verify --repair removes them"
        print(f"{folder}: {len(damages):,} files of plans {what}; the next start that needs them makes them anew")
    return repair or not damages


def _names_of(manifest: "Manifest") -> str:
    names = [file.name for file in manifest.files if file.name.endswith(".bin")]
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
