"""A damaged store becomes an unfinished one whose next build makes just the damage."""

import gzip
import json
import os
import shutil

import pytest

from tests import corpora
from tests.prepare.stores import SHARD_BYTES, contents, document, file_input, open_store, write_mixed
from tests.prepare.test_build import Counted, open_records, records_input
from zephon_patches.config import SourceConfig
from zephon_patches.errors import StoreError
from zephon_patches.prepare.build import open_or_build
from zephon_patches.prepare.repair import reopen_store
from zephon_patches.prepare.shards import FileInput
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.prepare.unfinished import store_locked
from zephon_patches.store.verify import verify_store


@pytest.fixture
def mixed(tmp_path):
    return write_mixed(tmp_path)


def marks(folder):
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("[0-9]*")}


@pytest.mark.parametrize("kind", ["bin", "idx", "origin"])
@pytest.mark.parametrize("leftovers", [False, True])
def test_just_the_damaged_shards_are_made_again_and_the_bytes_are_as_before(mixed, kind, leftovers):
    folder = open_store(mixed).folder
    before, files = contents(folder), marks(folder)
    if leftovers:  # records of a builder that was killed after the manifest: of damaged shards too
        shutil.copytree(folder, mixed / "copy")
        reopen_store_with(folder, "000006-000.bin")
        shutil.copytree(folder / "units", mixed / "units")
        shutil.rmtree(folder)
        (mixed / "copy").rename(folder)
        (mixed / "units").rename(folder / "units")
        files = marks(folder)
    for name in ("000001-000", "000004-000"):
        (folder / f"{name}.{kind}").write_bytes(b"x" + (folder / f"{name}.{kind}").read_bytes()[1:])
    assert [damage.path.name for damage in reopen_store(folder)] == [f"000001-000.{kind}", f"000004-000.{kind}"]
    assert not (folder / "manifest.json").exists()
    tokenizer = Counted(mixed / "tokenizer")
    open_or_build(file_input(mixed), tokenizer, mixed / "cache", SHARD_BYTES)
    assert 0 < tokenizer.texts < 30
    assert contents(folder) == before
    assert verify_store(folder) == []
    now = marks(folder)
    assert {name[:10] for name in files if files[name] != now[name]} == {"000001-000", "000004-000"}


def reopen_store_with(folder, name):
    (folder / name).write_bytes(b"")
    reopen_store(folder)


def test_a_unit_of_several_shards_is_made_again_from_the_first_damaged_one_on(mixed):
    texts = [document(i) for i in range(60)]
    folder = open_records(mixed, records_input(texts)).folder
    before, files = contents(folder), marks(folder)
    (folder / "000000-003.idx").unlink()
    assert len(reopen_store(folder)) == 1
    assert open_records(mixed, records_input(texts)).folder == folder
    assert contents(folder) == before
    kept = {f"000000-00{part}" for part in range(3)}
    assert {name[:10] for name in files if files[name] == marks(folder)[name]} == kept


def test_a_compressed_file_with_skipped_records_is_made_again_to_the_same_bytes(tmp_path):
    lines = [json.dumps({"text": f"{i}_0 {i}_1"}) + "\n" for i in range(40)]
    lines[5] = lines[30] = "{\n"
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    tokenizer = TextTokenizer(corpora.write_tokenizer(tmp_path / "tokenizer", [2] * 40))

    def build():
        source = SourceConfig("web", str(tmp_path / "texts"), on_bad_record="skip")
        return open_or_build(FileInput(source), tokenizer, tmp_path / "cache", 300).folder

    folder = build()
    before = contents(folder)
    assert "skipped.jsonl" in before
    for damaged in ("000000-002.bin", "000000-000.idx"):
        (folder / damaged).write_bytes(b"")
        assert reopen_store(folder)
        assert build() == folder
        assert contents(folder) == before


@pytest.mark.parametrize("plan", [None, b"{", b'{"files": []}', "other"])
def test_a_store_without_its_plan_is_not_taken_apart(mixed, plan):
    folder = open_store(mixed).folder
    (folder / "000001-000.bin").write_bytes(b"")
    if plan == "other":  # by which the next build could not go on
        plan = (folder / "plan.json").read_bytes().replace(b"[[[0,0,", b"[[[0,9,")
    (folder / "plan.json").unlink()
    if plan is not None:
        (folder / "plan.json").write_bytes(plan)
    before = contents(folder)
    with pytest.raises(StoreError, match=r"plan\.json is missing or damaged"):
        reopen_store(folder)
    assert contents(folder) == before


def test_a_sound_store_is_left_alone(mixed):
    folder = open_store(mixed).folder
    before = contents(folder)
    assert reopen_store(folder) == []
    assert contents(folder) == before


def test_a_damaged_manifest_or_no_store_or_a_store_at_work_is_refused(mixed):
    folder = open_store(mixed).folder
    with store_locked(folder), pytest.raises(StoreError, match="another process builds this store"):
        reopen_store(folder)
    (folder / "manifest.json").write_bytes(b"{}")
    before = contents(folder)
    with pytest.raises(StoreError, match=f"remove {folder} to build the store anew"):
        reopen_store(folder)
    assert contents(folder) == before
    with pytest.raises(StoreError, match="no finished token store here"):
        reopen_store(mixed / "texts")
    assert len(os.listdir(mixed / "texts")) == 4


def test_a_repair_cut_off_at_any_moment_leaves_a_store_that_the_next_build_or_repair_makes_right(mixed, monkeypatch):
    folder = open_store(mixed).folder
    before = contents(folder)
    replace, unlink = os.replace, os.unlink
    left = 0

    def stop(*arguments, real):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    for moment in range(100):
        (folder / "000003-000.bin").write_bytes(b"")
        left = moment
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *paths: stop(*paths, real=replace))
            patch.setattr("pathlib.Path.unlink", lambda path, missing_ok=False: stop(path, real=unlink))
            try:
                reopen_store(folder)
                break
            except (KeyboardInterrupt, FileNotFoundError):
                pass
        if (folder / "manifest.json").exists():
            assert verify_store(folder)
            reopen_store(folder)
        open_store(mixed)
        assert {name: data for name, data in contents(folder).items() if not name.endswith(".tmp")} == before
    assert moment > 6
