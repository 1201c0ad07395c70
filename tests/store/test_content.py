"""Spots: which bytes they are, what they tell apart, and reads that are short or fail."""

import os
from contextlib import contextmanager

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from zephon_patches.store import content
from zephon_patches.store.content import checksum_of, read_whole, spots_of


@contextmanager
def opened(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def spots_of_bytes(folder, data: bytes) -> str:
    path = folder / "file"
    path.write_bytes(data)
    with opened(path) as descriptor:
        return spots_of(descriptor, len(data))


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


def test_spots_are_the_pages_that_the_module_says(tmp_path):
    data = noise(100_000)
    starts = [0, 13_700, 27_401, 41_101, 54_802, 68_502, 82_203, 95_904]
    expected = xxhash.xxh3_64_hexdigest(b"".join(data[start : start + 4096] for start in starts))
    assert spots_of_bytes(tmp_path, data) == expected


@pytest.mark.parametrize("size", [0, 1, 4096, 32_767, 32_768])
def test_spots_of_a_small_file_are_all_of_it(tmp_path, size):
    assert spots_of_bytes(tmp_path, noise(size)) == xxhash.xxh3_64_hexdigest(noise(size))


@pytest.mark.parametrize("size", [32_769, 1_000_003])
def test_first_and_last_byte_and_another_file_of_the_size_show_in_the_spots(tmp_path, size):
    data = noise(size)
    own = spots_of_bytes(tmp_path, data)
    assert spots_of_bytes(tmp_path, bytes([data[0] ^ 1]) + data[1:]) != own
    assert spots_of_bytes(tmp_path, data[:-1] + bytes([data[-1] ^ 1])) != own
    assert spots_of_bytes(tmp_path, noise(size, seed=1)) != own
    assert spots_of_bytes(tmp_path, data[: size // 2] + bytes(size - size // 2)) != own  # an end never written


@given(size=st.integers(0, 200), start=st.integers(0, 50), block=st.integers(1, 30))
def test_checksum_is_that_of_the_bytes_for_any_block(tmp_path_factory, size, start, block):
    path = tmp_path_factory.getbasetemp() / "checksum"
    data = noise(300)
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch, opened(path) as descriptor:
        patch.setattr(content, "_BLOCK_BYTES", block)
        assert checksum_of(descriptor, start, size) == xxhash.xxh3_64_hexdigest(data[start : start + size])


def test_short_reads_are_gone_on_with_and_the_end_is_an_error(tmp_path, monkeypatch):
    data = noise(5000)
    (tmp_path / "file").write_bytes(data)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, start: pread(descriptor, min(size, 7), start))
    with opened(tmp_path / "file") as descriptor:
        assert checksum_of(descriptor, 0, 5000) == xxhash.xxh3_64_hexdigest(data)
        with pytest.raises(OSError, match="cut off while it was read, at byte 5,000"):
            checksum_of(descriptor, 0, 5001)


@pytest.mark.parametrize("kind", ["folder", "pipe", "large"])
def test_what_is_not_read_whole_is_not_left_open(tmp_path, monkeypatch, kind):
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"12")
        monkeypatch.setattr(content, "_MOST_BYTES", 1)
    opened = []
    system_open = os.open
    monkeypatch.setattr(os, "open", lambda *args: opened.append(system_open(*args)) or opened[-1])
    with pytest.raises(OSError):
        read_whole(path)
    assert len(opened) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
