"""The file that closes a store: what it keeps, and what becomes of a damaged or foreign one."""

import contextlib
import json
import os
import random
import resource
import sys

import pytest

from zephon_patches.errors import StoreError
from zephon_patches.keys import canonical_json, fingerprint
from zephon_patches.samples.plan_list import read_list
from zephon_patches.store.manifest import FileRecord, InputRange, Manifest, ShardRecord
from zephon_patches.store.reader import TokenStore

MANIFEST = Manifest(
    recipe={"format": 1, "shard_bytes": 0, "text_field": "text", "tokenizer": "00112233445566aa"},
    dtype="<u2",
    files=[FileRecord("a.jsonl", 19999, 1_700_000_000_123_456_789), FileRecord("é/\udcff.txt", 0, 1)],
    shards=[
        ShardRecord("000000-000", 2, 12, "0a" * 8, "0b" * 8, "0c" * 8, [InputRange(0, 0, 19999, 2, "ff" * 16)]),
        ShardRecord("000001-000", 0, 0, "1a" * 8, "1b" * 8, "1c" * 8),
    ],
)


def write(folder, data: bytes):
    (folder / "manifest.json").write_bytes(data)
    return folder


def signed(content: dict) -> bytes:
    return canonical_json({**content, "hash": fingerprint(content)}).encode()


def test_manifest_reads_as_it_was_written(tmp_path):
    found = Manifest.read(write(tmp_path, MANIFEST.to_json()))
    assert found == MANIFEST
    assert (found.documents, found.tokens) == (2, 12)
    assert found.to_json() == MANIFEST.to_json()


def test_fingerprint_of_the_data_follows_tokens_and_boundaries_only():
    shards = MANIFEST.shards
    same = Manifest({}, "<u2", [], [ShardRecord(**{**vars(s), "name": "x", "origin": "y"}) for s in shards])
    assert same.data_fingerprint == MANIFEST.data_fingerprint
    for changed in ([ShardRecord(**{**vars(shards[0]), "bin": "00" * 8}), shards[1]], shards[::-1], shards[:1]):
        assert Manifest({}, "<u2", [], changed).data_fingerprint != MANIFEST.data_fingerprint


def test_missing_manifest_is_no_finished_store(tmp_path):
    with pytest.raises(StoreError, match=r"no finished token store here \(manifest.json is missing\)"):
        Manifest.read(tmp_path)
    with pytest.raises(StoreError, match="no finished token store"):
        Manifest.read(tmp_path / "nowhere")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"\x00", MANIFEST.to_json()[:-20], b"[" * 100_000])
def test_cut_or_broken_manifest_is_named_damaged(tmp_path, data):
    with pytest.raises(StoreError, match=r"manifest.json: damaged, not JSON .* remove .* to build the store anew"):
        Manifest.read(write(tmp_path, data))


@pytest.mark.parametrize("data", [b"[]", b"3", b'"format"', b"{}", b'{"name": "other"}'])
def test_foreign_json_is_named_no_manifest(tmp_path, data):
    with pytest.raises(StoreError, match="not a manifest of a token store"):
        Manifest.read(write(tmp_path, data))


def test_newer_format_is_refused_with_both_numbers(tmp_path):
    content = json.loads(MANIFEST.to_json())
    del content["hash"]
    with pytest.raises(StoreError, match="format 2, but this version reads format 1"):
        Manifest.read(write(tmp_path, signed({**content, "format": 2})))


def test_changed_value_is_noticed_by_the_hash(tmp_path):
    changed = MANIFEST.to_json().replace(b'"documents":2', b'"documents":3', 1)
    assert changed != MANIFEST.to_json()
    with pytest.raises(StoreError, match="damaged, its hash does not match"):
        Manifest.read(write(tmp_path, changed))


def test_number_that_reads_as_infinity_is_damage_as_well(tmp_path):
    changed = MANIFEST.to_json().replace(b"19999", b"1e999", 1)
    with pytest.raises(StoreError, match="damaged"):
        Manifest.read(write(tmp_path, changed))


def test_manifest_without_its_hash_is_damaged(tmp_path):
    content = json.loads(MANIFEST.to_json())
    del content["hash"]
    with pytest.raises(StoreError, match="damaged"):
        Manifest.read(write(tmp_path, canonical_json(content).encode()))


def test_folder_in_the_place_of_the_manifest_is_a_store_error(tmp_path):
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(StoreError, match="cannot be read"):
        Manifest.read(tmp_path)


def test_any_flipped_bytes_give_a_store_error_or_the_same_content(tmp_path):
    whole = MANIFEST.to_json()
    chance = random.Random(7)
    refused = 0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            data[chance.randrange(len(data))] = chance.choice(
                (chance.randrange(256), ord(chance.choice('"{}[],:019e-')))
            )
        try:
            found = Manifest.read(write(tmp_path, bytes(data)))
        except StoreError:
            refused += 1
        else:
            assert found == MANIFEST
    assert refused > 2000  # the test does damage


@pytest.mark.parametrize("place", ["recipe", "files", "shards", "documents", "ranges", "skipped", "bin"])
def test_a_value_of_any_depth_is_a_store_error(tmp_path, place):
    """Near the limit of the interpreter a value can be parsed, but not hashed or shown in a message."""
    content = json.loads(MANIFEST.to_json())
    del content["hash"]
    limit = sys.getrecursionlimit()
    for depth in (*range(2, limit, 7), *range(limit - 30, limit + 10)):
        deep = "[" * depth + "]" * depth
        sys.setrecursionlimit(20_000)
        try:
            value = json.loads(deep)
            shard = {**content["shards"][0], place: value}
            in_shard = place in ("ranges", "skipped", "bin")
            data = signed({**content, **({"shards": [shard]} if in_shard else {place: value})})
        finally:
            sys.setrecursionlimit(limit)
        with contextlib.suppress(StoreError):
            Manifest.read(write(tmp_path, data))
            pytest.fail(f"{place} of depth {depth} was taken")


@pytest.mark.parametrize("kind", ["pipe", "device", "circle"])
def test_manifest_that_is_no_regular_file_is_not_read(tmp_path, kind):
    if kind == "pipe":
        os.mkfifo(tmp_path / "manifest.json")
    else:
        (tmp_path / "manifest.json").symlink_to("/dev/zero" if kind == "device" else "manifest.json")
    with pytest.raises(StoreError, match=r"manifest.json: cannot be read \((no regular file|Too many levels)"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "best_fit-8.json"])
def test_a_file_larger_than_any_of_its_kind_is_refused_and_not_read(tmp_path, name):
    write(tmp_path, MANIFEST.to_json())
    store = TokenStore(tmp_path)
    with open(tmp_path / name, "wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError, match=rf"{name}: cannot be read \(1,099,511,627,776 bytes, more than 1,073,741,824"):
        Manifest.read(tmp_path) if name == "manifest.json" else read_list(store, "best_fit", 8)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB
