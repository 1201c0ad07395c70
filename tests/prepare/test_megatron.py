"""Megatron's pairs in place: their documents are the store's, nothing is copied, and every fault is one clear error."""

import importlib.util
import json
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import make_corpus, write_tokenizer
from tests.prepare.stores import contents, documents_of, open_store, write_mixed
from tests.reference import samples_of_documents
from tests.resume import Place, Run, uninterrupted
from zephon_patches import DataConfig, SourceConfig, build_evaluation_loader, build_loader
from zephon_patches.cli.__main__ import main
from zephon_patches.errors import ConfigError, InputError, StoreError
from zephon_patches.keys import canonical_json, fingerprint
from zephon_patches.prepare import megatron
from zephon_patches.prepare.build import open_or_build
from zephon_patches.prepare.finding import tokenizer_for
from zephon_patches.prepare.inputs import make_input
from zephon_patches.prepare.repair import rebuild_command
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.store.reader import TokenStore
from zephon_patches.store.verify import verify_store

CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

# Documents as lists of sequences.
DOCUMENTS = [[[1, 2, 3], [4]], [], [[5, 6], [], [7]], [[8]], [[]], [[9, 10, 11]], [[]]]
JOINED = [[1, 2, 3, 4], [], [5, 6, 7], [8], [], [9, 10, 11], []]


def write_pair(prefix: Path, documents=DOCUMENTS, code: int = 8, **changes) -> Path:
    """Writes a pair byte by byte, apart from the code under test.

    Args:
        changes: In place of what belongs there: lengths, pointers, indices, counts, head, tail, or tokens (bytes).
    """
    dtype = np.dtype(CODES.get(code, "<f4"))
    sequences = [sequence for document in documents for sequence in document]
    lengths = changes.get("lengths", [len(sequence) for sequence in sequences])
    starts = np.cumsum([0, *map(len, sequences)])[:-1] * dtype.itemsize
    pointers = changes.get("pointers", starts.tolist())
    indices = changes.get("indices", np.cumsum([0, *map(len, documents)]).tolist())
    counts = changes.get("counts", (len(lengths), len(indices)))
    head = changes.get("head", struct.pack("<9sQB", b"MMIDIDX\0\0", 1, code))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(prefix.name + ".idx").write_bytes(
        head
        + struct.pack("<QQ", *counts)
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(indices)}q", *indices)
        + changes.get("tail", b"")
    )
    tokens = np.array([token for sequence in sequences for token in sequence], dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(changes.get("tokens", tokens.tobytes()))
    return prefix


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path / "tokenizer", [18])  # ids 0 to 19
    return tmp_path


def build(folder, path=None, shard_bytes=1, cache="cache", **settings):
    source = make_input(SourceConfig("web", str(path or folder / "ids"), **settings))
    tokenizer = tokenizer_for(source, DataConfig(add_eos=True), TextTokenizer(folder / "tokenizer"))
    return open_or_build(source, tokenizer, folder / cache, shard_bytes)


@pytest.mark.parametrize("code", sorted(CODES))
@pytest.mark.parametrize("shard_bytes", [1, 7, 16, 0])
def test_a_document_is_the_union_of_its_sequences_in_every_integer_dtype(folder, code, shard_bytes):
    write_pair(folder / "ids" / "a_text_document", code=code)
    found = build(folder, shard_bytes=shard_bytes)
    assert documents_of(found) == JOINED
    assert found.manifest.dtype == np.dtype(CODES[code]).str
    assert verify_store(found.folder) == verify_store(found.folder, folder / "ids") == []


def test_nothing_is_copied_and_nothing_written_beside_the_input(folder):
    prefix = write_pair(folder / "ids" / "a")
    before = contents(folder / "ids")
    found = build(folder)
    assert contents(folder / "ids") == before
    assert not list(found.folder.glob("*.bin")) and len(list(found.folder.glob("*.idx"))) == 4
    ranges = [shard.ranges[0] for shard in found.manifest.shards]
    assert [(piece.start, piece.stop, piece.records) for piece in ranges] == [
        (0, 8, 1),
        (8, 14, 2),
        (14, 16, 1),
        (16, 22, 3),
    ]
    # The map is the file.
    view = found.tokens(3)
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(16)
        file.write(struct.pack("<H", 1))
    assert view.tolist() == [1, 10, 11]
    assert not view.flags.writeable


@pytest.mark.parametrize("path", ["ids/a.bin", "ids/a.idx", "ids/a", "ids", "ids/*.bin", "ids/*.idx", "ids/a.*", "i*"])
def test_each_way_to_name_a_pair(folder, path):
    write_pair(folder / "ids" / "a")
    (folder / "ids" / ".hidden").write_text("")
    assert documents_of(build(folder, folder / path)) == JOINED


def test_several_pairs_in_the_order_of_their_names(folder):
    write_pair(folder / "ids" / "b", [[[1]], [[2]]])
    write_pair(folder / "ids" / "a.bin", [[[3]]])  # its index is a.bin.idx, its tokens a.bin.bin
    write_pair(folder / "ids" / "a", [[[4]]])
    write_pair(folder / "ids" / "c" / "a", [[[5, 6]]])
    write_pair(folder / "ids" / "empty", [])
    write_pair(folder / "ids" / "blank", [[], [[]]])
    found = build(folder, shard_bytes=3)
    assert documents_of(found) == [[4], [3], [1], [2], [5, 6]]
    assert [shard.tokens for shard in found.manifest.shards] == [1, 1, 2, 2]
    assert verify_store(found.folder, folder / "ids") == []


def test_a_source_of_no_tokens_gives_an_empty_store(folder):
    write_pair(folder / "ids" / "empty", [])
    assert build(folder).num_tokens == 0


sequences = st.lists(st.integers(0, 19), max_size=5)


@given(
    st.lists(st.lists(st.lists(sequences, max_size=3), max_size=12), min_size=1, max_size=3),
    st.integers(1, 40),
    st.sampled_from(sorted(CODES)),
    st.integers(1, 4),
)
def test_any_documents_come_back(tmp_path_factory, pairs, shard_bytes, code, block):
    folder = tmp_path_factory.mktemp("pairs")
    write_tokenizer(folder / "tokenizer", [18])
    for number, documents in enumerate(pairs):
        write_pair(folder / "ids" / f"{number}", documents, code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "_BLOCK_ENTRIES", block)
        patch.setattr(megatron, "_BLOCK_BYTES", 8 * block)
        found = build(folder, shard_bytes=shard_bytes)
    expected = [
        [t for s in document for t in s] for documents in pairs if any(map(any, documents)) for document in documents
    ]
    assert documents_of(found) == expected
    itemsize = found.manifest.shards and np.dtype(found.manifest.dtype).itemsize
    for shard in found.manifest.shards[:-1]:
        piece, size = shard.ranges[0], (folder / "ids" / found.manifest.files[shard.ranges[0].file].name).stat().st_size
        assert piece.stop - piece.start == shard.tokens * itemsize
        assert shard.tokens * itemsize >= shard_bytes or piece.stop == size
    assert verify_store(found.folder, folder / "ids") == []


def test_a_store_of_ours_is_read_as_such_a_source(tmp_path):
    ours = open_store(write_mixed(tmp_path))
    found = build(tmp_path, f"{ours.folder}/*.bin")
    assert documents_of(found) == documents_of(ours)
    with pytest.raises(InputError, match=r"000000-000.origin: beside .bin and .idx files .* such as '.*/\*\*/\*.bin'"):
        build(tmp_path, ours.folder)


# --- what cannot be used ---


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"head": b"TNTIDX\0\0" + bytes(10)}, r"a.idx: an index of the old kind \(TNTIDX\)"),
        ({"head": b"PK\3\4" + bytes(14)}, r"a.idx: no index of token ids: starts with b'PK"),
        ({"head": struct.pack("<9sQB", b"MMIDIDX\0\0", 2, 8)}, "a.idx: version 2 of the index format"),
        ({"code": 6}, "a.idx: dtype code 6 .float64, no integers"),
        ({"code": 7}, "a.idx: dtype code 7 .float32, no integers"),
        ({"code": 99}, "a.idx: dtype code 99 .unknown"),
        ({"counts": (2**63, 8)}, "a.idx: .* but its 9,223,372,036,854,775,808 sequences and 8 document entries take"),
        ({"counts": (9, 2**64 - 1)}, "a.idx: .* but its 9 sequences and 18,446,744,073,709,551,615 document entries"),
        ({"counts": (8, 8)}, "a.idx: .* the file is cut off or damaged"),
        ({"indices": [], "counts": (9, 0)}, "a.idx: .* 0 document entries"),
        ({"tail": b"\0"}, "a.idx: .* the file is cut off or damaged"),
        ({"tail": bytes(9)}, r"a.idx: an index with a mode for each sequence \(multimodal data\)"),
        ({"tokens": bytes(20)}, "a.idx: its sequences take 22 bytes, but the .bin has 20"),
        ({"tokens": bytes(23)}, "a.idx: its sequences take 22 bytes, but the .bin has 23"),
        ({"pointers": [0, 6, 8, 12, 12, 14, 16, 18, 22]}, "a.idx: sequence 7 .from 0. starts at byte 18 of the .bin"),
        ({"pointers": [6, 0, 8, 12, 12, 14, 16, 16, 22]}, "a.idx: sequence 0 .from 0. starts at byte 6 of the .bin"),
        ({"lengths": [3, 1, -2, 0, 1, 1, 0, 3, 0]}, "a.idx: sequence 2 .from 0. has -2 tokens"),
        ({"indices": [1, 2, 2, 5, 6, 7, 8, 9]}, "a.idx: its documents do not begin with sequence 0"),
        ({"indices": [0, 2, 1, 5, 6, 7, 8, 9]}, "a.idx: its documents .* are not in order"),
        ({"indices": [0, 2, 2, 5, 6, 7, 8, 8]}, "a.idx: its documents end with sequence 8 of 9"),
        ({"indices": [0]}, "a.idx: its documents end with sequence 0 of 9; .* written without the documents' ends"),
        ({"indices": [0, 2**62]}, "a.idx: its documents end with sequence"),
    ],
)
def test_an_index_that_cannot_be_used_is_one_error_by_name(folder, changes, text):
    write_pair(folder / "ids" / "a", **changes)
    with pytest.raises(InputError, match=text):
        build(folder)


@pytest.mark.parametrize("code", [3, 4, 5, 2])
@pytest.mark.parametrize(("bad", "place"), [(-1, 1), (20, 2), (127, 0)])
def test_ids_that_the_tokenizer_lacks_are_named_with_file_document_and_place(folder, code, bad, place):
    ids = [3, 3, 3]
    ids[place] = bad
    write_pair(folder / "ids" / "a", [[[1]], [], [[]], [[2, 2], [*ids]], [[bad]]], code)
    with pytest.raises(InputError) as caught:
        build(folder)
    assert f"{folder}/ids/a.bin, document 3 (from 0): token id {bad} at place {2 + place}" in str(caught.value)
    assert "expected 0 to 19" in str(caught.value)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("path", ["ids", "ids/a", "ids/*", "ids/a.bin", "ids/a.idx"])
def test_half_a_pair_is_an_error(folder, suffix, path):
    (write_pair(folder / "ids" / "a").parent / f"a{suffix}").unlink()
    if path.endswith(suffix):  # gone, as any file may be
        with pytest.raises(InputError, match="matches no file"):
            build(folder, folder / path)
        return
    with pytest.raises(InputError, match=rf"a{suffix} is missing"):
        build(folder, folder / path)


def test_other_files_and_other_dtypes_are_refused_by_name(folder):
    write_pair(folder / "ids" / "a")
    write_pair(folder / "ids" / "b", code=4)
    with pytest.raises(InputError, match=r"b.bin: holds int32 and .*a.bin uint16; a source has one dtype"):
        build(folder)
    (folder / "ids" / "a.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"a.jsonl: beside .bin and .idx files of token ids, and no such file"):
        build(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("text_field", "content"),
        ("token_field", "ids"),
        ("processor", "a:b"),
        ("on_bad_record", "skip"),
        ("add_bos", True),
        ("add_eos", True),
    ],
)
def test_settings_of_texts_are_refused_by_name(folder, key, value):
    write_pair(folder / "ids" / "a")
    with pytest.raises(ConfigError, match=f"source 'web': {key} = {value!r}, but .* leave {key} out"):
        build(folder, **{key: value})


@given(st.data())
def test_any_bytes_in_an_index_give_its_documents_or_one_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    write_tokenizer(folder / "tokenizer", [18])
    path = write_pair(folder / "ids" / "a").with_name("a.idx")
    bad = bytearray(path.read_bytes())
    places = st.tuples(st.integers(0, len(bad) - 1), st.integers(0, 255))
    for place, value in data.draw(st.lists(places, max_size=8)):
        bad[place] = value
    cut = data.draw(st.one_of(st.just(len(bad)), st.integers(0, len(bad))))
    path.write_bytes(bytes(bad[:cut]) + data.draw(st.one_of(st.just(b""), st.binary(max_size=20))))
    try:
        found = build(folder)
    except InputError as error:
        assert "a.idx" in str(error) or "a.bin" in str(error)
    else:
        assert [token for document in documents_of(found) for token in document] == list(range(1, 12))


def test_a_sparse_file_beyond_2_to_the_32(folder):
    """E15: pointers, offsets of maps and counts are 64 bits wide."""
    lengths = [2**31 - 1, 2**31 - 1, 5]
    write_pair(
        folder / "ids" / "a",
        [[[0]], [[0]], [[0]]],
        lengths=lengths,
        pointers=[0, 2 * lengths[0], 4 * lengths[0]],
        tokens=b"",
    )
    path = folder / "ids" / "a.bin"
    with open(path, "r+b") as file:
        file.truncate(2 * sum(lengths))
        file.seek(-2, os.SEEK_END)
        file.write(b"\5\0")
    if path.stat().st_blocks * 512 > 2**28:
        pytest.skip("this file system has no sparse files")
    index = make_input(SourceConfig("web", str(path))).units(2**20)
    assert [unit[0].stop for unit in index] == [2 * lengths[0], 4 * lengths[0], 4 * lengths[0] + 10]
    # Reading 8 GiB of zeros for their hash is left out: the manifest is written by hand.
    content = {"format": 1, "documents": 1, "tokens": 5, "recipe": {}, "dtype": "<u2", "in_place": True}
    content["files"] = [{"name": "a.bin", "bytes": path.stat().st_size, "mtime_ns": 0}]
    span = {"file": 0, "start": 4 * lengths[0], "stop": 4 * lengths[0] + 10, "records": 1, "content": ""}
    content["shards"] = [
        {"name": "0", "documents": 1, "tokens": 5, "bin": "", "idx": "", "origin": "", "ranges": [span]}
    ]
    (folder / "manifest.json").write_text(canonical_json({**content, "hash": fingerprint(content)}))
    assert TokenStore(folder, folder / "ids").tokens(0).tolist() == [0, 0, 0, 0, 5]


def test_two_sequences_whose_document_is_too_long(folder):
    lengths = [2**31 - 1, 1]
    write_pair(folder / "ids" / "a", [[[0], [0]]], 1, lengths=lengths, pointers=[0, lengths[0]], tokens=b"")
    message = r"a.idx: document 0 .from 0. has 2,147,483,648 tokens"
    with megatron._Index(folder / "ids" / "a.idx", 2**31) as index, pytest.raises(InputError, match=message):
        index.document_tokens(0, 1)


# --- changes and moves ---


def test_a_file_that_changes_is_noticed_and_one_that_was_only_touched_is_not_refused(folder):
    prefix = write_pair(folder / "ids" / "a")
    store = build(folder).folder
    os.utime(f"{prefix}.bin", ns=(0, 5))
    assert build(folder).folder == store and list(store.glob("checked-*"))
    for suffix, place in ((".bin", 2), (".idx", 38)):
        path = Path(f"{prefix}{suffix}")
        good = path.read_bytes()
        path.write_bytes(good[:place] + b"\4" + good[place + 1 :])
        with pytest.raises(StoreError, match=rf"a{suffix}: edited since the store .* was built"):
            build(folder)
        path.write_bytes(good)
    assert build(folder).folder == store


def test_tokens_that_are_gone_or_cut_are_an_error(folder):
    path = write_pair(folder / "ids" / "a").with_name("a.bin")
    store = build(folder)
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    with pytest.raises(StoreError, match=r"a.bin: 20 bytes, but the manifest says 22; bring back the file"):
        store.tokens(0)
    path.unlink()
    with pytest.raises(StoreError, match=r"ids/a.bin: cannot be opened \(No such file"):
        store.tokens(0)
    with pytest.raises(InputError, match="a.bin is missing"):
        build(folder)
    (path.with_name("a.idx")).unlink()
    with pytest.raises(InputError, match=r"ids matches no file"):
        build(folder)


def test_a_build_that_was_stopped_goes_on_and_gives_the_same_bytes(folder, monkeypatch):
    write_pair(folder / "ids" / "a")
    expected = contents(build(folder, cache="whole").folder)
    made = []
    encoded = megatron._MegatronPiece.encoded

    def stop_at_third(self, largest_id):
        made.append(self._unit)
        if len(made) == 3:
            raise KeyboardInterrupt
        return encoded(self, largest_id)

    monkeypatch.setattr(megatron._MegatronPiece, "encoded", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        build(folder)
    found = build(folder)
    assert len(made) == 5  # the two that were finished are not read again
    assert contents(found.folder) == expected


def test_a_change_while_it_is_read_is_noticed(folder, monkeypatch):
    prefix = write_pair(folder / "ids" / "a")
    place_of = megatron._Index.documents_of
    monkeypatch.setattr(
        megatron._Index, "documents_of", lambda self, a, b: (os.utime(f"{prefix}.bin"), place_of(self, a, b))[1]
    )
    with pytest.raises(InputError, match=r"a.bin: changed while its source was tokenized"):
        build(folder)


def test_input_and_store_may_move_and_no_path_is_in_the_store(folder):
    write_pair(folder / "ids" / "a")
    before = build(folder)
    name, data = before.folder.name, contents(before.folder)
    (folder / "ids").rename(folder / "moved")
    (folder / "cache").rename(folder / "elsewhere")
    after = build(folder, folder / "moved" / "a.bin", cache="elsewhere")
    assert after.folder.name == name and contents(after.folder) == data
    assert documents_of(after) == JOINED
    assert not any(str(folder).encode() in content for content in data.values())


# --- reading ---


def test_a_store_that_was_not_told_where_its_tokens_are_says_so(folder):
    write_pair(folder / "ids" / "a")
    store = TokenStore(build(folder).folder)
    with pytest.raises(StoreError, match=r"its tokens are in a.bin of its source; say in which folder"):
        store.tokens(0)


def test_workers_get_the_folder_and_few_bytes(folder):
    write_pair(folder / "ids" / "a")
    store = build(folder)
    store.tokens(0)
    data = pickle.dumps(store)
    assert len(data) < 2000
    assert pickle.loads(data).tokens(1).tolist() == [5, 6, 7]


def test_many_shards_of_one_file_need_no_descriptors(folder):
    write_pair(folder / "ids" / "a", [[[1]]] * 100)
    store = build(folder)
    code = """
import resource, sys
from pathlib import Path
from zephon_patches.store.reader import TokenStore
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
store = TokenStore(Path(sys.argv[1]), Path(sys.argv[2]))
print(sum(int(store.tokens(shard).sum()) for shard in range(100)))
"""
    arguments = [sys.executable, "-c", code, str(store.folder), str(folder / "ids")]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("100\n", "")


def signed(store, change):
    content = json.loads((store / "manifest.json").read_bytes())
    del content["hash"]
    change(content)
    (store / "manifest.json").write_text(canonical_json({**content, "hash": fingerprint(content)}))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["files"][0].update(name="../ids/a.bin"),
        lambda m: m["files"][0].update(name="/etc/passwd"),
        lambda m: m["files"][0].update(name="a\0b"),
        lambda m: m["shards"][0]["ranges"][0].update(start=8, stop=16, file=2),
        lambda m: m["shards"][0]["ranges"][0].update(file=-1),
        lambda m: m["shards"][0]["ranges"][0].update(start=2**50, stop=2**50 + 8),
        lambda m: m["shards"][0]["ranges"][0].update(start=1, stop=9),
        lambda m: m["shards"][0]["ranges"][0].update(stop=10),
        lambda m: m["shards"][0]["ranges"][0].update(start=-8, stop=0),
        lambda m: m["shards"][0].update(ranges=[]),
        lambda m: m.update(in_place=1),
        lambda m: m.update(in_place="yes"),
        lambda m: m["files"][0].update(bytes=4),
    ],
)
def test_a_manifest_that_leads_out_of_the_folder_or_the_file_is_refused(folder, change):
    write_pair(folder / "ids" / "a")
    store = build(folder).folder
    signed(store, change)
    for reader in (lambda: TokenStore(store, folder / "ids").tokens(0), lambda: verify_store(store, folder / "ids")):
        with pytest.raises(StoreError, match="not what this version writes"):
            reader()


json_values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(
    st.sampled_from(["in_place", "dtype", "files.name", "files.bytes", "ranges.file", "ranges.start", "ranges.stop"]),
    st.one_of(
        json_values, st.integers(0, 30), st.sampled_from(["<i4", "|u1", "a.idx", ".", "", "\0", "\ud800", "a.bin/"])
    ),
)
def test_any_value_in_a_manifest_is_an_error_or_stays_inside_the_files(tmp_path_factory, place, value):
    folder = tmp_path_factory.mktemp("fuzz")
    write_tokenizer(folder / "tokenizer", [18])
    write_pair(folder / "ids" / "a")
    store = build(folder, shard_bytes=100).folder

    def change(manifest):
        part, _, key = place.partition(".")
        parts = {"files": manifest["files"][0], "ranges": manifest["shards"][0]["ranges"][0], part: manifest}
        (parts[part] if key else manifest)[key or part] = value

    try:
        signed(store, change)
    except UnicodeEncodeError:
        return  # JSON cannot hold it
    try:
        verify_store(store, folder / "ids")
        opened = TokenStore(store, folder / "ids")
        for shard in range(len(opened.tokens_per_shard)):
            opened.tokens(shard).sum()
    except StoreError:
        pass


def test_a_manifest_without_the_key_has_its_tokens_beside(folder):
    write_pair(folder / "ids" / "a")
    store = build(folder).folder
    signed(store, lambda m: m.pop("in_place"))
    with pytest.raises(StoreError, match=r"000000-000.bin: cannot be opened"):
        TokenStore(store, folder / "ids").tokens(0)


def test_verify_says_what_it_did_not_check(folder, capsys):
    prefix = write_pair(folder / "ids" / "a")
    store = build(folder).folder
    assert main(["verify", str(store)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        f"{store}: its tokens are in place, in a.bin: they were NOT checked; give their folder with --tokens-in FOLDER"
    )
    assert second == f"{store}: sound, 7 documents, 11 tokens, 4 shards"
    with_tokens = ["verify", str(store), "--tokens-in", str(folder / "ids")]
    assert main(with_tokens) == 0
    assert "NOT" not in capsys.readouterr().out
    assert main([*with_tokens, "--repair"]) == 1
    for suffix, place in ((".bin", 9), (".idx", 38)):
        path = Path(f"{prefix}{suffix}")
        good = path.read_bytes()
        path.write_bytes(good[:place] + b"\7" + good[place + 1 :])
        assert main(with_tokens) == 1
        out = capsys.readouterr().out
        assert f"{path}: its checksum is" in out and "1 files are the source's own; bring back" in out
        assert "make just them anew" not in out
        path.write_bytes(good[:-1])
        assert main(with_tokens) == 1
        assert f"{path}: {len(good) - 1} bytes, but" in capsys.readouterr().out
        path.unlink()
        assert main(with_tokens) == 1
        assert f"{path}: cannot be read (No such file" in capsys.readouterr().out
        path.write_bytes(good)
    (store / "000001-000.idx").write_bytes(b"")
    assert main(with_tokens) == 1
    assert "1 damaged shards; to make just them anew" in capsys.readouterr().out


def test_a_damaged_index_of_ours_is_made_anew(folder):
    write_pair(folder / "ids" / "a")
    store = build(folder).folder
    before = contents(store)
    (store / "000001-000.idx").write_bytes(b"")
    assert main(["verify", "--repair", str(store)]) == 0
    command = rebuild_command(build(folder).folder)
    assert contents(store) == before
    assert re.search(r"--source web=TEXTS --tokenizer TOKENIZER --cache-dir \S+ --shard-bytes 1$", command)


def test_the_command_prepares_it(folder, capsys):
    write_pair(folder / "ids" / "a")
    expected = build(folder)
    arguments = [
        "--source",
        f"web={folder}/ids/a",
        "--tokenizer",
        folder / "tokenizer",
        "--cache-dir",
        folder / "other",
    ]
    assert main(["prepare", *map(str, arguments), "--shard-bytes", "1"]) == 0
    assert re.search(r"^web +training +7 +11 .* 4 +- ", capsys.readouterr().out, re.MULTILINE)
    [made] = (folder / "other" / "web").iterdir()
    assert contents(made) == contents(expected.folder)


# --- training ---


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """60 documents of several sequences in two pairs, whose ids are their places."""
    folder = tmp_path_factory.mktemp("training")
    made = make_corpus(folder, [3 + 7 * i % 15 for i in range(60)])
    documents = [[ids[:2], ids[2:]] for ids in made.documents]
    write_pair(folder / "ids" / "a", documents[:40], 4)
    write_pair(folder / "ids" / "b", documents[40:], 4)
    return made


def loader_of(corpus, place, rank, **arguments):
    config = DataConfig(
        sources=[SourceConfig("web", str(corpus.folder / "ids"))],
        cache_dir=str(corpus.folder / "cache"),
        shard_bytes=300,
    )
    return build_loader(
        config,
        corpus.tokenizer,
        seq_len=8,
        global_batch_size=place.batch,
        local_batch_size=place.local,
        dp_rank=rank,
        dp_size=place.dp,
        num_workers=place.workers,
        **arguments,
    )


@pytest.mark.parametrize("place", [Place(3, 2), Place(2, 5), Place(1, 12, workers=2)])
def test_a_resume_elsewhere_goes_on_with_the_same_samples(corpus, place):
    build_one = lambda place, rank: loader_of(corpus, place, rank)  # noqa: E731
    expected = uninterrupted(build_one, 20)
    run = Run(build_one, Place(2, 3))
    for step in range(5):
        assert run.step() == expected[12 * step : 12 * step + 12]
    state = run.state()
    again = Run(build_one, place)
    again.load(state)
    for step in range(5, 14):
        assert again.step() == expected[12 * step : 12 * step + 12]


def test_spawned_workers_read_the_files_where_they_are(corpus):
    place = Place(1, 4, 4, workers=2)
    plain = [item[1].tolist() for item, _ in zip(loader_of(corpus, Place(1, 4, 4), 0), range(6), strict=False)]
    spawned = loader_of(corpus, place, 0, multiprocessing_context="spawn")
    assert [item[1].tolist() for item, _ in zip(spawned, range(6), strict=False)] == plain


def test_evaluation_reads_every_token(corpus):
    config = DataConfig(cache_dir=str(corpus.folder / "cache"), shard_bytes=300)
    source = make_input(SourceConfig("web", str(corpus.folder / "ids")))
    loader = build_evaluation_loader(config, corpus.tokenizer, seq_len=8, local_batch_size=4, inputs=[source])
    labels = [label for _, batch in loader for label in batch.flatten().tolist() if label >= 0]
    tokens = sum(len(ids) for ids in corpus.documents)
    shards = len(TokenStore(next((corpus.folder / "cache" / "web").iterdir())).tokens_per_shard)
    assert len(labels) == tokens - shards


# --- Megatron's own code ---

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)


@needs_megatron
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_what_megatron_s_builder_writes_is_read_in_place(folder, dtype):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    (folder / "ids").mkdir()
    prefix = folder / "ids" / "a_text_document"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in DOCUMENTS:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    other = IndexedDatasetBuilder(f"{folder}/other.bin", dtype=dtype)
    other.add_document(torch.tensor([17, 18, 19]), [2, 1])
    other.finalize(f"{folder}/other.idx")
    builder.add_index(f"{folder}/other")
    builder.finalize(f"{prefix}.idx")
    found = build(folder, prefix)
    assert documents_of(found) == [*JOINED, [17, 18, 19]]
    assert verify_store(found.folder, folder / "ids") == []


@needs_megatron
def test_megatron_opens_a_store_of_ours(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    ours = open_store(write_mixed(tmp_path))
    found = []
    for shard in ours.manifest.shards:
        data = IndexedDataset(str(ours.folder / shard.name), multimodal=False, mmap=True)
        assert len(data) == shard.documents and len(data.document_indices) == shard.documents + 1
        found += [data[i].tolist() for i in range(len(data))]
    assert found == documents_of(ours)
    assert len(found) == 60


# --- packings ---


@pytest.mark.parametrize("packing", ["best_fit", "document"])
def test_tokens_in_place_are_packed_by_plans_beside_the_store(folder, packing):
    write_pair(folder / "ids")
    source = SourceConfig("web", str(folder / "ids"))
    config = DataConfig(
        sources=[source], cache_dir=str(folder / "cache"), packing=packing, positions=True, shuffle_shards=0
    )
    loader = build_loader(
        config, folder / "tokenizer", seq_len=4, global_batch_size=1, local_batch_size=1, infinite=False
    )
    rows = [(inputs["input"].tolist()[0], labels.tolist()[0]) for inputs, labels in loader]
    expected = samples_of_documents(JOINED, 4, packing)
    assert [(list(row.inputs), list(row.labels)) for row in expected] == rows
    [store] = (folder / "cache" / "web").iterdir()
    assert (store / f"{packing}-4.json").exists()
    assert not list(folder.glob(f"ids*{packing}*"))
    assert main(["verify", str(store), "--tokens-in", str(folder)]) == 0
