"""Writes one shard: tokens as they come, then the index and the origins, each file whole or absent.

The tokens go to the disk as they arrive; what is kept in memory is 20 bytes a document.
"""

import os
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from zephon_patches.errors import StoreError
from zephon_patches.store.atomic import atomic_file, write_atomic
from zephon_patches.store.content import spots_of
from zephon_patches.store.indexed import encode_index
from zephon_patches.store.manifest import InputRange, ShardRecord

__all__ = ["ShardWriter"]

# The index holds a document's length as int32.
MAX_DOCUMENT_TOKENS = 2**31 - 1


class ShardWriter:
    """Context manager that writes ``NAME.bin``, ``NAME.idx``, ``NAME.origin``, and a ``NAME.mask`` into a folder.

    Args:
        folder: Of the store; must exist.
        name: Of the shard.
        dtype: Of the tokens, one of the index format's.
        in_place: Whether the tokens stay where they are: they are hashed, and there is no ``NAME.bin``.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype, in_place: bool = False) -> None:
        self._folder = folder
        self._name = name
        self._dtype = dtype
        self._in_place = in_place
        self._lengths = array("i")
        self._origins = array("q")
        self._hash = xxhash.xxh3_64()
        self._mask_hash: xxhash.xxh3_64 | None = None
        self.documents = 0
        self.tokens = 0

    def __enter__(self) -> "ShardWriter":
        self._stack = ExitStack()
        self._file: BinaryIO | None = None
        self._mask_file: BinaryIO | None = None
        if not self._in_place:
            self._file = self._stack.enter_context(atomic_file(self._folder / f"{self._name}.bin"))
        return self

    def __exit__(self, *exception) -> None:  # type: ignore[no-untyped-def]
        self._stack.__exit__(*exception)

    def add(
        self,
        tokens: np.ndarray,
        lengths: Sequence[int],
        origins: Sequence[tuple[int, int]],
        mask: np.ndarray | None = None,
    ) -> None:
        """Appends documents.

        Args:
            tokens: Any integer dtype, shape ``(sum of lengths,)``; ids within the shard's dtype.
            lengths: Tokens of each document.
            origins: (file, record) of each document; the record counts from the start of its input range.
            mask: uint8, of the tokens' shape: 1 for those that count as labels, else 0; of all documents or of none.
        """
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) > np.iinfo(self._dtype).max):
            raise StoreError(
                f"shard {self._name}: token ids from {tokens.min()} to {tokens.max()} do not fit {self._dtype}"
            )
        if lengths and max(lengths) > MAX_DOCUMENT_TOKENS:
            raise StoreError(f"shard {self._name}: a document of {max(lengths):,} tokens; at most 2**31 - 1 fit")
        data = np.ascontiguousarray(tokens, self._dtype).data
        if self._file is not None:
            self._file.write(data)
        self._hash.update(data)
        if mask is not None:
            self._add_mask(mask)
        self._lengths.extend(lengths)
        for origin in origins:
            self._origins.extend(origin)
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def _add_mask(self, mask: np.ndarray) -> None:
        if self._mask_hash is None:
            assert not self.tokens, "a mask of some of a shard's documents"
            self._mask_hash = xxhash.xxh3_64()
            self._mask_file = self._stack.enter_context(atomic_file(self._folder / f"{self._name}.mask"))
        data = mask.astype(np.uint8).tobytes()
        assert self._mask_file is not None
        self._mask_file.write(data)
        self._mask_hash.update(data)

    def finish(self, ranges: list[InputRange], skipped: dict[str, int] | None = None) -> ShardRecord:
        """Completes the three files; call it last, inside the context.

        Args:
            ranges: The input it was made from.
            skipped: Records that were left out, by reason.
        """
        index = encode_index(np.frombuffer(self._lengths, dtype=np.int32), self._dtype)
        origin = np.frombuffer(self._origins, dtype=np.int64).astype("<i8").tobytes()
        self._stack.close()
        write_atomic(self._folder / f"{self._name}.idx", index)
        write_atomic(self._folder / f"{self._name}.origin", origin)
        kinds = [*(() if self._in_place else ("bin",)), "idx", *(() if self._mask_hash is None else ("mask",))]
        return ShardRecord(
            name=self._name,
            documents=self.documents,
            tokens=self.tokens,
            bin=self._hash.hexdigest(),
            idx=xxhash.xxh3_64_hexdigest(index),
            origin=xxhash.xxh3_64_hexdigest(origin),
            ranges=ranges,
            skipped=skipped or {},
            mask="" if self._mask_hash is None else self._mask_hash.hexdigest(),
            spots={kind: self._spots(kind) for kind in kinds},
        )

    def _spots(self, kind: str) -> str:
        with open(self._folder / f"{self._name}.{kind}", "rb") as file:
            return spots_of(file.fileno(), os.fstat(file.fileno()).st_size)
