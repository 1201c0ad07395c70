"""``zephon-data verify``: checks stores, byte by byte, and takes damaged ones apart for a rebuild of just the damage.

    zephon-data verify data_cache
    zephon-data verify --repair data_cache/web/005b739b872dd637-be9cdd8e36910792

Prints every damaged file and the command that makes it anew. The exit status is 0 if all stores are sound, else 1;
with --repair it is 0 if all stores are sound or were taken apart.
"""

import argparse
from pathlib import Path
from typing import Any

from zephon_patches.errors import StoreError
from zephon_patches.prepare.repair import rebuild_command, reopen_store
from zephon_patches.store.manifest import MANIFEST, Manifest
from zephon_patches.store.verify import verify_store

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser(
        "verify",
        help="check finished stores: sizes, structure, checksums",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stores", metavar="STORE", nargs="+", type=Path, help="a store, or a cache folder of stores")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="remove damaged shards, and the manifest, so that the next build makes just them",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    sound = [_verify(store, arguments.repair) for path in arguments.stores for store in _stores_at(path)]
    return 0 if all(sound) else 1


def _stores_at(path: Path) -> list[Path]:
    if (path / MANIFEST).exists():
        return [path]
    found = sorted(manifest.parent for pattern in ("*", "*/*") for manifest in path.glob(f"{pattern}/{MANIFEST}"))
    return found or [path]  # an unfinished store, or none: an error that says so


def _verify(folder: Path, repair: bool) -> bool:
    try:
        damages = reopen_store(folder) if repair else verify_store(folder)
        if not damages:
            manifest = Manifest.read(folder)
            counts = f"{manifest.documents:,} documents, {manifest.tokens:,} tokens, {len(manifest.shards):,} shards"
            print(f"{folder}: sound, {counts}")
            return True
        for damage in damages:
            print(f"{damage.path}: {damage.problem}")
        shards = len({damage.shard for damage in damages})
        if repair:
            print(
                f"{folder}: {shards:,} damaged shards removed; the next zephon-data prepare or training run makes them"
            )
            return True
        print(f"{folder}: {shards:,} damaged shards; to make just them anew: {rebuild_command(folder)}")
    except StoreError as error:
        print(error)
    return False
