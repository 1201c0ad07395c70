"""Disks that are full or cannot be written to: small file systems in memory, as only root can mount them."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.prepare.stores import SHARD_BYTES, contents, open_store, process, write_mixed
from zephon_patches.errors import StoreError
from zephon_patches.store.atomic import TEMPORARY_SUFFIX
from zephon_patches.store.reader import TokenStore

PAGE = os.sysconf("SC_PAGE_SIZE")


def mount(folder: Path, options: str) -> None:
    """Mounts a file system in memory, or changes the one that is there."""
    command = shutil.which("mount")
    if command is None or os.getuid() != 0:
        pytest.skip("mounting a file system takes Linux and root")
    ended = subprocess.run([command, "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if ended.returncode:
        pytest.skip(f"mounting a file system is not allowed here: {ended.stderr.strip()}")


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """Makes the disk that holds the folder ``cache``, or changes it."""
    folder = tmp_path / "cache"
    folder.mkdir()

    def set_up(options: str) -> Path:
        mount(folder, options if not folder.is_mount() else f"remount,{options}")
        return folder

    yield set_up
    if folder.is_mount():
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("resource, start", [("size", PAGE), ("nr_inodes", 2)])
def test_a_disk_that_fills_up_at_any_point_is_one_error_and_a_rerun_gives_the_same_bytes(
    disk, tmp_path, resource, start
):
    """The disk grows by the least there is, from too small for anything to large enough: it is full at every write."""
    folder = write_mixed(tmp_path)
    whole = contents(open_store(folder, cache="roomy").folder)
    refused, step = 0, PAGE if resource == "size" else 1
    for amount in range(start, start + 200 * step, step):
        cache = disk(f"{resource}={amount}")
        try:
            store = open_store(folder)
        except StoreError as error:
            refused += 1
            assert "No space left on device" in str(error)
            assert "data.cache_dir to a folder with room" in str(error)
            left = [path.name for path in cache.rglob("*") if path.name.endswith(TEMPORARY_SUFFIX)]
            assert not [name for name in left if not name.startswith(".progress.json.")]  # the next start removes it
            assert not list(cache.rglob("manifest.json"))
        else:
            break
    assert refused > 20
    assert contents(store.folder) == whole


def test_a_finished_store_on_a_read_only_disk_is_used_and_an_unfinished_one_refused(disk, tmp_path, caplog):
    folder = write_mixed(tmp_path)
    cache = disk("size=4m")
    process(folder, 0, moment=44).wait(timeout=60)  # kills itself
    before = contents(cache)
    disk("ro")
    with pytest.raises(StoreError, match=r"not finished and cannot be built here \(.*Read-only file system"):
        open_store(folder)
    assert contents(cache) == before
    disk("rw")
    built = open_store(folder).folder
    before = contents(built)
    disk("ro")
    assert TokenStore(built).tokens(0)[0] >= 0
    assert open_store(folder).folder == built
    os.utime(folder / "texts" / "c.txt", ns=(3, 3))
    with caplog.at_level(logging.INFO):
        assert open_store(folder).folder == built
    assert "unchanged, but" in caplog.text
    assert contents(built) == before
    shutil.rmtree(folder / "texts")
    with pytest.raises(StoreError, match="cannot be written|cannot be built here|Read-only"):
        open_store(write_mixed(tmp_path / "other"), cache="../cache", shard_bytes=SHARD_BYTES + 1)


@pytest.mark.skipif(os.getuid() != 0, reason="giving up root takes root, and to root no permission matters")
def test_a_cache_of_another_user_is_refused_by_name_and_a_finished_store_in_it_used():
    with tempfile.TemporaryDirectory() as name:  # not tmp_path, which others may not enter
        os.chmod(name, 0o755)
        folder = write_mixed(Path(name) / "corpus")
        built = open_store(folder).folder
        code = """
            import os, sys
            from pathlib import Path
            from tests.prepare.stores import SHARD_BYTES, open_store
            from zephon_patches.errors import StoreError
            folder = Path(sys.argv[1])
            os.setgid(65534)
            os.setuid(65534)
            print(open_store(folder).folder)
            try:
                open_store(folder, shard_bytes=SHARD_BYTES + 1)
            except StoreError as error:
                print(error)
        """
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), folder], capture_output=True, text=True, timeout=60
        )
        assert ended.stderr == ""
        used, refused = ended.stdout.splitlines()
        assert used == str(built)
        assert "cannot be built here" in refused and "Permission denied" in refused
