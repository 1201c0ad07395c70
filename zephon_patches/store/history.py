"""What changed between two stores of one source: the cache often still has the one from before."""

from pathlib import Path

from zephon_patches.errors import StoreError
from zephon_patches.store.manifest import MANIFEST, Manifest

__all__ = ["file_changes", "find_manifest"]

_SHOWN = 5


def find_manifest(folder: Path, data_fingerprint: str) -> Manifest | None:
    """The manifest of the store with this data among the stores in a source's folder."""
    for path in sorted(folder.glob(f"*/{MANIFEST}")):
        try:
            manifest = Manifest.read(path.parent)
        except StoreError:
            continue
        if manifest.data_fingerprint == data_fingerprint:
            return manifest
    return None


def file_changes(before: Manifest, now: Manifest) -> list[str]:
    """Says which files are new, gone, or other than before: by size, or where sizes are equal, by content.

    A new file moves the cuts in all files behind it, so there may be no range that both manifests hash; then only the
    time tells.
    """
    old, new = ({file.name: file for file in manifest.files} for manifest in (before, now))
    old_content, new_content = _content_by_file(before), _content_by_file(now)
    changed, unsure = [], []
    for name in new:
        if name not in old:
            continue
        then, present = old_content.get(name, {}), new_content.get(name, {})
        if old[name].bytes != new[name].bytes:
            changed.append(f"{name} ({old[name].bytes:,} bytes before, {new[name].bytes:,} now)")
        elif any(then[place] != present[place] for place in then.keys() & present.keys()):
            changed.append(f"{name} (same size, other content)")
        elif then.keys() != present.keys() and old[name].mtime_ns != new[name].mtime_ns:
            unsure.append(f"{name} (same size, other time)")
    changes = {
        "files that are new": [name for name in new if name not in old],
        "files that are gone": [name for name in old if name not in new],
        "files that changed": changed,
        "files that may have changed": unsure,
    }
    return [f"{label}: {_listed(names)}" for label, names in changes.items() if names]


def _content_by_file(manifest: Manifest) -> dict[str, dict[tuple[int, int], str]]:
    """The hash of each range of each file, by its place in the file."""
    content: dict[str, dict[tuple[int, int], str]] = {}
    for shard in manifest.shards:
        for piece in shard.ranges:
            if piece.file >= 0:
                content.setdefault(manifest.files[piece.file].name, {})[piece.start, piece.stop] = piece.content
    return content


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
