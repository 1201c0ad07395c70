"""The bytes of an index: Megatron-LM's indexed dataset format, ``NAME.bin`` and ``NAME.idx``.

``NAME.bin`` is the tokens of all sequences, one after the other. ``NAME.idx``, all little-endian::

    9 bytes   magic, MMIDIDX and two NULs
    u64       version, 1
    u8        code of the tokens' dtype
    u64       number of sequences, s
    u64       number of document entries, documents + 1
    int32[s]  tokens of each sequence
    int64[s]  where each sequence starts in NAME.bin, in bytes
    int64[d]  index of each document's first sequence, and s at the end

Source of the format: NVIDIA/Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``. Here one document
is one sequence. Worked case, documents of 3 and 2 uint16 tokens: lengths 3 2, pointers 0 6, documents
0 1 2, and an index of 34 + 8 + 16 + 24 = 82 bytes.
"""

import struct

import numpy as np

__all__ = ["DTYPES", "HEADER", "MAGIC", "VERSION", "code_of", "dtype_for", "encode_index", "index_bytes"]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

# The format's codes of integers; it has none for uint32.
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def dtype_for(largest_id: int) -> np.dtype:
    """The narrowest dtype of the format for ids up to ``largest_id``: uint16 up to 65,535, else int32."""
    return np.dtype("<u2") if largest_id <= np.iinfo(np.uint16).max else np.dtype("<i4")


def code_of(dtype: np.dtype) -> int:
    """The format's code of a dtype, one of ``DTYPES``."""
    return _CODES[dtype]


def index_bytes(documents: int) -> int:
    """The size of the index of a shard with so many documents."""
    return HEADER.size + 4 * documents + 8 * documents + 8 * (documents + 1)


def encode_index(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """The index of a shard.

    Args:
        lengths: int32, shape ``(documents,)``, in tokens.
        dtype: The dtype of the tokens, one of ``DTYPES``.
    """
    documents = len(lengths)
    pointers = np.zeros(documents, dtype="<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= dtype.itemsize
    return b"".join(
        [
            HEADER.pack(MAGIC, VERSION, _CODES[dtype], documents, documents + 1),
            lengths.astype("<i4").tobytes(),
            pointers.tobytes(),
            np.arange(documents + 1, dtype="<i8").tobytes(),
        ]
    )
