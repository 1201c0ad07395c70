"""A folder with a BPE ranks file, as Llama 3's original ``tokenizer.model``: lines of "base64-of-the-token rank".

The ranks alone do not say how a text is cut into words, nor which special tokens there are. That stands beside them in
``tiktoken.json``::

    {
      "ranks": "tokenizer.model",
      "pattern": "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|...",
      "special_tokens": {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001},
      "bos_token": "<|begin_of_text|>",
      "eos_token": "<|end_of_text|>"
    }

``ranks`` ("tokenizer.model"), ``bos_token`` and ``eos_token`` (none) may be left out. As with a tokenizer.json, a
special token that stands in a text becomes its id.
"""

import base64
import binascii
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from zephon_patches.errors import InputError

__all__ = ["RANKS_CONFIG", "Ranks", "is_ranks_folder"]

RANKS_CONFIG = "tiktoken.json"

_DEFAULT_FILE = "tokenizer.model"
_MAX_IDS = 2**24  # of the ids up to the largest, each takes memory; vocabularies have a few hundred thousand
_KEYS = ("ranks", "pattern", "special_tokens", "bos_token", "eos_token")


def is_ranks_folder(folder: str | Path) -> bool:
    """Whether a folder's tokenizer is a ranks file; where there is a tokenizer.json too, that counts."""
    return Path(folder, RANKS_CONFIG).is_file() and not Path(folder, "tokenizer.json").is_file()


@dataclass(frozen=True)
class Ranks:
    """A tokenizer as tiktoken has it."""

    folder: Path
    ranks: dict[bytes, int]
    pattern: str
    special_tokens: dict[str, int]
    bos_token: str | None
    eos_token: str | None

    @classmethod
    def read(cls, folder: str | Path) -> "Ranks":
        """Reads a folder.

        Raises:
            InputError: A file of it is missing or damaged.
        """
        path = Path(folder, RANKS_CONFIG)
        config = _read_config(path)
        ranks_path = path.parent / config.get("ranks", _DEFAULT_FILE)
        ranks = _read_ranks(ranks_path)
        special = config["special_tokens"]
        taken = set(ranks.values())
        for token, number in special.items():
            if not token or not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < _MAX_IDS:
                raise InputError(f"{path}: special_tokens: {token!r} has the id {number!r}, expected one below 2**24")
            if number in taken:
                raise InputError(f"{path}: special_tokens: the id {number:,} of {token!r} is another token's, too")
            taken.add(number)
        for key in ("bos_token", "eos_token"):
            if config.get(key) is not None and config[key] not in special:
                raise InputError(f"{path}: {key} is {config[key]!r}, which is none of special_tokens")
        return cls(path.parent, ranks, config["pattern"], special, config.get("bos_token"), config.get("eos_token"))

    @property
    def bos_id(self) -> int | None:
        return None if self.bos_token is None else self.special_tokens[self.bos_token]

    @property
    def eos_id(self) -> int | None:
        return None if self.eos_token is None else self.special_tokens[self.eos_token]

    @property
    def largest_id(self) -> int:
        return max([*self.ranks.values(), *self.special_tokens.values()])

    @functools.cached_property
    def digest(self) -> str:
        """Of all that the ids depend on, in hexadecimal."""
        digest = hashlib.blake2b(digest_size=16)
        for token, rank in sorted(self.ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %d " % (rank, len(token)) + token)
        names = {"pattern": self.pattern, "special_tokens": self.special_tokens}
        digest.update(orjson.dumps(names, option=orjson.OPT_SORT_KEYS))
        return digest.hexdigest()

    def decode(self, ids: list[int]) -> str:
        """The text of ids; those that no token has give nothing, and what is not UTF-8 gives U+FFFD."""
        return b"".join(self._tokens.get(number, b"") for number in ids).decode("utf-8", "replace")

    @functools.cached_property
    def _tokens(self) -> dict[int, bytes]:
        special = {number: token.encode() for token, number in self.special_tokens.items()}
        return {rank: token for token, rank in self.ranks.items()} | special

    def names(self) -> dict[int, str]:
        """Each id's token; what is not UTF-8 shows U+FFFD."""
        return {number: token.decode("utf-8", "replace") for number, token in self._tokens.items()}

    def encoding(self) -> Any:
        """The ``tiktoken.Encoding``.

        Raises:
            InputError: The pattern is none.
        """
        import tiktoken

        try:
            return tiktoken.Encoding(
                str(self.folder),
                pat_str=self.pattern,
                mergeable_ranks=self.ranks,
                special_tokens=self.special_tokens,
            )
        except Exception as error:  # the library raises ValueError, of its Rust code's texts
            raise InputError(f"{self.folder / RANKS_CONFIG}: tiktoken does not take it ({error})") from None

    def to_tokenizer(self) -> Tokenizer:
        """The same as a ``tokenizers.Tokenizer``.

        tiktoken merges the two neighbours whose union has the lowest rank, in whatever way the union is split. So each
        split of a token into two others is a merge, those of one token one after the other; and a word that is a token
        as a whole is taken as such (``ignore_merges``). The conversion is that of ``transformers``
        (``TikTokenConverter``).

        The two could differ where a word offers two overlapping ways to the same token: tiktoken takes the left one.
        """
        letters = _byte_letters()

        def spelled(token: bytes) -> str:
            return "".join(letters[byte] for byte in token)

        vocab = {spelled(token): rank for token, rank in self.ranks.items()}
        merges: list[tuple[str, str]] = []
        for token, _ in sorted(self.ranks.items(), key=lambda item: item[1]):
            cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
            cuts = [cut for cut in cuts if cut[0] in self.ranks and cut[1] in self.ranks]
            cuts.sort(key=lambda cut: (self.ranks[cut[0]], self.ranks[cut[1]]))
            merges += [(spelled(left), spelled(right)) for left, right in cuts]
        # In the vocabulary too, since the library gives ids of its own to added tokens that are not. And fastokens
        # takes no vocabulary with holes: what fills them has a space, which is no letter of a word.
        vocab |= self.special_tokens
        holes = set(range(self.largest_id)).difference(vocab.values())
        vocab |= {f"no token {number}": number for number in holes}
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
        words = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
        to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_letters])
        tokenizer.decoder = decoders.ByteLevel()
        special = sorted(self.special_tokens, key=lambda token: self.special_tokens[token])
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        return tokenizer


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = orjson.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: damaged, not JSON ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object with the keys {', '.join(_KEYS)}")
    for key in config:
        if key not in _KEYS:
            raise InputError(f"{path}: unknown key {key!r}; the keys are {', '.join(_KEYS)}")
    kinds = dict.fromkeys(_KEYS, str) | {"special_tokens": dict}
    for key, kind in kinds.items():
        required = key in ("pattern", "special_tokens")
        if (required or config.get(key) is not None) and not isinstance(config.get(key), kind):
            expected = "an object of names and ids" if kind is dict else "a text"
            raise InputError(f"{path}: {key} is {config.get(key)!r}, expected {expected}")
    return config


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            decoded = base64.b64decode(token, validate=True)
            if not decoded or not 0 <= int(rank) < _MAX_IDS:
                raise ValueError
        except (ValueError, binascii.Error):
            raise InputError(
                f"{path}, line {number:,}: expected a token in base64 and its rank; found {line[:60]!r} (a model of "
                "SentencePiece may have this name too, and is not read)"
            ) from None
        if decoded in ranks:
            raise InputError(f"{path}, line {number:,}: the token {decoded!r} has a rank already")
        ranks[decoded] = int(rank)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise InputError(f"{path}: the byte {missing[0]:#04x} is no token, so not every text has tokens; cut off?")
    if len(set(ranks.values())) < len(ranks):
        raise InputError(f"{path}: two tokens have the same rank")
    return ranks


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in the vocabulary of a byte-level tokenizer.json, as GPT-2 chose them."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]
