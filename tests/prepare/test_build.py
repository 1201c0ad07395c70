"""The store of a source: built once, continued, shared, found again, refused."""

import errno
import gzip
import io
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import corpora
from tests.corpora import make_corpus, write_tokenizer
from tests.prepare.stores import (
    LENGTHS,
    SHARD_BYTES,
    begin_together,
    contents,
    document,
    documents_of,
    file_input,
    open_store,
    places_of,
    process,
    text_at,
    until_one_builds,
    write_compressed,
    write_mixed,
)
from zephon_patches import build_loader
from zephon_patches.errors import ConfigError, InputError, StoreError
from zephon_patches.prepare import build, builder, encoding, estimate, progress, readers, unfinished
from zephon_patches.prepare.build import Building, open_or_build
from zephon_patches.prepare.shards import FileInput, RecordInput, hash_range
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.store.manifest import InputRange, Manifest
from zephon_patches.store.reader import TokenStore

UNITS = 8


@pytest.fixture
def mixed(tmp_path):
    return write_mixed(tmp_path)


@pytest.fixture
def reference(tmp_path_factory):
    """The same store, built in one go elsewhere from files with the same times."""

    def build_elsewhere(folder):
        other = tmp_path_factory.mktemp("reference")
        shutil.copytree(folder / "texts", other / "texts")  # copies the times too
        shutil.copytree(folder / "tokenizer", other / "tokenizer")
        return contents(open_store(other).folder)

    return build_elsewhere


def unit_inodes(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of the files of each shard that is marked as finished."""
    found = {}
    for marker in (folder / "units").glob("[0-9]*.json"):
        for kind in ("bin", "idx", "origin"):
            path = folder / f"{marker.stem}.{kind}"
            found[path.name] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


def store_folder(folder: Path) -> Path | None:
    return next(iter((folder / "cache" / "web").glob("*")), None)


def patch_writes(monkeypatch, write) -> None:
    """Lets a builder write its small files another way."""
    for module in (build, builder, unfinished):
        monkeypatch.setattr(module, "write_atomic", write)


class Counted(TextTokenizer):
    """A tokenizer that counts the texts it is given, and may do something else first."""

    def __init__(self, folder, before=lambda texts: None):
        super().__init__(folder, engine="tokenizers")
        self._before = before
        self.texts = 0

    def encode_batch(self, texts):
        self._before(texts)
        self.texts += len(texts)
        return super().encode_batch(texts)


# --- what a store holds ---


def test_store_holds_every_document_in_the_order_of_the_files(mixed):
    store = open_store(mixed)
    assert documents_of(store) == corpora.documents(LENGTHS)
    assert len(store.manifest.shards) == UNITS
    assert store.manifest.documents == 60
    assert store.manifest.tokens == sum(LENGTHS) + 60
    assert [file.name for file in store.manifest.files] == ["a.jsonl", "b.parquet", "c.txt", "d/e.jsonl"]


def test_every_document_can_be_traced_to_its_line(mixed):
    store = open_store(mixed)
    places = places_of(store.manifest, store.folder)
    assert [text_at(mixed / "texts", *place) for place in places] == [document(i) for i in range(60)]
    assert {name for name, _ in places} == {file.name for file in store.manifest.files}
    # The test is about ranges: some file is cut, and some shard spans files.
    files_of_shards = [[piece.file for piece in shard.ranges] for shard in store.manifest.shards]
    assert any(len(files) > 1 for files in files_of_shards)
    assert sum(0 in files for files in files_of_shards) > 1


def test_folder_holds_the_shards_the_plan_the_manifest_and_nothing_else(mixed):
    store = open_store(mixed)
    shards = {f"{i:06d}-000.{kind}" for i in range(UNITS) for kind in ("bin", "idx", "origin")}
    assert set(contents(store.folder)) == shards | {"plan.json", "manifest.json"}
    assert sorted(path.name for path in mixed.iterdir()) == ["cache", "texts", "tokenizer"]
    assert len(list((mixed / "texts").rglob("*"))) == 5  # nothing is written beside the input


def test_ranges_carry_the_hashes_of_their_bytes(mixed):
    manifest = open_store(mixed).manifest
    assert file_input(mixed).check_content(piece for shard in manifest.shards for piece in shard.ranges) is None
    assert all(len(piece.content) == 32 for shard in manifest.shards for piece in shard.ranges)


def test_size_of_batches_leaves_no_trace(mixed, monkeypatch):
    whole = contents(open_store(mixed).folder)
    monkeypatch.setattr(encoding, "_BATCH_DOCUMENTS", 1)
    assert contents(open_store(mixed, cache="one").folder) == whole
    monkeypatch.setattr(encoding, "_BATCH_DOCUMENTS", 2048)
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 50)
    assert contents(open_store(mixed, cache="other").folder) == whole


def test_default_size_of_a_shard_keeps_a_small_source_whole(mixed):
    assert len(open_store(mixed, shard_bytes=0).manifest.shards) == 1


def test_finished_store_is_opened_without_reading_a_text(mixed):
    tokenizer = Counted(mixed / "tokenizer")
    first = open_or_build(file_input(mixed), tokenizer, mixed / "cache", SHARD_BYTES)
    again = open_or_build(file_input(mixed), tokenizer, mixed / "cache", SHARD_BYTES)
    assert first.folder == again.folder
    assert tokenizer.texts == 60


def test_documents_of_empty_texts_are_kept(tmp_path):
    write_tokenizer(tmp_path / "tokenizer", [3], eos=False)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text('{"text": ""}\n{"text": "0_0"}\n\n{"text": ""}\n')
    assert documents_of(open_store(tmp_path)) == [[], [0], []]


def test_unit_of_blank_lines_is_an_empty_shard(tmp_path):
    write_tokenizer(tmp_path / "tokenizer", [3])
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text("\n" * 20 + '{"text": "0_1 0_2"}\n' + "\n" * 20)
    store = open_store(tmp_path, shard_bytes=10)
    assert [shard.documents for shard in store.manifest.shards] == [0, 0, 1, 0, 0]
    assert documents_of(store) == [[1, 2, 4]]
    assert places_of(store.manifest, store.folder) == [("a.jsonl", 20)]


# --- killed and continued ---


def test_build_killed_at_random_moments_goes_on_and_gives_the_same_bytes(mixed, reference):
    """H11: what was finished is not touched again."""
    chance = random.Random(11)
    whole = reference(mixed)
    kills = in_the_middle = 0

    def finish_and_compare(finished):
        folder = open_store(mixed).folder
        assert contents(folder) == whole
        for name, mark in finished.items():
            assert ((folder / name).stat().st_ino, (folder / name).stat().st_mtime_ns) == mark
        shutil.rmtree(folder)

    finished: dict[str, tuple[int, int]] = {}
    while kills < 14 or (not in_the_middle and kills < 100):
        builder = process(mixed, seconds=0.01)
        assert builder.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0.0, 0.2))
        builder.kill()
        kills += builder.wait() == -signal.SIGKILL
        folder = store_folder(mixed)
        if folder is not None and not (folder / "manifest.json").exists():
            now = unit_inodes(folder)
            assert finished.items() <= now.items()
            in_the_middle += bool(now)
            finished = now
        elif folder is not None:
            finish_and_compare(finished)
            finished = {}
    finish_and_compare(finished)
    assert in_the_middle, "no kill came between the first shard and the last: the test shows nothing"


def test_build_killed_before_and_after_each_rename_goes_on_and_gives_the_same_bytes(mixed, reference):
    whole = reference(mixed)
    output, _ = process(mixed, 0, moment="each").communicate(timeout=300)
    moments = 2 * (1 + 4 * UNITS + 1)  # plan, each shard's three files and mark, manifest
    assert re.findall(r"^moment (\d+) ended with (\S+)$", output, re.M) == [
        *((str(moment), str(-signal.SIGKILL)) for moment in range(moments)),
        (str(moments), "0"),
    ], output
    finished = {path.parts[-4] for path in mixed.glob("cache-*/web/*/manifest.json")}
    assert finished == {f"cache-{moments - 1}", f"cache-{moments}"}
    for moment in range(moments):
        folder = open_store(mixed, cache=f"cache-{moment}").folder
        assert contents(folder) == whole
        assert not (folder / "units").exists()


# --- data sets saved to a disk ---


@pytest.mark.parametrize("splits", [False, True])
def test_data_set_saved_to_a_disk_gives_the_documents_of_its_rows(mixed, splits):
    datasets = pytest.importorskip("datasets")
    shutil.rmtree(mixed / "texts")
    data = datasets.Dataset.from_dict({"id": range(60), "text": [document(i) for i in range(60)]})
    if splits:
        data = datasets.DatasetDict({"train": data.select(range(40)), "train2": data.select(range(40, 60))})
        data.save_to_disk(mixed / "texts", num_shards={"train": 2, "train2": 1})
    else:
        data.save_to_disk(mixed / "texts", num_shards=3)
    store = open_store(mixed)
    tokenizer = TextTokenizer(mixed / "tokenizer")
    assert documents_of(store) == [tokenizer.encode_batch([document(i)])[0].tolist() for i in range(60)]
    assert [file.name.rpartition("/")[2][:10] for file in store.manifest.files] == (
        ["data-00000", "data-00001", "data-00000"] if splits else ["data-00000", "data-00001", "data-00002"]
    )
    assert [record for _, record in places_of(store.manifest, store.folder)] == [*range(20)] * 3


def test_arrow_file_gives_several_shards_and_goes_on_in_its_middle(mixed, reference):
    shutil.rmtree(mixed / "texts")
    (mixed / "texts").mkdir()
    table = pa.table({"text": [document(i) for i in range(60)]})
    with pa.ipc.new_stream(str(mixed / "texts" / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    assert process(mixed, 0, moment=2 * (1 + 4 * 3)).wait() == -signal.SIGKILL  # after three shards
    store = open_store(mixed)
    assert contents(store.folder) == reference(mixed)
    assert [shard.documents for shard in store.manifest.shards] == [7] * 8 + [4]
    assert [text_at(mixed / "texts", *place) for place in places_of(store.manifest, store.folder)] == [
        document(i) for i in range(60)
    ]


# --- bad records ---

BAD = {
    b'{"text": "0_0"': "not JSON",
    b"5": "not an object",
    b'{"txt": "0_0"}': "no field",
    b'{"text": null}': "wrong type",
    b'{"text": "\xe6"}': "not UTF-8",
    b'{"text": "\\ud800 0_0"}': "lone surrogate",
    b'{"text": "\\ud800": 0}': "not JSON",
}


def write_bad(folder: Path) -> list[tuple[str, int, str]]:
    """Bad lines in each kind of file among 60 good documents: what has to be in ``skipped.jsonl``."""
    write_compressed(folder)
    texts = folder / "texts"
    expected = []
    for name in ("a.jsonl", "b.json.gz", "d.jsonl"):
        data = (texts / name).read_bytes()
        lines = (gzip.decompress(data) if name.endswith("gz") else data).splitlines()
        mixed = [line for good, bad in itertools.zip_longest(lines, BAD) for line in (good, bad) if line is not None]
        expected += [(name, number, BAD[line]) for number, line in enumerate(mixed) if line in BAD]
        data = b"\n".join(mixed)
        (texts / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (texts / "c2.txt").write_bytes(b"caf\xe9")
    expected.insert(len(expected) - len(BAD), ("c2.txt", 0, "not UTF-8"))
    column = pa.array([b"0_0", None, b"\xff", b"0_1"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), texts / "f.parquet")
    return [*expected, ("f.parquet", 1, "wrong type"), ("f.parquet", 2, "not UTF-8")]


def skipped_of(store: TokenStore) -> list[tuple[str, int, str]]:
    lines = (store.folder / "skipped.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)[key] for key in ("file", "record", "reason")) for line in lines]


@pytest.mark.parametrize("shard_bytes", [100, SHARD_BYTES, 0])
def test_bad_records_are_left_out_counted_and_listed(tmp_path, caplog, shard_bytes):
    """E02, E05, E07: the other documents are those of the files without them."""
    expected = write_bad(tmp_path)
    with caplog.at_level(logging.WARNING):
        store = open_store(tmp_path, shard_bytes=shard_bytes, on_bad_record="skip")
    texts = [document(i) for i in range(60)] + ["0_0", "0_1"]
    tokenizer = TextTokenizer(tmp_path / "tokenizer")
    assert documents_of(store) == [tokenizer.encode_batch([text])[0].tolist() for text in texts]
    assert skipped_of(store) == expected
    assert store.manifest.skipped == dict(sorted(Counter(reason for *_, reason in expected).items()))
    assert sum(sum(shard.skipped.values()) for shard in store.manifest.shards) == len(expected) == 24
    places = places_of(store.manifest, store.folder)
    assert [text_at(tmp_path / "texts", *place) for place in places[:60]] == texts[:60]
    assert re.search(r"source 'web': skipped 24 records \(3 lone surrogate, 3 no field, .*skipped.jsonl", caplog.text)


def test_bad_records_stop_the_build_by_default(tmp_path):
    write_bad(tmp_path)
    with pytest.raises(InputError, match=r"a.jsonl, line 2: not a JSON record"):
        open_store(tmp_path)


def test_what_is_skipped_does_not_depend_on_interruptions(tmp_path, monkeypatch):
    write_bad(tmp_path)
    whole = contents(open_store(tmp_path, cache="whole", on_bad_record="skip").folder)
    write, passed = unfinished.write_atomic, 0

    class Killed(BaseException):
        pass

    def stop(*arguments):
        nonlocal passed
        passed += 1
        if passed > 6:
            raise Killed
        write(*arguments)

    patch_writes(monkeypatch, stop)
    for attempt in range(100):
        passed = 0
        try:
            store = open_store(tmp_path, on_bad_record="skip")
            break
        except Killed:
            if attempt < 3:  # the shard goes with its list, since it is not finished without it
                sorted((store_folder(tmp_path) / "units").glob("*.skipped"))[-1].unlink()
    monkeypatch.undo()
    assert contents(store.folder) == whole


def test_setting_for_bad_records_makes_a_store_of_its_own(mixed):
    store, other = open_store(mixed), open_store(mixed, on_bad_record="skip")
    assert store.folder != other.folder
    assert store.data_fingerprint == other.data_fingerprint
    assert not (other.folder / "skipped.jsonl").exists()
    assert b"skipped" not in (other.folder / "manifest.json").read_bytes()


# --- files that cannot be entered in the middle ---


def test_compressed_file_is_a_unit_that_gives_several_shards(tmp_path):
    store = open_store(write_compressed(tmp_path))
    ids, _ = TextTokenizer(tmp_path / "tokenizer").encode_batch([document(i) for i in range(60)])
    assert [token for tokens in documents_of(store) for token in tokens] == ids.tolist()
    names = [shard.name for shard in store.manifest.shards]
    parts = Counter(name.split("-")[0] for name in names)
    assert sorted(names) == names
    assert [parts[f"{unit:06d}"] > 1 for unit in range(5)] == [False, True, False, False, True]
    places = places_of(store.manifest, store.folder)
    assert [text_at(tmp_path / "texts", *place) for place in places] == [document(i) for i in range(60)]


def test_shards_of_a_compressed_file_are_cut_by_its_decompressed_bytes(tmp_path):
    store = open_store(write_compressed(tmp_path))
    lines = gzip.decompress((tmp_path / "texts" / "b.json.gz").read_bytes()).splitlines(keepends=True)
    shards = [shard for shard in store.manifest.shards if shard.ranges[0].file == 1]
    for shard in shards:
        first = shard.ranges[0]
        sizes = [len(line) for line in lines[first.start : first.stop]]
        assert first.records == len(sizes)
        assert sum(sizes[:-1]) < SHARD_BYTES
        assert sum(sizes) >= SHARD_BYTES or shard is shards[-1]
        assert first.content == ""
    assert [piece.start for shard in shards for piece in shard.ranges[:1]] == [
        0,
        *(shard.ranges[0].stop for shard in shards[:-1]),
    ]
    path = tmp_path / "texts" / "b.json.gz"
    whole = InputRange(1, 0, path.stat().st_size, 0, hash_range(path, 0, path.stat().st_size))
    assert [shard.ranges[1:] for shard in shards] == [[]] * (len(shards) - 1) + [[whole]]


def test_compressed_file_that_ends_with_a_shard_leaves_no_empty_one(tmp_path):
    (tmp_path / "texts").mkdir()
    row = b'{"text":"0_0"}\n'
    (tmp_path / "texts" / "a.jsonl.gz").write_bytes(gzip.compress(row * 8))
    write_tokenizer(tmp_path / "tokenizer", LENGTHS)
    store = open_store(tmp_path, shard_bytes=2 * len(row))
    assert [shard.documents for shard in store.manifest.shards] == [2] * 4


@pytest.mark.parametrize("moment", [7, 14, 20, 27, 34, 41])
def test_killed_build_of_compressed_files_goes_on_and_gives_the_same_bytes(tmp_path, reference, moment):
    write_compressed(tmp_path)
    assert process(tmp_path, 0, moment=moment).wait() == -signal.SIGKILL
    assert contents(open_store(tmp_path).folder) == reference(tmp_path)


def test_records_of_finished_shards_are_not_read_as_records_again(tmp_path, monkeypatch):
    write_compressed(tmp_path)
    process(tmp_path, 0, moment=2 * (1 + 4 * 3)).wait()  # after two shards of the second file
    folder = store_folder(tmp_path)
    done = sum(
        piece["records"]
        for path in (folder / "units").glob("000001*.json")
        for piece in json.loads(path.read_bytes())["ranges"]
    )
    assert done > 1
    seen = []
    read = readers._record_of_line
    monkeypatch.setattr(readers, "_record_of_line", lambda line, first: seen.append(line) or read(line, first))
    open_store(tmp_path)
    assert len(seen) == 37 - done + 9 + 10


@pytest.mark.parametrize("name", ["b.json.gz", "c.txt.zst", "e.jsonl.zst"])
def test_edited_compressed_file_of_the_same_size_is_refused_by_name(tmp_path, name):
    open_store(write_compressed(tmp_path))
    path = tmp_path / "texts" / name
    data = path.read_bytes()
    os.utime(path, ns=(1, 1))
    open_store(tmp_path)  # the same content
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StoreError, match=rf"{name}: edited since the store"):
        open_store(tmp_path)


def test_bad_record_in_a_later_shard_of_a_compressed_file_names_its_line(tmp_path):
    write_compressed(tmp_path)
    path = tmp_path / "texts" / "b.json.gz"
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join([*lines[:30], b"{}\n", *lines[30:]])))
    with pytest.raises(InputError, match=r"b.json.gz, line 31: no field 'text'"):
        open_store(tmp_path)
    with pytest.raises(InputError, match=r"b.json.gz, line 31: no field 'text'"):  # also when the build goes on
        open_store(tmp_path)


def test_build_of_compressed_files_is_estimated_by_their_own_size(tmp_path, monkeypatch):
    monkeypatch.setattr(estimate, "_ESTIMATED_BYTES", 100)
    write_compressed(tmp_path)
    source, tokenizer = file_input(tmp_path), TextTokenizer(tmp_path / "tokenizer")
    (piece, size) = source.sample(source.units(SHARD_BYTES)[1], 300)
    assert len(list(piece)) < 35 and 0 < size <= (tmp_path / "texts" / "b.json.gz").stat().st_size
    with pytest.raises(ConfigError, match="would take about"):
        open_or_build(source, tokenizer, tmp_path / "cache", SHARD_BYTES, building=Building(max_minutes=0))


def test_shard_that_was_lost_or_cut_before_the_end_is_made_again(mixed, reference):
    process(mixed, 0, moment=2 * 21).wait()  # after five shards
    folder = store_folder(mixed)
    assert len(unit_inodes(folder)) == 15
    (folder / "000001-000.bin").unlink()
    (folder / "000002-000.bin").write_bytes(b"x")
    (folder / "units" / "000003-000.json").write_bytes(b"{")
    assert contents(open_store(mixed).folder) == reference(mixed)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"files": 3}', b"[" * 100_000, b"\xff"])
def test_damaged_plan_starts_the_build_anew(mixed, reference, damage):
    process(mixed, 0, moment=2 * 11).wait()
    (store_folder(mixed) / "plan.json").write_bytes(damage)
    assert contents(open_store(mixed).folder) == reference(mixed)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"documents":', b'"documents":1e999,"x":'),
        (b'"documents":', b'"documents":-'),
        (b'"tokens":', b'"tokens":"5","x":'),
        (b'"000003-000"', b'"../000003-000"'),
        (b'"000003-000"', b'"000002-000"'),
        (b'"ranges":', b'"ranges":[3],"x":'),
        (b"{", b"[" * 100_000),
    ],
)
def test_record_of_a_finished_shard_that_is_no_such_is_as_good_as_none(mixed, reference, before, after):
    process(mixed, 0, moment=2 * 22).wait()
    path = store_folder(mixed) / "units" / "000003-000.json"
    damaged = path.read_bytes().replace(before, after, 1)
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    assert contents(open_store(mixed).folder) == reference(mixed)


@pytest.mark.parametrize("name", ["plan.json", "units/000000-000.json"])
def test_plan_or_record_with_another_digit_or_without_a_range_is_damaged(mixed, reference, name):
    """Else documents would be missing, or counted wrong, in silence."""
    process(mixed, 0, moment=2 * 11).wait()
    folder, whole = store_folder(mixed), reference(mixed)
    shutil.copytree(folder, mixed / "unfinished")
    text = (folder / name).read_text()
    places = [match.span() for match in re.finditer(r"\d|\[\d+,\d+,\d+\],?|\{\"content.*?\}", text)]
    for start, stop in random.Random(0).sample(places, 8):
        shutil.rmtree(folder)
        shutil.copytree(mixed / "unfinished", folder)
        other = "" if stop - start > 1 else str((int(text[start]) + 1) % 10)
        (folder / name).write_text(text[:start] + other + text[stop:])
        assert contents(open_store(mixed).folder) == whole, text[start:stop]


def test_files_with_other_times_start_an_unfinished_build_anew(mixed, reference, caplog):
    process(mixed, 0, moment=2 * 21).wait()
    folder = store_folder(mixed)
    (folder / "000099-000.bin").write_bytes(b"of a plan with more units")
    # Same size, other lines: the cuts may differ, so nothing of the first plan may stay.
    path = mixed / "texts" / "a.jsonl"
    path.write_bytes(path.read_bytes().replace(b"0_0", b"1_0"))
    os.utime(path, ns=(1, 1))
    with caplog.at_level(logging.INFO):
        assert contents(open_store(mixed).folder) == reference(mixed)
    assert "its files changed since the build began; the build starts anew" in caplog.text
    assert store_folder(mixed) == folder


def test_bad_record_stops_the_build_and_leaves_no_temporary_file(mixed):
    path = mixed / "texts" / "d" / "e.jsonl"
    path.write_text(path.read_text() + "\n{bad\n")
    for _ in range(2):
        with pytest.raises(InputError, match=r"d/e.jsonl, line 20: not a JSON record"):
            open_store(mixed)
    left = contents(store_folder(mixed))
    assert not [name for name in left if name.endswith(".tmp")]
    assert "manifest.json" not in left


@pytest.mark.parametrize("batch", [1, 2048])
def test_text_that_cannot_be_tokenized_is_named_by_file_and_line(mixed, monkeypatch, batch):
    monkeypatch.setattr(encoding, "_BATCH_DOCUMENTS", batch)

    def refuse(number):
        def before(texts):
            if document(number) in texts:
                raise RuntimeError("too long")

        return Counted(mixed / "tokenizer", before)

    for number, place in ((17, "a.jsonl, line 21"), (33, "b.parquet, row 14"), (40, "c.txt"), (59, "e.jsonl, line 19")):
        with pytest.raises(
            InputError, match=rf"{place}: cannot be tokenized \(too long\); the text starts '{number}_0"
        ):
            open_or_build(file_input(mixed), refuse(number), mixed / "cache", SHARD_BYTES)


# --- several processes ---


def read_until(builder: subprocess.Popen, pattern: str) -> str:
    for line in builder.stdout:
        if re.search(pattern, line):
            return line
    raise AssertionError(f"the process ended without a line {pattern!r}")


@pytest.mark.parametrize("number", [2, 6])
def test_several_builders_share_the_work_and_say_whom_they_wait_for(mixed, reference, number):
    """H02."""
    builders = [process(mixed, seconds=0.15, begin=False) for _ in range(number)]
    begin_together(builders)
    outputs = [builder.communicate(timeout=60)[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0] * number, outputs
    assert len({re.search(r"^store .*", output, re.M).group() for output in outputs}) == 1
    assert sum("built in" in output for output in outputs) == 1
    waits = [
        re.findall(rf"waiting for \d units that other builders hold; \d of {UNITS} units done", o) for o in outputs
    ]
    assert sum(map(bool, waits)) >= number - 1  # but for the one that closes the store
    built = [int(re.search(r"built (\d+)", output).group(1)) for output in outputs]
    assert sum(built) == UNITS
    assert max(built) <= UNITS - number + 1  # each had a part in it
    assert contents(store_folder(mixed)) == reference(mixed)
    assert not (store_folder(mixed) / "units").exists()


def test_waiting_builder_takes_over_the_unit_of_a_killed_one(mixed, reference):
    first = process(mixed, seconds=float("inf"))
    until_one_builds(mixed)
    others = [process(mixed, seconds=0.01) for _ in range(2)]
    for other in others:
        read_until(other, "waiting for 1 units that other builders hold; 7 of 8 units done")
    finished = unit_inodes(store_folder(mixed))
    first.kill()
    first.wait()
    outputs = [other.communicate(timeout=60)[0] for other in others]
    assert [other.returncode for other in others] == [0, 0], outputs
    assert sum("built in" in output for output in outputs) == 1
    assert contents(store_folder(mixed)) == reference(mixed)
    assert not (store_folder(mixed) / "units").exists()
    assert len(finished) == 3 * (UNITS - 1)
    for name, mark in finished.items():
        path = store_folder(mixed) / name
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == mark


def test_patience_leaves_the_building_to_another(mixed):
    other = process(mixed, seconds=0.01)
    tokenizer = Counted(mixed / "tokenizer")
    open_or_build(file_input(mixed), tokenizer, mixed / "cache", SHARD_BYTES, patience=60)
    assert tokenizer.texts == 0
    assert other.wait(timeout=60) == 0


# --- where the store lies, and when it is built anew ---


def key(store: TokenStore) -> list[str]:
    return store.folder.name.split("-")


def test_texts_and_store_may_move_together_and_apart(mixed, tmp_path):
    """H07: by mv, which keeps times, and through a link."""
    open_store(mixed)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("texts", "cache", "tokenizer"):
        shutil.move(mixed / name, moved / name)
    (tmp_path / "link").symlink_to(moved)
    for folder in (moved, tmp_path / "link"):
        tokenizer = Counted(folder / "tokenizer")
        store = open_or_build(file_input(folder), tokenizer, folder / "cache", SHARD_BYTES)
        assert tokenizer.texts == 0
        assert documents_of(store) == corpora.documents(LENGTHS)


def test_no_file_of_a_store_holds_an_absolute_path(mixed):
    for name, data in contents(open_store(mixed).folder).items():
        assert str(mixed).encode() not in data, name


def test_copy_with_new_times_is_compared_once_and_then_quiet(mixed, caplog, monkeypatch):
    folder = open_store(mixed).folder
    before = contents(folder)
    for path in (mixed / "texts").rglob("*"):
        os.utime(path, ns=(5_000, 5_000))
    checks = []
    check = FileInput.check_content
    monkeypatch.setattr(FileInput, "check_content", lambda self, ranges: (checks.append(1), check(self, ranges))[1])
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert open_store(mixed).folder == folder
    assert len(checks) == 1
    assert caplog.text.count("its files have other times than when they were read; comparing") == 1
    after = contents(folder)
    (marker,) = set(after) - set(before)
    assert marker.startswith("checked-")
    assert {name: after[name] for name in before} == before
    # Other times again: another look.
    os.utime(mixed / "texts" / "c.txt", ns=(6_000, 6_000))
    open_store(mixed)
    assert len(checks) == 2


def test_mark_that_cannot_be_written_does_not_stop_anybody(mixed, monkeypatch, caplog):
    open_store(mixed)
    os.utime(mixed / "texts" / "c.txt", ns=(6_000, 6_000))

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "write_atomic", full)
    with caplog.at_level(logging.INFO):
        open_store(mixed)
    assert caplog.text.count("comparing") == 1


@pytest.mark.parametrize("name", ["a.jsonl", "b.parquet", "c.txt", "d/e.jsonl"])
def test_edited_file_of_the_same_size_is_refused_by_name(mixed, name):
    folder = open_store(mixed).folder
    path = mixed / "texts" / name
    data = bytearray(path.read_bytes())
    place = data.rindex(b"_") - 1 if path.suffix != ".parquet" else data.index(b"_") - 1
    data[place] = ord("7") if data[place] != ord("7") else ord("8")
    path.write_bytes(data)
    os.utime(path, ns=(9_000, 9_000))
    for _ in range(2):
        with pytest.raises(
            StoreError, match=f"{name}: edited since the store {folder} was built from it .* remove {folder}"
        ):
            open_store(mixed)
    assert not list(folder.glob("checked-*"))


def test_file_of_another_size_or_name_or_a_further_one_gives_another_store(mixed):
    found = [key(open_store(mixed))]
    path = mixed / "texts" / "c.txt"
    path.write_text(path.read_text() + " 1_0")
    found.append(key(open_store(mixed)))
    path.rename(path.with_name("f.txt"))
    found.append(key(open_store(mixed)))
    (mixed / "texts" / "g.txt").write_text("2_0")
    found.append(key(open_store(mixed)))
    assert len({files for _, files in found}) == 4
    assert len({recipe for recipe, _ in found}) == 1


def test_other_tokenizer_field_or_shard_size_gives_another_recipe(mixed):
    """H05."""
    write_tokenizer(mixed / "other" / "tokenizer", LENGTHS, eos=False)
    for path in mixed.glob("texts/**/*.jsonl"):
        path.write_text(re.sub(r'\{"text": (.*)\}', r'{"text": \1, "content": \1}', path.read_text()))
    (mixed / "texts" / "b.parquet").unlink()
    stores = [
        open_store(mixed),
        open_store(mixed, tokenizer="other/tokenizer"),
        open_store(mixed, text_field="content"),
        open_store(mixed, shard_bytes=SHARD_BYTES + 1),
    ]
    assert len({key(store)[0] for store in stores}) == 4
    assert len({key(store)[1] for store in stores}) == 1
    assert open_store(mixed).folder == stores[0].folder


def test_names_of_the_key_stay_what_they_are(mixed):
    # Another recipe key means that every store built before is built again; another files key as well.
    os.utime(mixed / "texts" / "a.jsonl", ns=(1, 1))
    recipe, files = key(open_store(mixed))
    sizes = [[file.name, file.bytes] for file in file_input(mixed).files]
    tokenizer = TextTokenizer(mixed / "tokenizer").identity
    from zephon_patches.keys import fingerprint

    assert files == fingerprint(sizes)
    assert recipe == fingerprint(
        {"format": 1, "shard_bytes": SHARD_BYTES, "tokenizer": tokenizer, "text_field": "text"}
    )


def test_two_sources_of_the_same_files_have_stores_of_their_own(mixed):
    assert open_store(mixed, name="a").folder.parent != open_store(mixed, name="b").folder.parent


def test_two_cache_folders_get_the_same_content(mixed):
    """H01: as on nodes with disks of their own."""
    assert contents(open_store(mixed, cache="one").folder) == contents(open_store(mixed, cache="two").folder)


# --- the texts are gone ---


def test_the_one_store_is_used_when_the_texts_are_gone(mixed, caplog):
    """H13."""
    folder = open_store(mixed).folder
    open_store(mixed, shard_bytes=SHARD_BYTES + 1)  # another recipe's store is no candidate
    shutil.move(mixed / "texts", mixed / "away")
    with caplog.at_level(logging.INFO):
        store = open_store(mixed)
    assert store.folder == folder
    assert documents_of(store) == corpora.documents(LENGTHS)
    assert f"matches no file; using its store {folder}" in caplog.text


def test_several_stores_without_texts_are_listed(mixed):
    first = open_store(mixed).folder
    (mixed / "texts" / "c.txt").write_text("1_0 1_1")
    second = open_store(mixed).folder
    shutil.rmtree(mixed / "texts")
    with pytest.raises(InputError) as caught:
        open_store(mixed)
    assert str(first) in str(caught.value) and str(second) in str(caught.value)
    assert "there are 2 stores to choose from" in str(caught.value)


def test_neither_texts_nor_store_is_an_error_with_the_path(mixed):
    """G10: never an empty source."""
    shutil.rmtree(mixed / "texts")
    with pytest.raises(InputError, match=rf"source 'web': {mixed}/texts matches no file, and .* has no finished store"):
        open_store(mixed)


def test_unfinished_store_is_never_used_when_the_texts_are_gone(mixed):
    process(mixed, 0, moment=2 * 21).wait()
    shutil.rmtree(mixed / "texts")
    with pytest.raises(InputError, match="has no finished store"):
        open_store(mixed)


# --- input that changes under the builder ---


def once(action):
    done = []

    def before(texts):
        if not done:
            done.append(1)
            action()

    return before


def test_file_that_changes_while_it_is_read_is_refused(mixed, monkeypatch):
    monkeypatch.setattr(encoding, "_BATCH_DOCUMENTS", 1)
    for change in (
        lambda path: path.write_bytes(path.read_bytes() + b'{"text": "0_0"}\n'),
        lambda path: os.utime(path, ns=(7, 7)),
        lambda path: path.write_bytes(path.read_bytes()[:-50]),
    ):
        path = mixed / "texts" / "a.jsonl"
        tokenizer = Counted(mixed / "tokenizer", once(lambda path=path, change=change: change(path)))
        with pytest.raises(InputError, match=r"a.jsonl: (changed while its source was tokenized|ends at byte)"):
            open_or_build(file_input(mixed), tokenizer, mixed / "cache", SHARD_BYTES)


def test_change_between_reading_and_hashing_is_noticed(mixed, monkeypatch):
    path = mixed / "texts" / "c.txt"
    hash_piece = FileInput._hash

    def edited_before(self, piece):
        if self.files[piece.file].name == "c.txt":
            path.write_bytes(path.read_bytes().replace(b"0", b"9"))
            os.utime(path, ns=(7, 7))
        return hash_piece(self, piece)

    monkeypatch.setattr(FileInput, "_hash", edited_before)
    with pytest.raises(InputError, match="c.txt: changed while its source was tokenized"):
        open_store(mixed)


def test_change_after_reading_is_noticed_at_the_next_start(mixed):
    path = mixed / "texts" / "a.jsonl"

    def edit():
        path.write_bytes(path.read_bytes().replace(b"1_0", b"2_0"))
        os.utime(path, ns=(7, 7))

    # The last batch is tokenized when all files have been read.
    def before(texts):
        if document(59) in texts:
            edit()

    open_or_build(file_input(mixed), Counted(mixed / "tokenizer", before), mixed / "cache", SHARD_BYTES)
    with pytest.raises(StoreError, match="a.jsonl: edited since the store"):
        open_store(mixed)


def test_file_that_vanishes_is_an_input_error(mixed, monkeypatch):
    monkeypatch.setattr(encoding, "_BATCH_DOCUMENTS", 1)
    for name in ("a.jsonl", "d/e.jsonl"):
        path = mixed / "texts" / name
        data = path.read_bytes()
        tokenizer = Counted(mixed / "tokenizer", once(path.unlink))
        with pytest.raises(InputError, match=rf"{name}: (gone while its|cannot be read \(No such file)"):
            open_or_build(file_input(mixed), tokenizer, mixed / "cache", SHARD_BYTES)
        path.write_bytes(data)


def test_input_that_cannot_be_read_is_not_blamed_on_the_cache(mixed, monkeypatch):
    source = file_input(mixed)
    path = mixed / "texts" / "a.jsonl"
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match=r"a.jsonl: cannot be read \(Is a directory\)"):
        open_or_build(source, TextTokenizer(mixed / "tokenizer"), mixed / "cache", SHARD_BYTES)


# --- a cache that cannot be written to ---


@pytest.mark.parametrize("cache", ["/proc/cache", "/dev/null", "/dev/null/cache"])
def test_cache_that_cannot_be_written_to_is_named_with_the_setting(mixed, cache):
    with pytest.raises(
        StoreError, match=rf"^{cache}/web/.*: the store of source 'web' is not finished and cannot be"
    ) as error:
        open_or_build(file_input(mixed), TextTokenizer(mixed / "tokenizer"), cache, SHARD_BYTES)
    assert "set data.cache_dir to a folder with room" in str(error.value)


def test_cache_dir_that_is_a_file_is_named(mixed):
    (mixed / "cache").write_text("")
    with pytest.raises(StoreError, match=r"cannot be built here \(.*Not a directory"):
        open_store(mixed)


@pytest.mark.parametrize("cache", ["texts", "texts/cache", "texts/d/cache", "texts/../texts/cache"])
def test_cache_in_the_folder_of_its_source_is_refused(mixed, cache):
    with pytest.raises(
        ConfigError, match=r"data.cache_dir .* lies in the folder of source 'web', .*/texts, so its files"
    ):
        open_store(mixed, cache=cache)
    assert len(list((mixed / "texts").rglob("*"))) == 5


@pytest.mark.parametrize(
    "path, settings",
    [
        ("texts/*", {}),
        ("texts/**", {}),
        ("texts/**/*.json*", {}),
        ("*/[c]ache", {}),
        ("texts/**/*.bin", {}),
        ("texts/*/*/*/*.jsonl", {"on_bad_record": "skip"}),  # there is a skipped.jsonl then
    ],
)
def test_cache_within_the_reach_of_a_glob_is_refused_before_anything_is_built(mixed, path, settings):
    with pytest.raises(ConfigError, match=r"data.cache_dir .* lies in the folder of source 'web', .*, so its files"):
        open_store(mixed, cache="texts/cache", path=str(mixed / path), **settings)
    assert not (mixed / "texts" / "cache").exists()


def test_cache_beside_the_files_of_a_glob_or_under_a_skipped_name_is_fine(mixed):
    for cache, path in (
        ("texts/.cache", "texts"),
        ("texts/_cache", "texts"),
        ("texts/cache", "texts/*.jsonl"),
        ("texts/cache", "texts/**/*.jsonl"),
    ):
        folders = {open_store(mixed, cache=cache, path=str(mixed / path)).folder for _ in range(2)}
        assert len(folders) == 1


def read_only(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    patch_writes(monkeypatch, refuse)


def test_finished_store_on_a_read_only_disk_is_used(mixed, monkeypatch, caplog):
    folder = open_store(mixed).folder
    read_only(monkeypatch)
    assert open_store(mixed).folder == folder
    os.utime(mixed / "texts" / "c.txt", ns=(3, 3))
    with caplog.at_level(logging.INFO):
        assert open_store(mixed).folder == folder
    assert "unchanged, but" in caplog.text
    (mixed / "texts" / "c.txt").write_text("x" * (mixed / "texts" / "c.txt").stat().st_size)
    with pytest.raises(StoreError, match="c.txt: edited since"):
        open_store(mixed)


def test_unfinished_store_on_a_read_only_disk_is_refused(mixed, monkeypatch):
    process(mixed, 0, moment=2 * 21).wait()
    read_only(monkeypatch)
    with pytest.raises(StoreError, match=r"not finished and cannot be built here \(.*Read-only file system"):
        open_store(mixed)


def test_full_disk_is_a_store_error_and_the_build_goes_on_later(mixed, monkeypatch, reference):
    write = unfinished.write_atomic
    written = []

    def full(path, data):
        if len(written) == 5:
            raise OSError(28, "No space left on device")
        written.append(path)
        write(path, data)

    patch_writes(monkeypatch, full)
    with pytest.raises(StoreError, match="No space left on device.*a folder with room"):
        open_store(mixed)
    patch_writes(monkeypatch, write)
    assert contents(open_store(mixed).folder) == reference(mixed)


def test_damaged_manifest_is_refused_with_the_way_out(mixed):
    folder = open_store(mixed).folder
    (folder / "manifest.json").write_bytes(b"{}")
    with pytest.raises(StoreError, match=f"remove {folder} to build the store anew"):
        open_store(mixed)
    shutil.rmtree(folder)
    assert documents_of(open_store(mixed)) == corpora.documents(LENGTHS)


# --- registered data sets ---


def records_input(records, process=lambda record: record, **settings) -> RecordInput:
    return RecordInput("web", {"dataset": "numbers"}, lambda: iter(records), process, **settings)


def open_records(folder, source, shard_bytes=400, cache="cache", tokenizer=None) -> TokenStore:
    tokenizer = tokenizer or TextTokenizer(folder / "tokenizer")
    return open_or_build(source, tokenizer, folder / cache, shard_bytes)


def test_records_are_cut_into_shards_by_the_size_of_their_texts(mixed):
    texts = [document(i) for i in range(60)]
    store = open_records(mixed, records_input(texts))
    assert documents_of(store) == corpora.documents(LENGTHS)
    start = 0
    for shard in store.manifest.shards[:-1]:
        (piece,) = shard.ranges
        assert (piece.file, piece.start) == (-1, start)
        sizes = [len(text) for text in texts[piece.start : piece.stop]]
        assert sum(sizes) >= 400 > sum(sizes[:-1])
        assert piece.records == shard.documents == len(sizes)
        start = piece.stop
    assert len(store.manifest.shards) > 5


def test_records_of_none_or_several_texts_keep_their_numbers(mixed):
    def some(record):
        kept = [document(i) for i in (record, record + 1) if i % 5]
        return kept[0] if len(kept) == 1 and record % 2 else kept or None

    records = range(0, 60, 2)
    store = open_records(mixed, records_input(records, some))
    expected = [i for record in records for i in (record, record + 1) if i % 5]
    assert documents_of(store) == [corpora.documents(LENGTHS)[i] for i in expected]
    assert places_of(store.manifest, store.folder) == [("", i // 2) for i in expected]


def test_processor_that_raises_stops_the_build_with_the_record(mixed):
    def process(record):
        return document(record) if record != 41 else 1 / 0

    with pytest.raises(
        InputError, match=r"source 'web', record 41 .counted from 0.: the processor raised ZeroDivision"
    ):
        open_records(mixed, records_input(range(60), process))


def test_text_of_a_record_that_cannot_be_tokenized_is_named(mixed):
    def before(texts):
        if document(41) in texts:
            raise RuntimeError("no")

    with pytest.raises(InputError, match=r"source 'web', record 41 .counted from 0.: cannot be tokenized \(no\)"):
        open_records(mixed, records_input(map(document, range(60))), tokenizer=Counted(mixed / "tokenizer", before))


def test_unit_of_records_goes_on_in_its_middle(mixed):
    texts = [document(i) for i in range(60)]
    whole = contents(open_records(mixed, records_input(texts), cache="whole").folder)

    def fail_at(stop):
        def records():
            yield from texts[:stop]
            raise ConnectionError("gone")

        return RecordInput("web", {"dataset": "numbers"}, records, lambda record: record)

    finished = {}
    for stop in (20, 30, 59):
        with pytest.raises(InputError, match=rf"record {stop} .*gone"):
            open_records(mixed, fail_at(stop))
        now = unit_inodes(store_folder(mixed))
        assert finished.items() < now.items()
        finished = now
    tokenizer = Counted(mixed / "tokenizer")
    store = open_records(mixed, records_input(texts), tokenizer=tokenizer)
    assert contents(store.folder) == whole
    assert tokenizer.texts < 10


def test_local_files_of_a_data_set_are_watched(mixed):
    """The records come from a loader, yet a changed file is noticed as for other sources."""

    def records():
        for i in range(60):
            if i == 30 and changing:
                (mixed / "texts" / "c.txt").write_text("other")
            yield document(i)

    def source():
        return RecordInput("web", {"dataset": "numbers"}, records, lambda record: record, mixed / "texts")

    changing = False
    folder = open_records(mixed, source()).folder
    os.utime(mixed / "texts" / "c.txt", ns=(4, 4))
    assert open_records(mixed, source()).folder == folder
    path = mixed / "texts" / "d" / "e.jsonl"
    path.write_bytes(path.read_bytes().replace(b"5", b"6"))
    os.utime(path, ns=(4, 4))
    with pytest.raises(StoreError, match="d/e.jsonl: edited since"):
        open_records(mixed, source())
    changing = True
    with pytest.raises(InputError, match="c.txt: changed while its source was tokenized"):
        open_records(mixed, source(), cache="other")


def training(**settings):
    return SimpleNamespace(**{"dataset": "Numbers", "dataset_path": None, **settings})


def test_registered_data_set_is_a_source(mixed):
    from zephon_patches.titan.build import _registered

    def loader(path):
        assert path == "hub/numbers"
        return ({"body": document(i)} for i in range(60))

    registry = {"numbers": SimpleNamespace(path="hub/numbers", loader=loader, sample_processor=lambda r: r["body"])}
    source = _registered("training", training(), registry)
    assert source.name == "numbers"
    assert source.recipe()["path"] == "hub/numbers"
    assert documents_of(open_records(mixed, source)) == corpora.documents(LENGTHS)
    with pytest.raises(ConfigError, match=r"training.dataset = 'none' is not registered \(registered are numbers\)"):
        _registered("training", training(dataset="none"), registry)


def test_registered_data_set_that_cannot_be_loaded_says_what_to_set(mixed):
    from zephon_patches.titan.build import _registered

    def loader(path):
        raise ConnectionError("offline")

    registry = {"numbers": SimpleNamespace(path="hub/numbers", loader=loader, sample_processor=str)}
    with pytest.raises(
        InputError, match=r"'numbers' cannot be loaded from 'hub/numbers' \(offline\); set training.dataset"
    ):
        open_records(mixed, _registered("training", training(), registry))


def test_torchtitans_registry_reads_a_local_folder_without_network(mixed):
    pytest.importorskip("torchtitan")
    shutil.rmtree(mixed / "texts")
    for number in range(3):
        corpora.write_jsonl(mixed / "texts" / f"{number}.jsonl", LENGTHS[number * 20 : number * 20 + 20], number * 20)
    code = """
        import sys
        from types import SimpleNamespace
        from torchtitan.hf_datasets.text_datasets import DATASETS
        from zephon_patches.prepare.build import open_or_build
        from zephon_patches.prepare.tokenizers import TextTokenizer
        from zephon_patches.titan.build import _registered
        folder = sys.argv[1]
        source = _registered("training", SimpleNamespace(dataset="c4_test", dataset_path=folder + "/texts"), DATASETS)
        store = open_or_build(source, TextTokenizer(folder + "/tokenizer"), folder + "/cache", 900)
        print("store", store.folder)
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(mixed / "hf"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    for _ in range(2):  # the second start finds the store
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(mixed)],
            env=environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stderr
        store = TokenStore(Path(re.search(r"^store (.*)", ended.stdout, re.M).group(1)))
        assert documents_of(store) == corpora.documents(LENGTHS)
        assert [file.name for file in store.manifest.files] == ["0.jsonl", "1.jsonl", "2.jsonl"]
        assert len(store.manifest.shards) > 3
        shutil.rmtree(mixed / "hf", ignore_errors=True)


# --- the laws, through the store ---


@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize("shard_bytes", [100, SHARD_BYTES, 0])
def test_labels_of_an_epoch_are_each_token_but_the_first_of_each_shard_once(mixed, dp, shard_bytes):
    """Law 3."""
    corpus = corpora.Corpus(mixed, LENGTHS, True)
    labels: Counter = Counter()
    for rank in range(dp):
        loader = build_loader(
            corpus.config(shard_bytes=shard_bytes),
            corpus.tokenizer,
            seq_len=8,
            global_batch_size=12,
            local_batch_size=2,
            dp_rank=rank,
            dp_size=dp,
            infinite=False,
        )
        for _, batch in loader:
            labels.update(batch[batch >= 0].tolist())
    store = open_store(mixed, shard_bytes=shard_bytes)
    expected: Counter = Counter()
    for shard in range(len(store.manifest.shards)):
        expected.update(store.tokens(shard)[1:].tolist())
    assert labels == expected
    assert labels.total() == store.manifest.tokens - len(store.manifest.shards)


# --- how far it is ---

LINE = re.compile(
    r"source 'web': tokenizing, (\d+) of (\d+) units done, [\d.]+ MB, ([\d,]+) documents, ([\d,]+) tokens, "
    r"([\d,]+) tokens/s, "
    r"about ([\d,]+) s left"
)


class Clock:
    """Time that passes only when texts are tokenized: one second for each."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def slow(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    monkeypatch.setattr(encoding, "_BATCH_DOCUMENTS", 1)

    def tokenizer(folder):
        def second(texts):
            clock.now += 1

        return Counted(folder / "tokenizer", second)

    return tokenizer


def log_lines(caplog) -> list[list[int]]:
    found = [LINE.fullmatch(record.message) for record in caplog.records]
    return [[int(value.replace(",", "")) for value in match.groups()] for match in found if match]


def test_slow_build_logs_documents_tokens_speed_and_time_left(tmp_path, slow, caplog):
    corpus = make_corpus(tmp_path, [10] * 100)
    with caplog.at_level(logging.INFO):
        open_or_build(file_input(tmp_path), slow(tmp_path), tmp_path / "cache", sum(corpus.line_bytes) // 10 + 1)
    lines = log_lines(caplog)
    assert len(lines) == 10  # one for each 10 s of 100 s
    for unit, units, documents, tokens, rate, left in lines:
        assert units == 10
        assert abs(unit - ((documents - 1) // 10 + 1)) <= 1
        assert tokens == 11 * documents
        assert rate == 11
        assert left == pytest.approx(100 - documents, abs=8 if unit > 1 else 60)  # before any unit is done, a guess
    assert re.search(r"source 'web': 100 documents, 1,100 tokens in 10 shards, built in 100 s: ", caplog.text)


def test_time_left_is_right_for_compressed_input_too(tmp_path, slow, caplog):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_tokenizer(tmp_path / "tokenizer", [3])
    (tmp_path / "texts").mkdir()
    texts = ["0_0 " * 500] * 100  # compresses to nearly nothing
    pq.write_table(pa.table({"text": texts}), tmp_path / "texts" / "a.parquet", row_group_size=10, compression="zstd")
    with caplog.at_level(logging.INFO):
        open_or_build(file_input(tmp_path), slow(tmp_path), tmp_path / "cache", 1)
    for *_, documents, _, _, left in log_lines(caplog)[1:]:
        assert left == pytest.approx(100 - documents, abs=6)


def test_speed_and_time_left_of_a_continued_build_are_of_this_run(tmp_path, slow, caplog):
    corpus = make_corpus(tmp_path, [10] * 100)
    shard_bytes = sum(corpus.line_bytes) // 10 + 1

    def stop(texts):
        if corpora.line(75, 10)[10:20] in texts[0]:
            raise RuntimeError

    with pytest.raises(InputError):
        open_or_build(file_input(tmp_path), Counted(tmp_path / "tokenizer", stop), tmp_path / "cache", shard_bytes)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        open_or_build(file_input(tmp_path), slow(tmp_path), tmp_path / "cache", shard_bytes)
    lines = log_lines(caplog)
    assert lines
    for _, _, documents, tokens, rate, left in lines:
        assert documents > 60
        assert tokens == 11 * documents  # of the whole store
        assert rate == 11  # of this run
        assert left == pytest.approx(100 - documents, abs=9)


@pytest.mark.parametrize("continued", [False, True])
def test_terminal_shows_a_bar_and_no_lines(mixed, monkeypatch, caplog, continued):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    if continued:
        process(mixed, 0, moment=2 * 21).wait()
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "_PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(encoding, "_BATCH_DOCUMENTS", 1)
    before = Counted(mixed / "tokenizer", lambda texts: time.sleep(0.02))
    with caplog.at_level(logging.INFO):
        open_or_build(file_input(mixed), before, mixed / "cache", SHARD_BYTES)
    frames = sys.stderr.getvalue().split("\r")
    bars = [re.search(r"tokenize web: +(\d+)%.*\d+ documents, \d+ tokens, \d+ tokens/s", frame) for frame in frames]
    shown = [int(bar.group(1)) for bar in bars if bar]
    assert shown == sorted(shown)
    assert (shown[0] > 50) == continued
    assert shown[-1] > 90
    assert not log_lines(caplog)


def test_manifest_is_a_function_of_the_input_alone(mixed):
    first = open_store(mixed)
    assert Manifest.read(first.folder).to_json() == (first.folder / "manifest.json").read_bytes()
    assert first.manifest.dtype == np.dtype("<u2").str


# What a review found


def test_a_file_system_without_locks_is_refused_by_name(mixed, monkeypatch):
    def flock(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(StoreError, match="no file locks"):
        open_store(mixed)


def test_a_build_of_unknown_size_ends_at_the_limit_and_is_continued(tmp_path):
    tokenizer = TextTokenizer(write_tokenizer(tmp_path / "tokenizer", [1] * 60))

    def source():
        return RecordInput("hub", {"dataset": "hub"}, lambda: iter([f"{i}_0" for i in range(60)]), lambda text: text)

    with pytest.raises(ConfigError, match="not done after data.max_build_minutes = 0; what is done is kept"):
        open_or_build(source(), tokenizer, tmp_path, 40, building=Building(max_minutes=0))
    assert len(list(tmp_path.glob("hub/*/units/*.json"))) == 1
    whole = open_or_build(source(), tokenizer, tmp_path, 40)
    assert whole.num_documents == 60
