"""The trainer's tokenizer for a folder with BPE ranks: its ids are those that the store is made of."""

from typing import Any

from zephon_patches.prepare.ranks import Ranks

__all__ = ["RanksTokenizer"]


class RanksTokenizer:
    """What TorchTitan asks of a tokenizer, of the ranks in a folder.

    Args:
        tokenizer_path: The folder.

    Raises:
        InputError: A file of it is missing or damaged.
    """

    def __init__(self, tokenizer_path: str) -> None:
        ranks = Ranks.read(tokenizer_path)
        self.tokenizer_path = tokenizer_path
        self.tokenizer = ranks.encoding()
        self.bos_token, self.bos_id = ranks.bos_token, ranks.bos_id
        self.eos_token, self.eos_id = ranks.eos_token, ranks.eos_id
        self.vocab_size = ranks.largest_id + 1
        self._ids = {token: number for number, token in ranks.names().items()}
        self._names = ranks.names()
        self._special = set(ranks.special_tokens.values())

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Ids of a text; special tokens that stand in it become their ids."""
        ids: list[int] = self.tokenizer.encode(text, allowed_special="all")
        bos = [self.bos_id] if add_bos and self.bos_id is not None else []
        eos = [self.eos_id] if add_eos and self.eos_id is not None else []
        return bos + ids + eos

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True, **unused: Any) -> str:
        """The text of ids, without special tokens unless they are asked for."""
        ids = [number for number in token_ids if not (skip_special_tokens and number in self._special)]
        text: str = self.tokenizer.decode(ids)
        return text

    def get_vocab_size(self) -> int:
        """One more than the largest id."""
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Ids by token; what is no UTF-8 shows U+FFFD, of which the last one counts."""
        return dict(self._ids)

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._names.get(token_id)
