"""The bytes of an index, against a reader written from the format's description alone."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon_patches.store.indexed import DTYPES, HEADER, MAGIC, VERSION, dtype_for, encode_index

# The module's worked case: documents of 3 and 2 uint16 tokens. Other bytes here mean that Megatron's code, and every
# store that was built before, can no longer be read.
WORKED = bytes.fromhex(
    "4d4d494449445800" + "00"  # magic
    "0100000000000000"  # version 1
    "08"  # uint16
    "0200000000000000"  # sequences
    "0300000000000000"  # documents + 1
    "03000000" + "02000000"  # lengths
    "0000000000000000" + "0600000000000000"  # pointers
    "0000000000000000" + "0100000000000000" + "0200000000000000"  # first sequence of each document, and the end
)


def read_index(data: bytes) -> dict:
    """Reads an index, one field after the other."""
    place = 0

    def take(form: str) -> tuple:
        nonlocal place
        values = struct.unpack_from("<" + form, data, place)
        place += struct.calcsize("<" + form)
        return values

    magic, (version, code, sequences, entries) = take("9s")[0], take("QBQQ")
    found = {
        "magic": magic,
        "version": version,
        "code": code,
        "lengths": list(take(f"{sequences}i")),
        "pointers": list(take(f"{sequences}q")),
        "documents": list(take(f"{entries}q")),
    }
    assert place == len(data), "bytes behind the last field"
    return found


def test_worked_case_has_the_bytes_of_the_format():
    index = encode_index(np.array([3, 2], dtype=np.int32), np.dtype("<u2"))
    assert index == WORKED
    assert len(index) == 34 + 8 + 16 + 24


def test_header_is_34_bytes_without_padding():
    assert (HEADER.size, MAGIC, VERSION) == (34, b"MMIDIDX\0\0", 1)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50), st.sampled_from(sorted(DTYPES)))
def test_every_index_is_read_back_by_the_description(lengths, code):
    dtype = DTYPES[code]
    found = read_index(encode_index(np.array(lengths, dtype=np.int32), dtype))
    starts = [sum(lengths[:i]) * dtype.itemsize for i in range(len(lengths))]
    assert found == {
        "magic": b"MMIDIDX\0\0",
        "version": 1,
        "code": code,
        "lengths": lengths,
        "pointers": starts,
        "documents": list(range(len(lengths) + 1)),
    }


def test_pointers_go_past_4_gib():
    lengths = np.array([1_500_000_000] * 3, dtype=np.int32)
    assert read_index(encode_index(lengths, np.dtype("<i4")))["pointers"] == [0, 6_000_000_000, 12_000_000_000]


@pytest.mark.parametrize(
    ("largest_id", "name"),
    [(0, "uint16"), (65_534, "uint16"), (65_535, "uint16"), (65_536, "int32"), (131_071, "int32")],
)
def test_dtype_is_uint16_up_to_id_65535(largest_id, name):
    assert dtype_for(largest_id).name == name
