"""Tokenizing and cutting for peers that leave both to the user: what their own examples do, with one library."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

AT_ONCE = 256  # documents, in one call of the tokenizer


class Encoder:
    """Encodes texts, with BOS in front and EOS behind where the tokenizer's configuration names them.

    Args:
        folder: With ``tokenizer.json`` and ``tokenizer_config.json``.
    """

    def __init__(self, folder: Path) -> None:
        named = json.loads((folder / "tokenizer_config.json").read_text())
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._before, self._behind = (
            [] if named.get(key) is None else [self._tokenizer.token_to_id(named[key])]
            for key in ("bos_token", "eos_token")
        )
        self.vocabulary = self._tokenizer.get_vocab_size()
        self.dtype = np.dtype(np.uint16 if self.vocabulary <= 2**16 else np.int32)

    def encode(self, text: str) -> list[int]:
        return [*self._before, *self._tokenizer.encode(text, add_special_tokens=False).ids, *self._behind]

    def file(self, path: Path) -> Iterator[np.ndarray]:
        """The documents of a file of JSON lines."""
        with path.open("rb") as lines:
            while texts := [json.loads(line)["text"] for line, _ in zip(lines, range(AT_ONCE), strict=False)]:
                for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                    yield np.array([*self._before, *encoding.ids, *self._behind], self.dtype)


def rows(documents: Iterable[np.ndarray], seq_len: int) -> Iterator[np.ndarray]:
    """Documents one after the other, cut into rows; the last ones, too few for a row, are dropped."""
    waiting: list[np.ndarray] = []
    count = 0
    for document in documents:
        waiting.append(document)
        count += len(document)
        if count >= seq_len:
            joined = np.concatenate(waiting)
            whole = count // seq_len * seq_len
            yield from joined[:whole].reshape(-1, seq_len)
            waiting = [joined[whole:]]
            count -= whole
