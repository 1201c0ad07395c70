"""Which files a source has, in which order, and how they are cut into units."""

import glob
import json
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_patches.config import SourceConfig
from zephon_patches.errors import InputError
from zephon_patches.prepare import shards
from zephon_patches.prepare.shards import (
    FileInput,
    RecordInput,
    cut_units,
    finds,
    hash_range,
    list_files,
    shard_bytes_for,
)
from zephon_patches.store.manifest import InputRange


def source(path) -> FileInput:
    return FileInput(SourceConfig(name="web", path=str(path)))


def names(path) -> list[str]:
    return [file.name for file in source(path).files]


def make(folder, *names: str):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "a"}\n' if name.endswith(".jsonl") else "")
    return folder


def line(size: int) -> bytes:
    """A record of ``size`` bytes with its line end."""
    return b'{"text":"' + b"x" * (size - 12) + b'"}\n'


def write_lines(path: Path, sizes) -> tuple[Path, int]:
    path.write_bytes(b"".join(map(line, sizes)))
    return path, path.stat().st_size


# --- units ---


def test_worked_case_of_the_module(tmp_path):
    files = [write_lines(tmp_path / "a.jsonl", [40, 20]), write_lines(tmp_path / "b.jsonl", [40] * 5)]
    assert cut_units(files, 100) == [
        [InputRange(0, 0, 60), InputRange(1, 0, 40)],
        [InputRange(1, 40, 160)],
        [InputRange(1, 160, 200)],
    ]


sizes = st.lists(st.lists(st.integers(12, 60), max_size=12), min_size=1, max_size=5)


@settings(max_examples=150)
@given(sizes=sizes, shard_bytes=st.integers(1, 300), end=st.booleans())
def test_units_cover_every_record_once_in_order_and_cut_at_record_ends(tmp_path, sizes, shard_bytes, end):
    folder = tmp_path / "texts"
    folder.mkdir(exist_ok=True)
    files = [write_lines(folder / f"{i}.jsonl", lines) for i, lines in enumerate(sizes)]
    if end and sizes[-1]:  # the last line without its line end
        data = files[-1][0].read_bytes()[:-1]
        files[-1][0].write_bytes(data)
        files[-1] = (files[-1][0], len(data))
    units = cut_units(files, shard_bytes)

    ends = [
        {sum(lines[: i + 1]) for i in range(len(lines))} | {size} for lines, (_, size) in zip(sizes, files, strict=True)
    ]
    covered = [0] * len(files)
    for piece in (piece for unit in units for piece in unit):
        assert piece.start == covered[piece.file] < piece.stop
        assert piece.stop in ends[piece.file]
        assert all(covered[i] == files[i][1] for i in range(piece.file))  # in the order of the files
        covered[piece.file] = piece.stop
    assert covered == [size for _, size in files]
    # All but the last reach shard_bytes, and would not without their last record.
    for number, unit in enumerate(units):
        length = sum(piece.stop - piece.start for piece in unit)
        last = unit[-1]
        before = max([e for e in ends[last.file] if e < last.stop] + [last.start])
        assert length >= shard_bytes or number == len(units) - 1
        assert length - (last.stop - before) < shard_bytes
        assert len({piece.file for piece in unit}) == len(unit)


def test_txt_is_never_cut_and_parquet_at_row_groups_only(tmp_path):
    text = tmp_path / "a.txt"
    text.write_bytes(b"x" * 500)
    table = tmp_path / "b.parquet"
    pq.write_table(pa.table({"text": [f"{i}" * 100 for i in range(40)]}), table, row_group_size=10)
    units = cut_units([(text, 500), (table, table.stat().st_size)], 1)
    assert units == [[InputRange(0, 0, 500)], *([InputRange(1, i, i + 1)] for i in range(4))]


def test_files_without_records_are_in_no_unit(tmp_path):
    empty = tmp_path / "a.jsonl"
    empty.touch()
    assert cut_units([(empty, 0)], 100) == []
    assert cut_units([(empty, 0), write_lines(tmp_path / "b.jsonl", [20])], 100) == [[InputRange(1, 0, 20)]]


def test_default_shard_bytes_is_a_1024th_within_bounds():
    mib = 1 << 20
    assert shard_bytes_for(0, 0) == 256 * mib  # of unknown size
    assert shard_bytes_for(0, 1) == 16 * mib
    assert shard_bytes_for(0, 100 * 1024 * mib) == 100 * mib
    assert shard_bytes_for(0, 1 << 50) == 1024 * mib
    assert shard_bytes_for(7, 1 << 50) == 7


def test_offsets_go_past_2_and_4_gib(tmp_path):
    """E15: a sparse file; the cut after 5 GiB is at the line end that was written there."""
    path = tmp_path / "a.jsonl"
    size = 5 * 2**30
    with open(path, "wb") as file:
        for place in (2**31 + 10, 2**32 + 10, size - 1):
            file.seek(place)
            file.write(b"\n")
    if path.stat().st_blocks * 512 > 2**28:
        pytest.skip("this file system has no sparse files")
    units = cut_units([(path, size)], 2**31 + 1)
    assert units == [
        [InputRange(0, 0, 2**31 + 11)],
        [InputRange(0, 2**31 + 11, 2**32 + 11 if 2**32 + 11 > 2**32 + 12 else size)],
    ]


# --- the order of files ---


def test_order_is_that_of_the_names_bytes(tmp_path):
    """H08: digits, capitals, small letters, others; by code, not by any language's rules."""
    folder = make(tmp_path, "é.jsonl", "a.jsonl", "B.jsonl", "10.jsonl", "2.jsonl", "1.jsonl", "a/x.jsonl", "a-b.jsonl")
    expected = ["1.jsonl", "10.jsonl", "2.jsonl", "B.jsonl", "a-b.jsonl", "a.jsonl", "a/x.jsonl", "é.jsonl"]
    assert names(folder) == expected
    assert names(folder / "**/*.jsonl") == expected


def test_order_does_not_depend_on_what_the_file_system_lists_first(tmp_path, monkeypatch):
    folder = make(tmp_path, *(f"{a}/{b}.jsonl" for a in "cab" for b in "zyx"))
    expected = sorted(f"{a}/{b}.jsonl" for a in "abc" for b in "xyz")
    iterdir, find = Path.iterdir, glob.glob
    for seed in range(5):
        chance = random.Random(seed)

        def shuffled(entries, chance=chance):
            entries = list(entries)
            chance.shuffle(entries)
            return entries

        monkeypatch.setattr(Path, "iterdir", lambda self, shuffled=shuffled: iter(shuffled(iterdir(self))))
        monkeypatch.setattr(glob, "glob", lambda *a, shuffled=shuffled, **k: shuffled(find(*a, **k)))
        assert names(folder) == names(folder / "*/*.jsonl") == names(folder / "**") == expected


def test_name_that_is_not_utf8_has_a_place_in_the_order(tmp_path):
    bad = os.fsdecode(b"b\xff.jsonl")
    make(tmp_path, "a.jsonl", bad, "c.jsonl")
    assert names(tmp_path) == ["a.jsonl", bad, "c.jsonl"]
    assert json.loads(json.dumps(bad)) == bad  # and goes through the manifest


# --- which files ---


def test_folder_is_searched_at_any_depth_without_hidden_files(tmp_path):
    make(
        tmp_path,
        "a.jsonl",
        "b/c/d.jsonl",
        ".hidden.jsonl",
        "_SUCCESS",
        ".git/x.jsonl",
        "b/_meta/y.jsonl",
        "b/.DS_Store",
    )
    assert names(tmp_path) == ["a.jsonl", "b/c/d.jsonl"]


def test_one_file_is_a_source_whatever_its_name(tmp_path):
    make(tmp_path, "_a[1].jsonl", "b.jsonl")
    assert names(tmp_path / "_a[1].jsonl") == ["_a[1].jsonl"]


def test_glob_takes_files_and_folders(tmp_path):
    make(tmp_path, "x/1.jsonl", "x/y/2.jsonl", "x/3.txt", "z/4.jsonl", "w.jsonl")
    assert names(tmp_path / "*/*.jsonl") == ["x/1.jsonl", "z/4.jsonl"]
    assert names(tmp_path / "**/*.jsonl") == ["w.jsonl", "x/1.jsonl", "x/y/2.jsonl", "z/4.jsonl"]
    assert names(tmp_path / "[xz]") == ["x/1.jsonl", "x/3.txt", "x/y/2.jsonl", "z/4.jsonl"]  # whole folders
    assert names(tmp_path / "**") == ["w.jsonl", "x/1.jsonl", "x/3.txt", "x/y/2.jsonl", "z/4.jsonl"]  # each once
    assert names(tmp_path / "x" / "?.jsonl") == ["1.jsonl"]


def test_folder_and_glob_over_it_name_files_alike(tmp_path):
    make(tmp_path, "x/1.jsonl", "x/2.jsonl")
    assert source(tmp_path / "x").files == source(tmp_path / "x" / "*.jsonl").files


def test_relative_paths_work(tmp_path, monkeypatch):
    make(tmp_path, "x/1.jsonl", "2.jsonl")
    monkeypatch.chdir(tmp_path)
    assert names("*.jsonl") == names("./*.jsonl") == ["2.jsonl"]
    assert names(".") == ["2.jsonl", "x/1.jsonl"]
    assert names("x/../x/*.jsonl") == ["1.jsonl"]


def test_no_match_is_left_to_the_caller(tmp_path):
    assert names(tmp_path / "no.jsonl") == names(tmp_path / "no" / "*.jsonl") == names(make(tmp_path / "empty")) == []


def test_links_are_followed(tmp_path):
    make(tmp_path, "real/a.jsonl", "elsewhere/b.jsonl")
    (tmp_path / "real" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "real" / "c.jsonl").symlink_to(tmp_path / "elsewhere" / "b.jsonl")
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    assert names(tmp_path / "real") == ["a.jsonl", "c.jsonl", "link/b.jsonl"]
    assert source(tmp_path / "alias").files == source(tmp_path / "real").files


def test_links_in_a_circle_end(tmp_path):
    make(tmp_path, "a/1.jsonl", "b/2.jsonl")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "self").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "b").symlink_to(tmp_path / "b")
    (tmp_path / "b" / "a").symlink_to(tmp_path / "a")
    assert names(tmp_path) == ["a/1.jsonl", "a/b/2.jsonl", "b/2.jsonl", "b/a/1.jsonl"]


def test_link_that_leads_nowhere_is_an_input_error(tmp_path):
    make(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone")
    for path in (tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(InputError, match=r"b.jsonl: cannot be read \(No such file"):
            source(path)


def test_folder_that_cannot_be_listed_is_an_input_error(tmp_path, monkeypatch):
    make(tmp_path, "a/1.jsonl")

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InputError, match=r"cannot be read \(Permission denied"):
        source(tmp_path)


def test_folder_that_a_data_set_was_saved_to_is_its_arrow_files(tmp_path):
    files = ("data-00000-of-00002.arrow", "data-00001-of-00002.arrow", "state.json", "dataset_info.json")
    make(tmp_path, *files, *(f"two/train/{name}" for name in files), "two/dataset_dict.json")
    assert names(tmp_path) == [*files[:2], *(f"two/train/{name}" for name in files[:2])]
    make(tmp_path, "plain/a.jsonl", "plain/state.json")
    with pytest.raises(InputError, match=r"plain/state.json: files of this kind are not read"):
        names(tmp_path)


@pytest.mark.parametrize("name", ["notes.md", "x/a.jsonl.bz2", "a.xyz"])
def test_file_of_another_kind_is_refused_by_name(tmp_path, name):
    """E08: never read as something else, never left out in silence."""
    make(tmp_path, "a.jsonl", name)
    with pytest.raises(InputError, match=rf"{name}: files of this kind are not read"):
        source(tmp_path)
    assert names(tmp_path / "*.jsonl") == ["a.jsonl"]


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz", "b.parquet"])
def test_what_is_no_regular_file_is_refused_by_name(tmp_path, name, kind):
    """Its size is 0, so it would be left out in silence; or it would be waited for, for ever."""
    make(tmp_path, "a.jsonl")
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    for path in (tmp_path, tmp_path / name, tmp_path / "b*"):
        with pytest.raises(InputError, match=rf"{name}: no regular file but a pipe, a socket or a device"):
            source(path)


def test_name_that_is_too_long_matches_no_file(tmp_path):
    assert names(tmp_path / ("x" * 300)) == names(tmp_path / ("x" * 5000) / "*.jsonl") == []


@pytest.mark.parametrize(
    "path",
    [
        ".",
        "*",
        "**",
        "**/*",
        "*/*",
        "x",
        "x/*",
        "*/*.jsonl",
        "**/*.jsonl",
        "x/y/z.jsonl",
        "[x]",
        "[!x]/**/?.jsonl",
        "**/y",
        "**/_y/*",
        ".h*",
        "*/.h/*",
        "a.jsonl",
        "**/x/**/z.jsonl",
        "../*/x",
        "x/../*",
    ],
)
def test_what_a_path_finds_is_known_before_it_is_there(tmp_path, monkeypatch, path):
    folder = make(tmp_path / "root", "a.jsonl", "x/b.jsonl")
    monkeypatch.chdir(folder)
    root, _ = list_files(path)
    later = (
        "x/c.jsonl",
        "x/y/z.jsonl",
        "w/z.jsonl",
        "w/_y/z.jsonl",
        "x/.h/z.jsonl",
        ".h/z.jsonl",
        ".h.jsonl",
        "_a.jsonl",
    )
    expected = {name for name in later if finds(path, Path(name))}
    make(folder, *later)
    found = {os.path.realpath(root / file.name) for file in list_files(path)[1]}
    assert expected == {name for name in later if os.path.realpath(name) in found}


def test_records_know_size_and_time(tmp_path):
    make(tmp_path, "a.jsonl")
    os.utime(tmp_path / "a.jsonl", ns=(1, 1_600_000_000_123_456_789))
    (file,) = source(tmp_path).files
    assert (file.name, file.bytes, file.mtime_ns) == ("a.jsonl", 14, 1_600_000_000_123_456_789)


# --- hashes ---


@pytest.mark.parametrize("block", [1, 3, 7, 1 << 20])
def test_hash_of_a_range_is_that_of_its_bytes(tmp_path, monkeypatch, block):
    monkeypatch.setattr(shards, "_BLOCK", block)
    path = tmp_path / "a"
    path.write_bytes(bytes(range(100)))
    other = tmp_path / "b"
    other.write_bytes(bytes(range(10, 20)))
    assert hash_range(path, 10, 20) == hash_range(other, 0, 10) == hash_range(other, 0, 99)
    assert hash_range(path, 10, 20) != hash_range(path, 10, 21)


# --- records that are not in files ---


def record_texts(process, records=("a",)):
    piece = next(RecordInput("web", {}, lambda: records, process).pieces([InputRange(-1, 0, 0)], 1 << 20, 0))
    return list(piece), piece


@pytest.mark.parametrize(
    ("result", "expected"),
    [("x", ["x"]), ("", [""]), (None, []), ([], []), (["x", "y"], ["x", "y"]), (("x",), ["x"])],
)
def test_processor_gives_a_text_none_or_several(result, expected):
    found, piece = record_texts(lambda record: result)
    assert [text for _, text in found] == expected
    assert piece.ranges == [InputRange(-1, 0, 1, 1)]


@pytest.mark.parametrize(
    ("result", "kind"), [(5, "int"), ({"text": "x"}, "dict"), (["x", 3], "int"), (b"x", "bytes"), ([None], "NoneType")]
)
def test_processor_that_gives_something_else_is_named_with_the_record(result, kind):
    with pytest.raises(
        InputError, match=rf"source 'web', record 1 .counted from 0.: the processor gave {kind}, expected"
    ):
        record_texts(lambda record: result if record == "b" else "ok", ("a", "b"))


def test_processor_that_raises_is_named_with_the_record():
    with pytest.raises(InputError, match=r"record 2 .*: the processor raised KeyError\('text'\)") as caught:
        record_texts(lambda record: record["text"], ({"text": "a"}, {"text": "b"}, {}))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("error", [ConnectionError("no network"), ValueError("bad row")])
def test_records_that_cannot_be_read_are_an_input_error(error):
    def records():
        yield "a"
        yield "b"
        raise error

    with pytest.raises(InputError, match=r"source 'web', record 2 .*: cannot be read \(.*(no network|bad row)"):
        record_texts(lambda record: record, records())
