"""The libraries that turn texts into token ids, behind one interface.

Which engine is used changes how long it takes, never an id: each is compared with the reference (exactness.py).

    tokenizers   the reference for a tokenizer.json
    tiktoken     the reference for a file of BPE ranks
    fastokens    the fast one for both, where it can load the tokenizer

An engine's ids are those of the whole tokenizer: special tokens that stand in a text are found, and what the tokenizer
puts around a text by itself is there.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import numpy as np

__all__ = ["Engine", "FastokensEngine", "TiktokenEngine", "TokenizersEngine", "UnsuitableEngine"]


class UnsuitableEngine(Exception):
    """Raised when an engine is not installed, or refuses a tokenizer; the message says why."""


class Engine(Protocol):
    """Encodes texts."""

    name: str
    """With its version, for messages"""

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encodes texts.

        Returns:
            uint32 ids of all texts, one after the other; int64 offsets, shape ``(len(texts) + 1,)``: those of text i
            are ``ids[offsets[i]:offsets[i + 1]]``.

        Raises:
            Exception: A text cannot be encoded; with a lone surrogate, none can.
        """


class TokenizersEngine:
    """Hugging Face's ``tokenizers``, on all cores (``RAYON_NUM_THREADS`` limits it).

    Args:
        tokenizer: A ``tokenizers.Tokenizer``; not changed.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.name = _name("tokenizers")
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts))
        return _joined([encoding.ids for encoding in encodings])


class TiktokenEngine:
    """OpenAI's ``tiktoken``, one text a thread.

    Args:
        encoding: A ``tiktoken.Encoding``.
    """

    def __init__(self, encoding: Any) -> None:
        self.name = _name("tiktoken")
        self._encoding = encoding
        self._threads: ThreadPoolExecutor | None = None

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        for text in texts:
            text.encode()  # the library would put U+FFFD in the place of a lone surrogate
        if len(texts) < 2:
            return _joined([self._encode(text) for text in texts])
        if self._threads is None:
            self._threads = ThreadPoolExecutor(num_threads(), thread_name_prefix="tiktoken")
        return _joined(list(self._threads.map(self._encode, texts)))

    def _encode(self, text: str) -> np.ndarray:
        ids: np.ndarray = self._encoding.encode_to_numpy(text, allowed_special="all")
        return ids


class FastokensEngine:
    """``fastokens``, on all cores (``RAYON_NUM_THREADS``, as it is at the first use in a process, limits it).

    Args:
        tokenizer_json: Content of a tokenizer.json, without truncation and padding.

    Raises:
        UnsuitableEngine: It is not installed, or does not support something in the tokenizer.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self.name = _name("fastokens")
        try:
            # The package's own top imports json and more for transformers, which is of no use here.
            from fastokens._native import Tokenizer
        except ImportError as error:
            raise UnsuitableEngine(f"fastokens is not installed ({error}); pip install fastokens") from None
        try:
            self._tokenizer = Tokenizer.from_json_str(tokenizer_json)
        except BaseException as error:
            raise UnsuitableEngine(f"{self.name} does not load the tokenizer ({error})") from _no_panic(error)

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        try:
            ids, offsets = self._tokenizer.encode_batch_flat(list(texts), add_special_tokens=True)
        except BaseException as error:
            raise RuntimeError(f"{self.name}: {error}") from _no_panic(error)
        return np.frombuffer(ids, dtype="<u4"), np.frombuffer(offsets, dtype="<u8").astype(np.int64)


def num_threads() -> int:
    """Threads that an engine may use."""
    try:
        return max(1, int(os.environ["RAYON_NUM_THREADS"]))
    except (KeyError, ValueError):
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _joined(parts: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The ids of texts, given one by one, as ``Engine.encode`` returns them."""
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    ids = np.empty(int(offsets[-1]), dtype=np.uint32)
    for part, start, stop in zip(parts, offsets.tolist(), offsets[1:].tolist(), strict=False):
        ids[start:stop] = part
    return ids, offsets


def _name(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def _no_panic(error: BaseException) -> Exception:
    """Passes on what is no failure of the library. A panic of Rust code is a failure, and no ``Exception``."""
    if isinstance(error, Exception):
        return error
    if type(error).__name__ == "PanicException":
        return RuntimeError(str(error))
    raise error
