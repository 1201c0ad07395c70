"""``zephon-data verify``: what it prints, and its exit status."""

import re
import shlex

import pytest

from tests.prepare.stores import SHARD_BYTES, contents, open_store, write_mixed
from zephon_patches.cli.__main__ import main


@pytest.fixture
def mixed(tmp_path):
    return write_mixed(tmp_path)


def verify(*arguments):
    return main(["verify", *map(str, arguments)])


def test_sound_stores_have_status_0_and_a_cache_stands_for_its_stores(mixed, capsys):
    stores = [open_store(mixed).folder, open_store(mixed, shard_bytes=0).folder]
    assert verify(*stores) == 0
    each = capsys.readouterr().out.splitlines()
    assert each[0] == f"{stores[0]}: sound, 60 documents, 660 tokens, 8 shards"
    for above in (mixed / "cache", mixed / "cache" / "web"):
        assert verify(above) == 0
        assert sorted(capsys.readouterr().out.splitlines()) == sorted(each)


def test_the_command_that_is_named_makes_just_the_damage_anew(mixed, capsys):
    store = open_store(mixed).folder
    before = contents(store)
    (store / "000002-000.idx").write_bytes(b"")
    (store / "000005-000.bin").unlink()
    assert verify(store) == 1
    out = capsys.readouterr().out
    assert f"{store}/000002-000.idx: 0 bytes, but the manifest's counts give" in out
    assert f"{store}/000005-000.bin: cannot be read (No such file or directory)" in out
    command = re.search(r"2 damaged shards; to make just them anew: (.*)", out).group(1)
    command = command.replace("TEXTS", str(mixed / "texts")).replace("TOKENIZER", str(mixed / "tokenizer"))
    repair, prepare = (shlex.split(part) for part in command.split("&&"))
    assert (repair[0], prepare[0]) == ("zephon-data", "zephon-data")
    assert str(SHARD_BYTES) in prepare
    assert main(repair[1:]) == 0
    assert "2 damaged shards removed" in capsys.readouterr().out
    assert verify(store) == 1  # unfinished
    assert main(prepare[1:]) == 0
    assert contents(store) == before
    assert verify(store) == 0


def test_one_bad_store_does_not_hide_the_others(mixed, capsys):
    good, bad = open_store(mixed).folder, open_store(mixed, shard_bytes=0).folder
    (bad / "manifest.json").write_bytes(b"{}")
    for flags in ([], ["--repair"]):
        assert verify(bad, mixed / "absent", good, *flags) == 1
        lines = capsys.readouterr().out.splitlines()
        assert f"remove {bad} to build the store anew" in lines[0]
        assert "absent: no finished token store here (manifest.json is missing)" in lines[1]
        assert "sound" in lines[2]


@pytest.mark.parametrize("path", ["absent", "x" * 300, "circle", "file", "file/below"])
def test_what_is_no_store_is_told_with_status_1(tmp_path, monkeypatch, capsys, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").write_text("")
    assert verify(path) == 1
    out, err = capsys.readouterr()
    assert out.startswith(path) and out.count("\n") == 1 and err == ""
