"""Small corpora whose tokens say where they come from.

Document i is the text ``i_0 i_1 i_2 ...`` and the tokenizer has one id for each word, so an id names its
document and its place in it: skips, repeats, shifts and leaks all show, without a model.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

EOS = "<eos>"

# Lengths in tokens without EOS. At seq_len 8, with EOS: 330 samples, 83 samples, and exactly 48 samples.
D240 = [3 + 7 * i % 15 for i in range(240)]
D60 = [3 + 7 * i % 15 for i in range(60)]
E48 = [7] * 47 + [8]


def words(document: int, length: int) -> list[str]:
    return [f"{document}_{place}" for place in range(length)]


def write_jsonl(path: Path, lengths: Sequence[int], first: int = 0) -> Path:
    """Writes numbered documents, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for i, length in enumerate(lengths, start=first):
            file.write(json.dumps({"text": " ".join(words(i, length))}) + "\n")
    return path


def write_tokenizer(folder: Path, lengths: Sequence[int], eos: bool = True, first_id: int = 0) -> Path:
    """Writes a tokenizer with one id a word; EOS, where wanted, has the largest id."""
    names = [word for i, length in enumerate(lengths) for word in words(i, length)]
    vocab = {name: first_id + i for i, name in enumerate(names)}
    vocab["<unk>"] = first_id + len(vocab)
    if eos:
        vocab[EOS] = first_id + len(vocab)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS} if eos else {}))
    return folder


def stream(lengths: Sequence[int], eos: bool = True) -> list[int]:
    """The token ids of the documents, one after the other, as ``write_tokenizer`` numbers them."""
    eos_id = sum(lengths) + 1
    ids: list[int] = []
    first = 0
    for length in lengths:
        ids.extend(range(first, first + length))
        first += length
        if eos:
            ids.append(eos_id)
    return ids
