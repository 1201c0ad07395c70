"""Texts to token ids, with the tokenizer of a Hugging Face folder (``tokenizer.json``).

Special tokens follow TorchTitan's rules, so that the ids are those its own loader would train on: the
special tokens of ``tokenizer_config.json`` are added to the tokenizer, and each document gets BOS in front
and EOS behind where the tokenizer has them and does not add them itself, so each comes once. ``with_ends``
chooses otherwise.

One difference: a truncation or padding that ``tokenizer.json`` asks for is turned off. It would cut the
ends off long documents in silence.
"""

import copy
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenizers import AddedToken, Tokenizer

from zephon_patches.errors import ConfigError, InputError
from zephon_patches.keys import fingerprint

__all__ = ["TextTokenizer"]

_SPECIAL_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class TextTokenizer:
    """A tokenizer folder, ready to encode documents.

    Args:
        folder: Has ``tokenizer.json`` and, for BOS and EOS, ``tokenizer_config.json``.

    Attributes:
        largest_id: The largest id that a text can give.
        bos_id, eos_id: None where the tokenizer has none.
        add_bos, add_eos: As ``with_ends`` got them.

    Raises:
        InputError: A file is missing or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        content = _read_json(path)
        if content is None:
            raise InputError(
                f"{path}: not found; expected a folder with the tokenizer's tokenizer.json (in TorchTitan, "
                "model.hf_assets_path)"
            )
        try:
            self._tokenizer = Tokenizer.from_str(orjson.dumps(content).decode())
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"{path}: cannot be read as a tokenizer ({error})") from None
        config_path = self.folder / "tokenizer_config.json"
        added, self.bos_id, self._eos_id = _add_special_tokens(
            self._tokenizer, _read_json(config_path) or {}, config_path
        )
        # As upstream: where both are the same token, it is taken for BOS alone.
        self.eos_id = None if self._eos_id == self.bos_id else self._eos_id
        dropout = getattr(self._tokenizer.model, "dropout", None)
        if dropout:
            raise InputError(
                f"{path}: model.dropout is {dropout}, so one text would give other ids each time; set it to null"
            )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        by_itself = self._tokenizer.encode("").ids
        self._prefix = [self.bos_id] if self.bos_id is not None and self.bos_id not in by_itself else []
        self._suffix = [self.eos_id] if self.eos_id is not None and self.eos_id not in by_itself else []
        self.largest_id = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        content.pop("truncation", None)
        content.pop("padding", None)
        canonical = orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
        self._content = [hashlib.blake2b(canonical, digest_size=16).hexdigest(), added]
        # Places of tokens that the tokenizer adds by itself and that are taken out, from the front and from the end.
        self._cut_front: int | None = None
        self._cut_back: int | None = None
        self.add_bos: bool | None = None
        self.add_eos: bool | None = None

    @property
    def identity(self) -> str:
        """16 hexadecimal digits for all that the ids depend on; not for file names, white space, library versions."""
        cuts = [] if self._cut_front is None and self._cut_back is None else [self._cut_front, self._cut_back]
        return fingerprint([*self._content, self._prefix, self._suffix, *cuts])

    def with_ends(self, add_bos: bool | None, add_eos: bool | None, where: str) -> "TextTokenizer":
        """The same tokenizer with another choice of what stands before and behind each document.

        Args:
            add_bos, add_eos: Whether BOS and EOS are there, each once; None is as upstream: where the tokenizer has it.
            where: Whose setting it is, for messages.

        Raises:
            ConfigError: A token is asked for that the tokenizer lacks.
        """
        if add_bos is None and add_eos is None:
            return self
        for key, value, token in (("add_bos", add_bos, self.bos_id), ("add_eos", add_eos, self._eos_id)):
            if value and token is None:
                name = key.replace("add_", "")
                raise ConfigError(
                    f"{where}: {key} = true, but the tokenizer in {self.folder} has no {name.upper()} ({name}_token of "
                    f"tokenizer_config.json); name the token there, or leave {key} out"
                )
        front, back = self._own_ends()
        other = copy.copy(self)
        other.add_bos, other.add_eos = add_bos, add_eos
        if add_bos is not None and self.bos_id is not None:
            there = self.bos_id in front
            other._prefix = [self.bos_id] if add_bos and not there else []
            other._cut_front = front.index(self.bos_id) if there and not add_bos else None
        if add_eos is not None and self._eos_id is not None:
            there = self._eos_id in back
            other._suffix = [self._eos_id] if add_eos and not there else []
            other._cut_back = back[::-1].index(self._eos_id) if there and not add_eos else None
        return other

    def _own_ends(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and behind a text by itself."""
        if not self._tokenizer.encode("").ids:
            return [], []
        for text in ("a", *sorted(self._tokenizer.get_vocab())):
            plain = self._tokenizer.encode(text, add_special_tokens=False).ids
            if plain and not {self.bos_id, self._eos_id} & set(plain):
                ids = self._tokenizer.encode(text).ids
                for start in range(len(ids) - len(plain) + 1):
                    if ids[start : start + len(plain)] == plain:
                        return ids[:start], ids[start + len(plain) :]
        return [], []

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        """Encodes documents.

        Returns:
            uint32 ids of all documents, one after the other, and the number of ids of each.
        """
        encodings = self._tokenizer.encode_batch_fast(list(texts))
        documents = [self._prefix + self._cut(encoding.ids) + self._suffix for encoding in encodings]
        lengths = [len(ids) for ids in documents]
        tokens = np.empty(sum(lengths), dtype=np.uint32)
        start = 0
        for ids in documents:
            tokens[start : start + len(ids)] = ids
            start += len(ids)
        return tokens, lengths

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def complete(self, ids: np.ndarray) -> np.ndarray:
        """Given ids of a document, with BOS in front and EOS behind where ``with_ends`` was asked for it, once each.

        Args:
            ids: uint32, shape ``(tokens,)``; not changed.
        """
        front = [self.bos_id] if self.add_bos and (not len(ids) or ids[0] != self.bos_id) else []
        back = [self._eos_id] if self.add_eos and (not len(ids) or ids[-1] != self._eos_id) else []
        ends = [np.array(end, dtype=np.uint32) for end in (front, back)]
        return np.concatenate([ends[0], ids, ends[1]]) if front or back else ids

    def _cut(self, ids: list[int]) -> list[int]:
        if self._cut_front is not None:
            del ids[self._cut_front]
        if self._cut_back is not None:
            del ids[-1 - self._cut_back]
        return ids


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: damaged, not JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object")
    return content


def _add_special_tokens(
    tokenizer: Tokenizer, config: dict[str, Any], path: Path
) -> tuple[list[list[Any]], int | None, int | None]:
    """Adds the configured special tokens: (what was added, BOS id, EOS id)."""
    names = {key: _content(config.get(key), key, path) for key in _SPECIAL_KEYS}
    wanted = [(names[key], config[key]) for key in _SPECIAL_KEYS if names[key] is not None]
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise InputError(f"{path}: added_tokens_decoder is no object")
    for entry in decoder.values():
        if isinstance(entry, dict) and "content" in entry:
            wanted.append((entry["content"], entry))
    added: list[list[Any]] = []
    tokens = []
    for name, options in wanted:
        flags: dict[str, bool] = {"special": True}
        if isinstance(options, dict):
            flags = {key: bool(options.get(key, False)) for key in ("single_word", "lstrip", "rstrip")}
            flags |= {key: bool(options.get(key, True)) for key in ("normalized", "special")}
        tokens.append(AddedToken(name, **flags))
        added.append([name, flags])
    if tokens:
        tokenizer.add_special_tokens(tokens)
    bos, eos = names["bos_token"], names["eos_token"]
    return (
        added,
        None if bos is None else tokenizer.token_to_id(bos),
        None if eos is None else tokenizer.token_to_id(eos),
    )


def _content(token: Any, key: str, path: Path) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
        if token is None:
            raise InputError(f"{path}: {key} is an object without 'content'")
    if token is not None and not isinstance(token, str):
        raise InputError(f"{path}: {key} is {token!r}, expected a text or an object with 'content'")
    return token
