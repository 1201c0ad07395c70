"""Every kind of damage is found and named; nothing that a file says brings more than an error."""

import contextlib
import json
import os
import re
import resource
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.test_reader import make_store
from zephon_patches.errors import StoreError
from zephon_patches.keys import canonical_json, fingerprint
from zephon_patches.store import verify
from zephon_patches.store.manifest import Manifest
from zephon_patches.store.reader import TokenStore
from zephon_patches.store.verify import verify_store

SHARDS = [[1, 2, 3], [], [4, 5]]


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "s", SHARDS)


@pytest.mark.parametrize("block", [1, 2, 1 << 18])
@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_a_sound_store_has_no_damage(tmp_path, monkeypatch, dtype, block):
    monkeypatch.setattr(verify, "_BLOCK_ENTRIES", block)
    folder = make_store(tmp_path / "s", [*SHARDS, list(range(5000))], dtype)
    before = sorted(path.name for path in folder.iterdir())
    assert verify_store(folder) == []
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("kind", ["bin", "idx", "origin"])
@pytest.mark.parametrize(
    "damage, text",
    [
        (lambda data: data[:-1], "bytes, but the manifest's counts give"),
        (lambda data: data + b"\0", "bytes, but the manifest's counts give"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "checksum|starts with"),
        (None, "cannot be read .No such file"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(store, kind, damage, text):
    path = store / f"000002-000.{kind}"
    data = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(data))
    [found] = verify_store(store)
    assert (found.shard, found.path) == (2, path)
    assert re.search(text, found.problem)


@pytest.mark.parametrize(
    "offset, form, value, text",
    [
        (0, "8s", b"MMIDIDXX", "starts with"),
        (9, "Q", 2, "version 2"),
        (17, "B", 4, "dtype code 4, but the manifest says <u2, code 8"),
        (18, "Q", 2**63, "9,223,372,036,854,775,808 sequences"),
        (26, "Q", 7, "7 entries"),
        (34, "i", -5, "document 0 has the length -5"),
        (34, "i", 2**31 - 1, "its lengths sum up to 2,147,483,647 tokens, but the manifest says 3"),
        (38, "q", 2**62, "pointers"),
        (46, "q", -1, "one sequence each"),
        (54, "q", 2**63 - 1, "one sequence each"),
    ],
)
def test_an_index_that_says_something_else_is_told_in_words(store, offset, form, value, text):
    path = store / "000000-000.idx"
    data = bytearray(path.read_bytes())
    struct.pack_into("<" + form, data, offset, value)
    path.write_bytes(data)
    [found] = verify_store(store)
    assert text in found.problem


def test_a_pipe_or_a_folder_in_place_of_a_file_is_damage_and_no_wait(store):
    for name, make in (("000000-000.bin", os.mkfifo), ("000002-000.idx", os.mkdir)):
        (store / name).unlink()
        make(store / name)
    assert [damage.problem for damage in verify_store(store)] == ["is no regular file"] * 2


def signed(store, **changes):
    content = json.loads((store / "manifest.json").read_bytes())
    del content["hash"]
    content.update(changes)
    (store / "manifest.json").write_text(canonical_json({**content, "hash": fingerprint(content)}))


@pytest.mark.parametrize("name", ["../s/000000-000", "/etc/passwd", "", ".", "..", "a/b", "a\\b", "a\0b", 3, None])
def test_a_shard_s_name_that_leaves_the_folder_is_refused(store, name):
    shards = json.loads((store / "manifest.json").read_bytes())["shards"]
    shards[0]["name"] = name
    signed(store, shards=shards)
    for reader in (verify_store, TokenStore):
        with pytest.raises(StoreError, match="not what this version writes .*shard name"):
            reader(store)


@pytest.mark.parametrize("count", [2**40, 2**60, 2**62, 2**64, -1, 1.5, True, "3", None, [3]])
@pytest.mark.parametrize("field", ["documents", "tokens"])
def test_absurd_counts_are_an_error_and_no_allocation(store, field, count):
    content = json.loads((store / "manifest.json").read_bytes())
    content["shards"][0][field] = count
    total = content[field] - 3 * (field == "tokens") - (field == "documents")
    signed(store, shards=content["shards"], **({field: total + count} if type(count) is int else {}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        assert verify_store(store)
        with pytest.raises(StoreError):
            TokenStore(store).tokens(0)
            assert field == "documents"  # of which the tokens' map knows nothing
            raise StoreError
    except StoreError:
        pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


@given(st.data())
def test_any_bytes_in_an_index_give_damage_or_what_was_there(tmp_path_factory, data):
    store = make_store(tmp_path_factory.mktemp("fuzz") / "s", SHARDS)
    path = store / "000002-000.idx"
    good = path.read_bytes()
    bad = bytearray(good)
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=8)):
        bad[place] = value
    cut = data.draw(st.one_of(st.just(len(bad)), st.integers(0, len(bad))))
    bad = bytes(bad[:cut]) + data.draw(st.one_of(st.just(b""), st.binary(max_size=40)))
    path.write_bytes(bad)
    found = verify_store(store)
    assert [damage.path for damage in found] == ([] if bad == good else [path])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_any_value_in_a_manifest_is_an_error_or_harmless(tmp_path_factory, data):
    """Also with a hash that is right."""
    store = make_store(tmp_path_factory.mktemp("fuzz") / "s", SHARDS)
    content = json.loads((store / "manifest.json").read_bytes())
    del content["hash"]
    place = data.draw(st.sampled_from([*content, *[("shards", key) for key in content["shards"][0]]]))
    value = data.draw(json_values)
    if isinstance(place, tuple):
        content["shards"][0][place[1]] = value
    else:
        content[place] = value
    (store / "manifest.json").write_text(canonical_json({**content, "hash": fingerprint(content)}))
    try:
        verify_store(store)
        opened = TokenStore(store)
        for shard in range(len(opened.tokens_per_shard)):
            opened.tokens(shard)
    except StoreError:
        pass


@given(st.binary(max_size=200), st.integers(0, 10**6))
def test_any_bytes_in_a_manifest_are_an_error_or_harmless(tmp_path_factory, junk, place):
    store = make_store(tmp_path_factory.mktemp("fuzz") / "s", SHARDS)
    good = (store / "manifest.json").read_bytes()
    place %= len(good)
    bad = good[:place] + junk + good[place + len(junk) :]
    (store / "manifest.json").write_bytes(bad)
    if bad == good:
        assert verify_store(store) == []
    else:
        with contextlib.suppress(StoreError):
            assert verify_store(store) == [] and Manifest.read(store).to_json() == good  # white space, say
