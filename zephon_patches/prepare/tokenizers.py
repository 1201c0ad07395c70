"""Texts to token ids, with the tokenizer of a folder: a ``tokenizer.json``, or a file of BPE ranks (ranks.py).

Special tokens follow TorchTitan's rules, so that the ids are those its own loader would train on: the
special tokens of ``tokenizer_config.json`` are added to the tokenizer, and each document gets BOS in front
and EOS behind where the tokenizer has them and does not add them itself, so each comes once. ``with_ends``
chooses otherwise.

One difference: a truncation or padding that ``tokenizer.json`` asks for is turned off. It would cut the
ends off long documents in silence.

The ids are those of the reference library. ``fast`` gives the same tokenizer on a faster one; whoever uses that
has to watch it (exactness.py).
"""

import copy
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import orjson
from tokenizers import AddedToken, Tokenizer

from zephon_patches.config import TokenizerEngine
from zephon_patches.errors import ConfigError, InputError
from zephon_patches.keys import fingerprint
from zephon_patches.prepare.engines import Engine, FastokensEngine, TiktokenEngine, TokenizersEngine, UnsuitableEngine
from zephon_patches.prepare.nasty import nasty_texts
from zephon_patches.prepare.ranks import RANKS_CONFIG, Ranks, is_ranks_folder
from zephon_patches.prepare.small_files import read_object

if TYPE_CHECKING:
    from zephon_patches.prepare.chat import ChatTemplate

__all__ = ["TextTokenizer"]

logger = logging.getLogger(__name__)

_SPECIAL_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class _Loaded:
    """What the files of a folder say."""

    reference: Engine
    to_json: Callable[[], str]
    """Makes the tokenizer.json that a fast engine loads"""
    content: list[Any]
    """Plain data that stands for all that the ids depend on"""
    bos_id: int | None
    eos_id: int | None
    largest_id: int
    special_tokens: list[str]
    decode: Callable[[list[int]], str]
    tokenizer: Tokenizer | None
    """None for ranks, which add nothing to a text by themselves"""


class TextTokenizer:
    """A tokenizer folder, ready to encode documents.

    Args:
        folder: Has ``tokenizer.json`` and, for BOS and EOS, ``tokenizer_config.json``; or ``tiktoken.json`` and ranks.
        engine: Which library ``fast`` uses, as ``data.tokenizer_engine``; the ids do not depend on it.
        exact: Whether builds compare every document that a fast engine encodes with the reference.

    Attributes:
        largest_id: The largest id that a text can give.
        bos_id, eos_id: None where the tokenizer has none.
        add_bos, add_eos: As ``with_ends`` got them.

    Raises:
        ConfigError: There is no such engine, or it is another kind of folder's.
        InputError: A file is missing or damaged.
    """

    def __init__(self, folder: str | Path, engine: TokenizerEngine = "auto", exact: bool = False) -> None:
        self.folder = Path(folder)
        self.engine = engine
        self.exact = exact
        if engine not in get_args(TokenizerEngine):
            raise ConfigError(f"tokenizer engine {engine!r}: expected one of {', '.join(get_args(TokenizerEngine))}")
        ranks = is_ranks_folder(folder)
        loaded = _load_ranks(self.folder) if ranks else _load_json(self.folder)
        if engine == ("tokenizers" if ranks else "tiktoken"):
            file, other = (RANKS_CONFIG, "tiktoken") if ranks else ("tokenizer.json", "tokenizers")
            raise ConfigError(
                f"data.tokenizer_engine = {engine!r}, but the tokenizer in {folder} is a {file}; set it to 'auto', "
                f"'fastokens' or {other!r}"
            )
        self._loaded = loaded
        self._engine = loaded.reference
        self._fast_engines: list[Engine] = []  # none or one, shared by all copies
        self.bos_id, self._eos_id = loaded.bos_id, loaded.eos_id
        # As upstream: where both are the same token, it is taken for BOS alone.
        self.eos_id = None if self._eos_id == self.bos_id else self._eos_id
        by_itself = self._engine.encode([""])[0].tolist()
        self._prefix = [self.bos_id] if self.bos_id is not None and self.bos_id not in by_itself else []
        self._suffix = [self.eos_id] if self.eos_id is not None and self.eos_id not in by_itself else []
        self.largest_id = loaded.largest_id
        # Places of tokens that the tokenizer adds by itself and that are taken out, from the front and from the end.
        self._cut_front: int | None = None
        self._cut_back: int | None = None
        self._chat: ChatTemplate | None = None
        self.add_bos: bool | None = None
        self.add_eos: bool | None = None

    @property
    def identity(self) -> str:
        """16 hexadecimal digits for all that the ids depend on; not for file names, white space, library versions."""
        cuts = [] if self._cut_front is None and self._cut_back is None else [self._cut_front, self._cut_back]
        return fingerprint([*self._loaded.content, self._prefix, self._suffix, *cuts])

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
        tokenizer = self._loaded.tokenizer
        if tokenizer is None or not tokenizer.encode("").ids:
            return [], []
        for text in ("a", *sorted(tokenizer.get_vocab())):
            plain = tokenizer.encode(text, add_special_tokens=False).ids
            if plain and not {self.bos_id, self._eos_id} & set(plain):
                ids = tokenizer.encode(text).ids
                for start in range(len(ids) - len(plain) + 1):
                    if ids[start : start + len(plain)] == plain:
                        return ids[:start], ids[start + len(plain) :]
        return [], []

    @property
    def engine_name(self) -> str:
        """The library that ``encode_batch`` uses, with its version."""
        return self._engine.name

    def fast(self) -> "TextTokenizer | None":
        """The same tokenizer on the fast engine that was asked for; None where that is the reference.

        Raises:
            ConfigError: An engine was asked for by its name, and is not installed or does not load the tokenizer.
        """
        if self.engine not in ("auto", "fastokens"):
            return None
        if not self._fast_engines:
            try:
                self._fast_engines.append(FastokensEngine(self._loaded.to_json()))
            except UnsuitableEngine as error:
                if self.engine != "auto":
                    raise ConfigError(
                        f"data.tokenizer_engine = {self.engine!r}: {error}; set it to 'auto' to use it where it serves"
                    ) from None
                logger.info("tokenizer in %s: %s; using %s", self.folder, error, self._engine.name)
                return None
        other = copy.copy(self)
        other._engine = self._fast_engines[0]
        return other

    def nasty_texts(self) -> list[str]:
        """Texts in which engines are known to differ."""
        return nasty_texts(self._loaded.special_tokens, self._loaded.decode, self.largest_id)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        """Encodes documents.

        Returns:
            uint32 ids of all documents, one after the other, and the number of ids of each.
        """
        ids, offsets = self._engine.encode(texts)
        cuts = []
        if self._cut_front is not None:
            cuts.append(offsets[:-1] + self._cut_front)
        if self._cut_back is not None:
            cuts.append(offsets[1:] - 1 - self._cut_back)
        if cuts:
            ids = np.delete(ids, np.concatenate(cuts))
            offsets = offsets - len(cuts) * np.arange(len(offsets))
        ends = len(self._prefix) + len(self._suffix)
        if not ends:
            return ids, np.diff(offsets).tolist()
        offsets = offsets + ends * np.arange(len(offsets))
        tokens = np.empty(int(offsets[-1]), dtype=np.uint32)
        own = np.ones(len(tokens), dtype=bool)  # all but BOS and EOS
        for places, token in ((offsets[:-1], self._prefix), (offsets[1:] - 1, self._suffix)):
            if token:
                tokens[places] = token[0]
                own[places] = False
        tokens[own] = ids
        return tokens, np.diff(offsets).tolist()

    def encode_rendered(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encodes texts that have their special tokens in them, such as conversations: nothing is added.

        Returns:
            For each text its ids, uint32 of shape ``(tokens,)``, and the characters that each was made of, int64 of
            shape ``(tokens, 2)``, half-open.
        """
        tokenizer = self._loaded.tokenizer
        assert tokenizer is not None, "ranks have no chat template"
        encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(each.ids, dtype=np.uint32), np.array(each.offsets, dtype=np.int64).reshape(-1, 2))
            for each in encodings
        ]

    def chat_template(self) -> "ChatTemplate":
        """The chat template beside the tokenizer, read once.

        Raises:
            InputError: There is none that can be used.
        """
        if self._loaded.tokenizer is None:
            raise InputError(f"{self.folder}: conversations need a tokenizer.json and its chat template, not BPE ranks")
        if self._chat is None:
            from zephon_patches.prepare.chat import ChatTemplate  # with a library that texts do not need

            self._chat = ChatTemplate(self.folder)
        return self._chat

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self._loaded.decode(list(ids))

    def complete(self, ids: np.ndarray) -> np.ndarray:
        """Given ids of a document, with BOS in front and EOS behind where ``with_ends`` was asked for it, once each.

        Args:
            ids: uint32, shape ``(tokens,)``; not changed.
        """
        front = [self.bos_id] if self.add_bos and (not len(ids) or ids[0] != self.bos_id) else []
        back = [self._eos_id] if self.add_eos and (not len(ids) or ids[-1] != self._eos_id) else []
        ends = [np.array(end, dtype=np.uint32) for end in (front, back)]
        return np.concatenate([ends[0], ids, ends[1]]) if front or back else ids


def _load_ranks(folder: Path) -> _Loaded:
    ranks = Ranks.read(folder)
    return _Loaded(
        reference=TiktokenEngine(ranks.encoding()),
        to_json=lambda: ranks.to_tokenizer().to_str(),
        content=["ranks", ranks.digest],
        bos_id=ranks.bos_id,
        eos_id=ranks.eos_id,
        largest_id=ranks.largest_id,
        special_tokens=list(ranks.special_tokens),
        decode=ranks.decode,
        tokenizer=None,
    )


def _load_json(folder: Path) -> _Loaded:
    path = folder / "tokenizer.json"
    content = _read_json(path)
    if content is None:
        raise InputError(
            f"{path}: not found; expected a folder with the tokenizer's tokenizer.json, or with {RANKS_CONFIG} and a "
            "file of BPE ranks (in TorchTitan, model.hf_assets_path)"
        )
    try:
        tokenizer = Tokenizer.from_str(orjson.dumps(content).decode())
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{path}: cannot be read as a tokenizer ({error})") from None
    config_path = folder / "tokenizer_config.json"
    added, bos_id, eos_id = _add_special_tokens(tokenizer, _read_json(config_path) or {}, config_path)
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        raise InputError(
            f"{path}: model.dropout is {dropout}, so one text would give other ids each time; set it to null"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    content.pop("truncation", None)
    content.pop("padding", None)
    canonical = orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
    return _Loaded(
        reference=TokenizersEngine(tokenizer),
        to_json=tokenizer.to_str,
        content=[hashlib.blake2b(canonical, digest_size=16).hexdigest(), added],
        bos_id=bos_id,
        eos_id=eos_id,
        largest_id=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0),
        special_tokens=[token.content for token in tokenizer.get_added_tokens_decoder().values()],
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
        tokenizer=tokenizer,
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return read_object(path)
    except FileNotFoundError:
        return None


def _add_special_tokens(
    tokenizer: Tokenizer, config: dict[str, Any], path: Path
) -> tuple[list[list[Any]], int | None, int | None]:
    """Adds the configured special tokens: (what was added, BOS id, EOS id)."""
    names = {key: _content(config.get(key), key, path) for key in _SPECIAL_KEYS}
    wanted: list[tuple[str | None, Any]] = [(names[key], config.get(key)) for key in _SPECIAL_KEYS]
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise InputError(f"{path}: added_tokens_decoder is no object")
    for entry in decoder.values():
        if isinstance(entry, dict) and "content" in entry:
            wanted.append((_content(entry, "an entry of added_tokens_decoder", path), entry))
    added: list[list[Any]] = []
    tokens = []
    for name, options in wanted:
        if name is None:
            continue
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
        shown = repr(token) if isinstance(token, int | float) else f"of type {type(token).__name__}"
        raise InputError(f"{path}: {key} is {shown}, expected a text or an object with 'content'")
    return token
