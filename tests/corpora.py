"""Small corpora whose tokens say where they come from.

Document i is the text ``i_0 i_1 i_2 ...`` and the tokenizer has one id for each word, so an id names its
document and its place in it: skips, repeats, shifts and leaks all show, without a model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from zephon_patches import DataConfig, SourceConfig, StageConfig

EOS = "<eos>"

# Lengths in tokens without EOS. At seq_len 8, with EOS, in one shard: 330 samples, 83 samples, and exactly 48 samples.
D240 = [3 + 7 * i % 15 for i in range(240)]
D60 = [3 + 7 * i % 15 for i in range(60)]
E48 = [7] * 47 + [8]


@dataclass(frozen=True)
class Corpus:
    """Numbered documents on disk, their tokenizer, and a place for their store."""

    folder: Path
    lengths: Sequence[int]
    eos: bool

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def texts(self) -> Path:
        return self.folder / "texts"

    @property
    def documents(self) -> list[list[int]]:
        """The token ids of each document."""
        return documents(self.lengths, self.eos)

    @property
    def line_bytes(self) -> list[int]:
        """The size of each document's line."""
        return [len(line(i, length)) for i, length in enumerate(self.lengths)]

    def config(self, **settings) -> DataConfig:
        source = SourceConfig(name=settings.pop("name", "web"), path=str(self.texts))
        return DataConfig(sources=[source], cache_dir=str(self.folder / "cache"), **settings)


@dataclass(frozen=True)
class Sources:
    """Several sources of numbered documents, counted through over all of them, with one tokenizer.

    Named so that their order by name is not the one they stand in.
    """

    folder: Path
    lengths: Mapping[str, Sequence[int]]

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    def texts(self, name: str) -> Path:
        return self.folder / "texts" / name

    @property
    def all_lengths(self) -> list[int]:
        return [length for lengths in self.lengths.values() for length in lengths]

    def first(self, name: str) -> int:
        """The number of a source's first document."""
        names = list(self.lengths)
        return sum(len(self.lengths[other]) for other in names[: names.index(name)])

    def documents(self, name: str) -> list[list[int]]:
        """The token ids of each document of a source."""
        first = self.first(name)
        return documents(self.all_lengths)[first : first + len(self.lengths[name])]

    def line_bytes(self, name: str) -> list[int]:
        return [len(line(i, length)) for i, length in enumerate(self.lengths[name], start=self.first(name))]

    def sources(self, weights: Mapping[str, float] | None = None) -> list[SourceConfig]:
        """All sources, or those with a weight."""
        names = self.lengths if weights is None else weights
        return [SourceConfig(n, str(self.texts(n)), weight=None if weights is None else weights[n]) for n in names]

    def config(self, *, weights: Mapping[str, float] | None = None, stages=(), **settings) -> DataConfig:
        """Settings over them; ``stages`` are (first number, weights)."""
        staged = [StageConfig(at, dict(of)) for at, of in stages]
        cache = str(self.folder / "cache")
        return DataConfig(sources=self.sources(weights), stages=staged, cache_dir=cache, **settings)


def make_sources(folder: Path, **lengths: Sequence[int]) -> Sources:
    """Writes the documents of each source and their tokenizer."""
    made = Sources(folder, lengths)
    for name, of in lengths.items():
        write_jsonl(made.texts(name) / "0.jsonl", of, made.first(name))
    write_tokenizer(made.tokenizer, made.all_lengths)
    return made


def make_corpus(folder: Path, lengths: Sequence[int], eos: bool = True, files: int = 1) -> Corpus:
    """Writes the documents, as evenly as possible over some files, and their tokenizer."""
    corpus = Corpus(folder, lengths, eos)
    for number in range(files):
        first, stop = number * len(lengths) // files, (number + 1) * len(lengths) // files
        write_jsonl(corpus.texts / f"{number:02d}.jsonl", lengths[first:stop], first)
    write_tokenizer(corpus.tokenizer, lengths, eos)
    return corpus


def words(document: int, length: int) -> list[str]:
    return [f"{document}_{place}" for place in range(length)]


def line(document: int, length: int) -> str:
    return json.dumps({"text": " ".join(words(document, length))}) + "\n"


def write_jsonl(path: Path, lengths: Sequence[int], first: int = 0) -> Path:
    """Writes numbered documents, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line(i, length) for i, length in enumerate(lengths, start=first)))
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


def documents(lengths: Sequence[int], eos: bool = True) -> list[list[int]]:
    """The token ids of each document, as ``write_tokenizer`` numbers them."""
    eos_id = sum(lengths) + 1
    found: list[list[int]] = []
    first = 0
    for length in lengths:
        found.append([*range(first, first + length), *([eos_id] if eos else [])])
        first += length
    return found


def stream(lengths: Sequence[int], eos: bool = True) -> list[int]:
    """The token ids of the documents, one after the other."""
    return [token for ids in documents(lengths, eos) for token in ids]
