"""Small folders with BPE ranks."""

import base64
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEXT = "the quick brown fox jumps over the lazy dog, then the fox naps; aaaa aaa aa abab ababab été 中文 中文"


def train_ranks(vocab_size: int = 340, text: str = TEXT) -> dict[bytes, int]:
    """The ranks of a BPE that is trained on a text."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_letters])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text] * 20,
        trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False),
    )
    to_byte = {to_letters.pre_tokenize_str(chr(code))[0][0]: bytes([code]) for code in range(128)}
    for code in range(128, 0x800, 64):  # each first byte, and with it each second one
        for character in map(chr, range(code, code + 64)):
            for letter, byte in zip(to_letters.pre_tokenize_str(character)[0][0], character.encode(), strict=True):
                to_byte[letter] = bytes([byte])
    unused = sorted(set(alphabet) - set(to_byte))  # bytes that UTF-8 does not have there
    missing = sorted(set(range(256)) - {byte[0] for byte in to_byte.values()})
    to_byte |= {letter: bytes([byte]) for letter, byte in zip(unused, missing, strict=True)}
    return {b"".join(to_byte[letter] for letter in token): rank for token, rank in tokenizer.get_vocab().items()}


def write_ranks(folder: Path, ranks: dict[bytes, int] | None = None, /, **changes) -> Path:
    """Writes a folder of ranks, with two special tokens; ``changes`` are of its tiktoken.json."""
    ranks = ranks or train_ranks()
    folder.mkdir(parents=True, exist_ok=True)
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in sorted(ranks.items(), key=lambda t: t[1])]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    config = {
        "pattern": PATTERN,
        "special_tokens": {"<|begin|>": 400, "<|end|>": 402},
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
    }
    config |= changes
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "tiktoken.json").write_text(json.dumps(kept))
    return folder
