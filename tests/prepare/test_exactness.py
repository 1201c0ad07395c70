"""A fast engine that errs is caught where the docs say so, and then every byte is the reference's."""

import itertools
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.prepare.test_tokenizers import bpe, write
from zephon_patches import SourceConfig
from zephon_patches.cli.__main__ import main
from zephon_patches.config import DataConfig
from zephon_patches.errors import ConfigError
from zephon_patches.prepare import exactness, tokenizers
from zephon_patches.prepare.build import Building, open_or_build
from zephon_patches.prepare.encoding import Encoder
from zephon_patches.prepare.engines import FastokensEngine, TokenizersEngine, UnsuitableEngine
from zephon_patches.prepare.exactness import DISTRUSTED, EngineDistrusted, Sampling, compare, is_distrusted
from zephon_patches.prepare.repair import reopen_store
from zephon_patches.prepare.shards import FileInput
from zephon_patches.prepare.tokenizers import TextTokenizer

DOCUMENTS = 10_000
SHARD_BYTES = 60_000  # makes several shards
SHORT = "the quick brown fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Ten thousand documents, of which number 5,123 has a word that no other has; a longest, a first and a last."""
    folder = tmp_path_factory.mktemp("planted")
    texts = [f"{SHORT} {i}" for i in range(DOCUMENTS)]
    texts[0] += " a first one"
    texts[5123] = "a gnu"
    texts[7000] += " jumps over the lazy dog" * 5 + " longest"
    texts[-1] += " a last one"
    (folder / "texts").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "texts" / "a.jsonl").write_text(lines)
    write(folder / "tokenizer", bpe(), {"bos_token": "<s>", "eos_token": "</s>"})
    return folder


def plant(monkeypatch, errs, how="wrong"):
    """Makes an engine that errs in some texts the fast one."""

    class Planted:
        name = "planted 1.0"

        def __init__(self, tokenizer_json):
            self._engine = TokenizersEngine(Tokenizer.from_str(tokenizer_json))

        def encode(self, texts):
            ids, offsets = self._engine.encode(texts)
            ids = ids.copy()
            for text, start, stop in zip(texts, offsets, offsets[1:], strict=False):
                if errs(text):
                    if how == "raises":
                        raise RuntimeError("out of luck")
                    ids[stop - 1 if stop > start else start] += 1
            return ids, offsets

    monkeypatch.setattr(tokenizers, "FastokensEngine", Planted)


def build(folder: Path, cache: Path, engine="auto", exact=False):
    source = FileInput(SourceConfig(name="web", path=str(folder / "texts")))
    return open_or_build(source, TextTokenizer(folder / "tokenizer", engine, exact), cache, SHARD_BYTES)


def files_of(store) -> dict[str, bytes]:
    """What a store holds, but for the locks, the marker, and what says when."""
    kinds = (".bin", ".idx", ".origin", "manifest.json")
    return {path.name: path.read_bytes() for path in store.folder.iterdir() if path.name.endswith(kinds)}


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory) -> dict[str, bytes]:
    """The store that the reference makes."""
    store = build(folder, tmp_path_factory.mktemp("expected"), "tokenizers")
    assert len(store.manifest.shards) > 5
    return files_of(store)


def test_the_fast_engine_makes_the_same_store(folder, tmp_path, expected, monkeypatch):
    used = []
    encode = FastokensEngine.encode
    monkeypatch.setattr(FastokensEngine, "encode", lambda self, texts: used.append(len(texts)) or encode(self, texts))
    store = build(folder, tmp_path, "fastokens")
    assert sum(used) >= DOCUMENTS
    assert not is_distrusted(store.folder)
    assert files_of(store) == expected


def test_worker_processes_make_the_same_store_with_the_fast_engine(folder, tmp_path, expected):
    source = FileInput(SourceConfig(name="web", path=str(folder / "texts")))
    tokenizer = TextTokenizer(folder / "tokenizer", "fastokens")
    store = open_or_build(source, tokenizer, tmp_path, SHARD_BYTES, building=Building(workers=2))
    assert files_of(store) == expected


@pytest.mark.parametrize("word", ["first", "longest", "last"])
@pytest.mark.parametrize("how", ["wrong", "raises"])
def test_an_error_in_one_document_of_ten_thousand_that_the_sample_covers(
    folder, tmp_path, expected, monkeypatch, caplog, word, how
):
    plant(monkeypatch, lambda text: word in text, how)
    store = build(folder, tmp_path)
    assert files_of(store) == expected
    report = json.loads((store.folder / DISTRUSTED).read_bytes())
    assert report["text"] == word  # the smallest that differs
    [warning] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert f"for the text {word!r}" in warning
    assert "planted 1.0 " + ("fails (out of luck)" if how == "raises" else "gives [") in warning
    assert str(report["expected"]) in warning


def test_an_error_in_a_document_that_the_sample_does_not_cover_is_missed_unless_all_are_compared(
    folder, tmp_path, expected, monkeypatch
):
    plant(monkeypatch, lambda text: "gnu" in text)
    missed = build(folder, tmp_path / "sampled")
    assert not is_distrusted(missed.folder)
    assert files_of(missed) != expected
    assert files_of(build(folder, tmp_path / "exact", exact=True)) == expected


def test_exact_is_an_option_of_prepare(folder, tmp_path, expected, monkeypatch, capsys):
    plant(monkeypatch, lambda text: "gnu" in text)
    arguments = ["prepare", "--source", f"web={folder / 'texts'}", "--tokenizer", str(folder / "tokenizer")]
    arguments += ["--cache-dir", str(tmp_path), "--shard-bytes", str(SHARD_BYTES), "--exact", "--workers", "1"]
    assert main(arguments) == 0
    [store] = (tmp_path / "web").iterdir()
    assert is_distrusted(store)
    assert (store / "manifest.json").read_bytes() == expected["manifest.json"]
    capsys.readouterr()


def test_an_error_in_a_nasty_text_is_found_before_anything_is_written(folder, tmp_path, expected, monkeypatch):
    plant(monkeypatch, lambda text: "\u3000" in text)
    written = []
    monkeypatch.setattr(Encoder, "is_proven", property(lambda self: written.append(self._fast) or True))
    store = build(folder, tmp_path)
    assert files_of(store) == expected
    assert set(written) == {None}  # every shard is the reference's
    assert json.loads((store.folder / DISTRUSTED).read_bytes())["text"] == "\u3000"


def interrupted(folder, cache, monkeypatch, shards: int, **settings):
    """A build that ends after some shards."""
    finished = []

    def finish(self):
        finished.append(self)
        if len(finished) > shards:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Encoder, "check_trusted", finish)
        build(folder, cache, **settings)
    [store] = (cache / "web").iterdir()
    return store


def test_shards_of_an_engine_that_is_caught_after_a_restart_are_made_again(folder, tmp_path, expected, monkeypatch):
    plant(monkeypatch, lambda text: "gnu" in text or "last" in text)
    store = interrupted(folder, tmp_path, monkeypatch, shards=4)
    wrong = {path.name: path.read_bytes() for path in store.glob("*.bin")}
    assert any(expected[name] != content for name, content in wrong.items())
    assert files_of(build(folder, tmp_path)) == expected


def test_shards_that_were_sampled_are_made_again_where_another_builder_found_a_difference(
    folder, tmp_path, expected, monkeypatch
):
    plant(monkeypatch, lambda text: "gnu" in text)
    store = interrupted(folder, tmp_path, monkeypatch, shards=4)
    exactness.distrust(store, {"text": "gnu"})
    assert files_of(build(folder, tmp_path)) == expected


def test_shards_that_were_sampled_are_made_again_for_an_exact_build(folder, tmp_path, expected, monkeypatch):
    plant(monkeypatch, lambda text: "gnu" in text)
    interrupted(folder, tmp_path, monkeypatch, shards=4)
    assert files_of(build(folder, tmp_path, exact=True)) == expected


@pytest.mark.parametrize("settings", [{"engine": "tokenizers"}, {"exact": True}])
def test_shards_that_are_proven_are_kept(folder, tmp_path, expected, monkeypatch, settings):
    store = interrupted(folder, tmp_path, monkeypatch, shards=3, **settings)
    exactness.distrust(store, {"text": "gnu"})
    times = {path.name: path.stat().st_mtime_ns for path in store.glob("00000[012]-*.bin")}
    assert len(times) == 3
    assert files_of(build(folder, tmp_path)) == expected
    assert times == {name: (store / name).stat().st_mtime_ns for name in times}


def test_a_shard_in_the_making_does_not_count_when_another_builder_finds_a_difference(
    folder, tmp_path, expected, monkeypatch
):
    """The other builder's marker appears while the shard with the error is encoded."""

    def errs(text):
        if "gnu" in text:
            [store] = (tmp_path / "web").iterdir()
            exactness.distrust(store, {"text": "?"})
        return "gnu" in text

    plant(monkeypatch, errs)
    assert files_of(build(folder, tmp_path)) == expected


def test_a_difference_that_does_not_come_again_is_one_too(folder, tmp_path, expected, monkeypatch):
    """As of a race in an engine."""
    seen = []

    def errs(text):
        if "first" in text and not seen:
            seen.append(text)
            return True
        return False

    plant(monkeypatch, errs)
    store = build(folder, tmp_path)
    assert files_of(store) == expected
    report = json.loads((store.folder / DISTRUSTED).read_bytes())
    assert report["text"] == seen[0]
    assert report["found"] != report["expected"]


def test_what_a_repair_keeps_is_made_again_when_the_engine_is_caught(folder, tmp_path, expected, monkeypatch):
    plant(monkeypatch, lambda text: "gnu" in text)
    store = build(folder, tmp_path)
    assert files_of(store) != expected
    (store.folder / "000000-000.bin").write_bytes(b"")
    assert reopen_store(store.folder)
    plant(monkeypatch, lambda text: "gnu" in text or "first" in text)
    assert files_of(build(folder, tmp_path)) == expected


def test_a_repair_keeps_what_the_reference_made_after_a_difference(folder, tmp_path, expected, monkeypatch):
    plant(monkeypatch, lambda text: "last" in text)
    store = build(folder, tmp_path)
    assert is_distrusted(store.folder)
    time = (store.folder / "000001-000.bin").stat().st_mtime_ns
    (store.folder / "000000-000.bin").write_bytes(b"")
    assert reopen_store(store.folder)
    assert files_of(build(folder, tmp_path)) == expected
    assert (store.folder / "000001-000.bin").stat().st_mtime_ns == time


def test_an_exact_build_of_a_finished_store_says_that_it_compares_nothing(folder, tmp_path, caplog):
    build(folder, tmp_path)
    assert caplog.text == ""
    build(folder, tmp_path, exact=True)
    assert "was finished before, so nothing is compared; to build it anew and compare, remove" in caplog.text


PLANTED_LIBRARY = """
import numpy as np
from tokenizers import Tokenizer as Reference


class Tokenizer:
    @staticmethod
    def from_json_str(content):
        made = Tokenizer()
        made.reference = Reference.from_str(content)
        return made

    def encode_batch_flat(self, texts, add_special_tokens):
        parts = [encoding.ids for encoding in self.reference.encode_batch(texts)]
        for text, ids in zip(texts, parts):
            if "gnu" in text or "last" in text:
                ids[-1] += 1
        offsets = np.cumsum([0, *map(len, parts)]).astype("<u8")
        return np.concatenate([*parts, []]).astype("<u4").tobytes(), offsets.tobytes()
"""


def test_worker_processes_make_again_what_each_of_them_made(folder, tmp_path, expected, monkeypatch, capfd):
    """One worker makes the document with the missed error, and it may be another one that is caught."""
    package = tmp_path / "library" / "fastokens"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_native.py").write_text(PLANTED_LIBRARY)
    monkeypatch.syspath_prepend(package.parent)  # which workers are told
    source = FileInput(SourceConfig(name="web", path=str(folder / "texts")))
    tokenizer = TextTokenizer(folder / "tokenizer")
    store = open_or_build(source, tokenizer, tmp_path / "cache", SHARD_BYTES, building=Building(workers=2))
    assert is_distrusted(store.folder)
    assert files_of(store) == expected
    assert "for the text 'last'" in capfd.readouterr().err


# --- which engine ---


def test_auto_takes_the_reference_where_the_fast_engine_does_not_load_the_tokenizer(folder, monkeypatch):
    def refuse(tokenizer_json):
        raise UnsuitableEngine("planted 1.0 does not load the tokenizer (no reason)")

    monkeypatch.setattr(tokenizers, "FastokensEngine", refuse)
    assert TextTokenizer(folder / "tokenizer").fast() is None
    with pytest.raises(ConfigError, match=r"tokenizer_engine = 'fastokens': planted 1\.0 does not load .* 'auto'"):
        TextTokenizer(folder / "tokenizer", "fastokens").fast()


def test_an_engine_that_cannot_serve_is_an_error(folder):
    with pytest.raises(ConfigError, match=r"'tiktoken', but the tokenizer in .* is a tokenizer\.json; .*'tokenizers'"):
        TextTokenizer(folder / "tokenizer", "tiktoken")
    with pytest.raises(ConfigError, match=r"data\.tokenizer_engine = 'fast': expected 'auto' or"):
        DataConfig(tokenizer_engine="fast")


def test_identity_does_not_depend_on_the_engine(folder):
    tokenizer = TextTokenizer(folder / "tokenizer")
    fast = tokenizer.fast()
    assert fast is not None and fast.engine_name != tokenizer.engine_name
    identities = {TextTokenizer(folder / "tokenizer", engine).identity for engine in ("tokenizers", "fastokens")}
    assert identities == {tokenizer.identity} == {fast.identity}


# --- the comparison itself ---


def test_smallest_text_keeps_what_is_needed(folder, monkeypatch):
    plant(monkeypatch, lambda text: "x" in text and "y" in text[text.index("x") :])
    tokenizer = TextTokenizer(folder / "tokenizer")
    report = compare(tokenizer.fast(), tokenizer, ["fine", "ab" * 500 + "x" + "cd" * 10 + "y" + "e" * 3000])
    assert report is not None
    assert report["text"] == "x" + "cd" * 10 + "y"
    assert compare(tokenizer.fast(), tokenizer, ["fine", "xx"]) is None


def sampled(batches: list[list[str]]) -> tuple[list[str], list[str]]:
    """The whole documents, and the excerpts, that are compared."""
    whole, excerpts = [], []

    def look(texts, encoded=None):
        if encoded is None:
            excerpts.extend(texts)
            return
        whole.extend(texts)
        tokens, lengths = encoded
        starts = np.concatenate([[0], np.cumsum(lengths)])
        parts = [tokens[a:b].tolist() for a, b in itertools.pairwise(starts)]
        assert parts == [[len(text)] * (len(text) % 3) for text in texts]

    sampling = Sampling(look)
    for texts in batches:
        lengths = [len(text) % 3 for text in texts]
        tokens = np.repeat([len(text) for text in texts], lengths)
        sampling.look(texts, tokens, lengths)
    sampling.finish()
    return whole, excerpts


def test_about_a_two_thousandth_of_the_text_is_compared():
    batches = [[f"{batch} {i} " + "x" * (i * 7 % 1000) for i in range(2000)] for batch in range(50)]
    whole, excerpts = sampled(batches)
    total = sum(len(text) for texts in batches for text in texts)
    assert 0.0003 * total < sum(map(len, whole)) < 0.0007 * total
    assert whole[0] == batches[0][0]
    assert excerpts == [max(itertools.chain(*batches), key=len), batches[-1][-1]]
    assert len({text.split()[0] for text in whole}) > 40  # of 50 batches


def test_of_large_documents_parts_are_compared():
    whole, excerpts = sampled([["ab" * 2_000_000], ["cd" * 3_000_000], ["e"]])
    assert whole in ([], ["e"])
    assert all(len(excerpt) <= 2048 for excerpt in excerpts)
    assert sum(map(len, excerpts)) < 0.002 * 10_000_000
    assert excerpts[-1] == "e"
    assert any(excerpt.startswith(("cd", "dc")) for excerpt in excerpts)


def test_without_documents_nothing_is_compared():
    assert sampled([]) == ([], [])


def test_encoder_says_who_differed(folder, tmp_path, monkeypatch):
    plant(monkeypatch, lambda text: "gnu" in text)
    encoder = Encoder(TextTokenizer(folder / "tokenizer"), tmp_path, "web")
    encoder.load()
    encoder.check_trusted()
    exactness.distrust(tmp_path, {})
    with pytest.raises(EngineDistrusted, match=r"planted 1\.0"):
        encoder.check_trusted()
    again = Encoder(TextTokenizer(folder / "tokenizer"), tmp_path, "web")
    again.load()
    assert again.is_proven
    again.check_trusted()
