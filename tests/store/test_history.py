"""What changed between two stores of a source, by file."""

import os
from pathlib import Path

import pytest

from tests.corpora import D60, make_corpus, write_jsonl
from tests.prepare.stores import open_store
from zephon_patches.store.history import file_changes, find_manifest
from zephon_patches.store.manifest import Manifest


@pytest.fixture
def folder(tmp_path):
    """Five files of numbered documents, and their store in several shards."""
    make_corpus(tmp_path, D60, files=5)
    return tmp_path


def manifest(folder: Path, cache: str = "cache") -> Manifest:
    return open_store(folder, cache, shard_bytes=700).manifest


def swap(path: Path) -> None:
    """Swaps two words of the file's first document."""
    text = path.read_text()
    first = text.split('"')[3].split()
    path.write_text(text.replace(f"{first[0]} {first[1]}", f"{first[1]} {first[0]}", 1))
    assert path.read_text() != text


def test_equal_manifests_have_no_change(folder):
    assert file_changes(manifest(folder), manifest(folder)) == []


def test_files_that_are_new_gone_and_of_another_size_are_named(folder):
    before = manifest(folder)
    write_jsonl(folder / "texts" / "new.jsonl", [3])
    (folder / "texts" / "01.jsonl").unlink()
    path = folder / "texts" / "04.jsonl"
    size = path.stat().st_size
    path.write_text(path.read_text() + '{"text": "0_0"}\n')
    assert file_changes(before, manifest(folder)) == [
        "files that are new: new.jsonl",
        "files that are gone: 01.jsonl",
        f"files that changed: 04.jsonl ({size:,} bytes before, {size + 16:,} now)",
    ]


@pytest.mark.parametrize("name", ["000.jsonl", "zzz.jsonl"])
def test_a_file_more_makes_no_other_file_look_changed(folder, name):
    # In front of the others it moves all cuts.
    before = manifest(folder)
    write_jsonl(folder / "texts" / name, [3, 4, 5])
    after = manifest(folder)
    cuts = [[(piece.start, piece.stop) for shard in m.shards for piece in shard.ranges] for m in (before, after)]
    assert set(cuts[0]) - set(cuts[1]) or name == "zzz.jsonl"
    assert file_changes(before, after) == [f"files that are new: {name}"]


def test_an_edit_of_the_same_size_is_found_by_content(folder):
    before = manifest(folder)
    swap(folder / "texts" / "02.jsonl")
    assert file_changes(before, manifest(folder, "other")) == [
        "files that changed: 02.jsonl (same size, other content)"
    ]


def test_an_edit_of_the_same_size_is_not_passed_over_where_the_cuts_moved(folder):
    before = manifest(folder)
    for number in range(5):
        swap(folder / "texts" / f"{number:02d}.jsonl")
    write_jsonl(folder / "texts" / "000.jsonl", [3, 4, 5])
    new, *others = file_changes(before, manifest(folder))
    assert new == "files that are new: 000.jsonl"
    for number in range(5):
        assert any(f"{number:02d}.jsonl (same size, other " in line for line in others)


def test_another_time_alone_is_no_change_where_the_content_was_compared(folder):
    before = manifest(folder)
    for path in (folder / "texts").iterdir():
        os.utime(path, ns=(0, 1))
    assert file_changes(before, manifest(folder, "other")) == []


def test_many_changes_are_counted(folder):
    before = manifest(folder)
    for number in range(8):
        write_jsonl(folder / "texts" / f"new{number}.jsonl", [3])
    assert file_changes(before, manifest(folder)) == [
        "files that are new: new0.jsonl, new1.jsonl, new2.jsonl, new3.jsonl, new4.jsonl and 3 more"
    ]


def test_a_manifest_is_found_by_its_data_among_unfinished_and_damaged_stores(folder):
    before = manifest(folder)
    write_jsonl(folder / "texts" / "new.jsonl", [3])
    now = manifest(folder)
    (folder / "cache" / "web" / "unfinished").mkdir()
    damaged = folder / "cache" / "web" / "0-damaged" / "manifest.json"
    damaged.parent.mkdir()
    damaged.write_text("{")
    for wanted in (before, now):
        assert find_manifest(folder / "cache" / "web", wanted.data_fingerprint) == wanted
    assert find_manifest(folder / "cache" / "web", "0" * 16) is None
    assert find_manifest(folder / "cache" / "absent", "0" * 16) is None
