"""Files appear whole or not at all."""

import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from zephon_patches.store.atomic import TEMPORARY_SUFFIX, atomic_file, write_atomic


def run(code: str, *args: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)], capture_output=True, text=True, timeout=60
    )


def test_file_has_its_name_only_when_the_block_has_ended(tmp_path):
    path = tmp_path / "a.bin"
    with atomic_file(path) as file:
        file.write(b"whole")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.bin"]


def test_writer_killed_in_the_middle_leaves_no_file_of_that_name(tmp_path):
    path = tmp_path / "a.bin"
    ended = run(
        """
        import os, signal, sys
        from pathlib import Path
        from zephon_patches.store.atomic import atomic_file
        with atomic_file(Path(sys.argv[1])) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        path,
    )
    assert ended.returncode == -signal.SIGKILL
    assert not path.exists()
    # What it does leave can be recognised, and is nobody's data.
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".") and left.name.endswith(TEMPORARY_SUFFIX)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_leaves_nothing_and_keeps_what_was_there(tmp_path, error):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_file(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.bin"]


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "a.bin"
    with atomic_file(path) as first, atomic_file(path) as second:
        first.write(b"1" * 10)
        second.write(b"2" * 20)
    assert path.read_bytes() == b"1" * 10  # the outer block ended last
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.bin"]


def test_bytes_are_flushed_to_the_disk_before_the_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    write_atomic(tmp_path / "a", b"x")
    assert calls == ["fsync", "rename", "fsync"]  # the file, its name, the folder


def test_missing_folder_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "no" / "a", b"x")


def test_a_link_in_the_place_of_a_temporary_file_is_not_written_through(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda count: "00" * count)
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    temporary = tmp_path / f".a.bin.{socket.gethostname()}.{os.getpid()}.00000000{TEMPORARY_SUFFIX}"
    temporary.symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "a.bin", b"new")
    assert victim.read_bytes() == b"mine"
    assert not (tmp_path / "a.bin").exists()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_permissions_are_those_of_any_new_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        with atomic_file(tmp_path / "a") as file:
            (temporary,) = tmp_path.iterdir()
            assert temporary.stat().st_mode & 0o777 == 0o666 & ~umask
            file.write(b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~umask
