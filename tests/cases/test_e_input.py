"""Ugly input, from the file to the batch. The single lines and messages are in tests/prepare/test_readers.py."""

import gzip
import json

import numpy as np
import pytest
import zstandard

from tests import corpora, reference
from tests.corpora import Corpus, make_corpus, write_tokenizer
from tests.prepare.stores import documents_of, places_of
from tests.prepare.test_tokenizers import CONFIGS, bpe
from tests.prepare.test_tokenizers import write as write_bpe
from tests.resume import Place, Run, builder, check_steps, uninterrupted
from tests.store.test_reader import make_store
from zephon_patches import SourceConfig
from zephon_patches.errors import InputError
from zephon_patches.loader import build as loader_build
from zephon_patches.prepare.build import open_or_build
from zephon_patches.prepare.shards import FileInput
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.samples.chunking import num_samples, span
from zephon_patches.samples.sequence import fill_row
from zephon_patches.store.manifest import Manifest
from zephon_patches.store.reader import TokenStore


def store_of(corpus: Corpus, shard_bytes: int = 0) -> TokenStore:
    source = FileInput(SourceConfig(name="web", path=str(corpus.texts)))
    return open_or_build(source, TextTokenizer(corpus.tokenizer), corpus.folder / "cache", shard_bytes)


def good_lines(number: int = 20) -> list[str]:
    return [corpora.line(i, 3) for i in range(number)]


def corpus_of_lines(folder, lines) -> Corpus:
    """A corpus whose one file is the given lines, with a tokenizer for 20 documents of 3 words."""
    corpus = Corpus(folder, [3] * 20, True)
    write_tokenizer(corpus.tokenizer, corpus.lengths)
    corpus.texts.mkdir()
    (corpus.texts / "a.jsonl").write_bytes(b"".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return corpus


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("files", [1, 7])
def test_e01_empty_documents_are_harmless_wherever_they_stand(tmp_path, eos, files):
    """E01: first, last, runs of empty ones, a file of only empty ones; the same at any dp."""
    corpus = make_corpus(tmp_path, [0, 5, 0, 0, 7, 3, 0], eos, files)
    assert documents_of(store_of(corpus)) == corpus.documents
    tokens = [token for ids in corpus.documents for token in ids]
    expected = reference.Stream([tokens], 4)
    for place in (Place(1, 3, 3), Place(2, 1, 3), Place(3, 1, 3)):
        check_steps(Run(builder(corpus, seq_len=4), place), expected, 5)


def test_e01_only_empty_documents_are_refused(tmp_path):
    """E01: nothing to train on is an error before the first batch."""
    corpus = make_corpus(tmp_path, [0, 0, 0], eos=False)
    with pytest.raises(InputError, match="0 tokens in 3 documents .* give no sample"):
        builder(corpus)(Place(1, 1, 1), 0)


@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: [*lines[:6], lines[6][:9] + "\n", *lines[7:]], 7),
        (lambda lines: [*lines[:11], lines[11].rstrip() + lines[11], *lines[12:]], 12),
        (lambda lines: [*lines[:19], lines[19][:-4]], 20),
    ],
    ids=["cut in the middle", "two objects on a line", "cut at the end"],
)
def test_e02_malformed_line_is_named_at_build_time_on_every_rank(tmp_path, monkeypatch, change, line, dp):
    """E02."""
    monkeypatch.setattr(loader_build, "_PATIENCE", 0.0)  # no rank is at work that another could wait for
    corpus = corpus_of_lines(tmp_path, change(good_lines()))
    for rank in range(dp):
        with pytest.raises(InputError, match=rf"a.jsonl, line {line}: not a JSON record"):
            builder(corpus)(Place(dp, 1, 3), rank)


def test_e03_blank_lines_lose_no_document(tmp_path):
    """E03: at the start, in the middle, at the end, of spaces, with CRLF."""
    lines = good_lines()
    corpus = corpus_of_lines(tmp_path, ["\n", *lines[:5], "   \n", *lines[5:9], "\r\n\r\n", *lines[9:], "\n\n"])
    assert documents_of(store_of(corpus)) == corpus.documents
    assert documents_of(store_of(corpus, 100)) == corpus.documents


@pytest.mark.parametrize(
    "bad", [b"\xe6\n", '{"text": "\u4e2d"}\n'.encode("gbk"), '{"text": "\u00e9"}\n'.encode("latin-1")]
)
def test_e05_bytes_that_are_not_utf8_are_named_by_line(tmp_path, bad):
    """E05."""
    lines = good_lines()
    corpus = corpus_of_lines(tmp_path, [*lines[:4], bad, *lines[4:]])
    with pytest.raises(InputError, match=r"a.jsonl, line 5: not a JSON record \(byte \d+ of the line is not UTF-8"):
        store_of(corpus)


def test_e05_byte_order_mark_and_crlf_change_nothing(tmp_path):
    """E05."""
    plain = "".join(good_lines()).encode()
    for number, data in enumerate((b"\xef\xbb\xbf" + plain, plain.replace(b"\n", b"\r\n"), plain.rstrip(b"\n"))):
        (tmp_path / str(number)).mkdir()
        corpus = corpus_of_lines(tmp_path / str(number), [data])
        assert documents_of(store_of(corpus)) == corpus.documents


@pytest.mark.parametrize(
    "bad", ['"abc"', "3", "[]", '{"txt": "a"}', '{"text": null}', '{"text": 5}', '{"text": ["a"]}']
)
def test_e07_record_of_another_form_names_file_line_and_field(tmp_path, bad):
    """E07: in the first unit and in a later one."""
    lines = good_lines()
    corpus = corpus_of_lines(tmp_path, [*lines[:15], bad + "\n", *lines[15:]])
    for shard_bytes in (0, 100):
        with pytest.raises(InputError, match=r"a.jsonl, line 16: .*'text'"):
            store_of(corpus, shard_bytes)


def test_e07_another_text_field_is_a_setting(tmp_path):
    """E07."""
    corpus = corpus_of_lines(tmp_path, [line.replace("text", "content") for line in good_lines()])
    with pytest.raises(InputError, match=r"no field 'text'; its fields are 'content'; set text_field of the source"):
        store_of(corpus)
    source = FileInput(SourceConfig(name="web", path=str(corpus.texts), text_field="content"))
    store = open_or_build(source, TextTokenizer(corpus.tokenizer), tmp_path / "cache", 0)
    assert documents_of(store) == corpus.documents


def test_e08_kind_of_file_that_is_not_read_is_refused_by_name(tmp_path):
    """E08: a gzip is never read as plain text, and never left out."""
    corpus = corpus_of_lines(tmp_path, good_lines())
    data = gzip.compress("".join(good_lines()).encode())
    for name in ("b.jsonl.bz2", "b.gz", "b.xyz"):
        (corpus.texts / name).write_bytes(data)
        with pytest.raises(InputError, match=rf"{name}: files of this kind are not read"):
            store_of(corpus)
        (corpus.texts / name).unlink()
    (corpus.texts / "b.jsonl").write_bytes(data)
    with pytest.raises(InputError, match=r"b.jsonl, line 1: not a JSON record"):
        store_of(corpus)


@pytest.mark.parametrize("shard_bytes", [0, 100])
def test_e08_compressed_files_give_the_documents_of_the_plain_ones(tmp_path, shard_bytes):
    """E08: the same documents, mixed in one folder and each way alone; places lead back to the same lines."""
    lines = [corpora.line(i, 3) for i in range(20)]
    data = ["\n".join(["", *map(str.rstrip, lines[start : start + 5])]).encode() for start in range(0, 20, 5)]
    kinds = {"jsonl": bytes, "jsonl.gz": gzip.compress, "json.zst": zstandard.compress, "json.gz": gzip.compress}
    found = []
    for number, suffixes in enumerate([list(kinds), *([suffix] * 4 for suffix in kinds)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        corpus = corpus_of_lines(folder, [])
        (corpus.texts / "a.jsonl").unlink()
        for i, suffix in enumerate(suffixes):
            (corpus.texts / f"{i}.{suffix}").write_bytes(kinds[suffix](data[i]))
        store = store_of(corpus, shard_bytes)
        assert documents_of(store) == corpus.documents
        assert len(store.manifest.shards) > (4 if shard_bytes else 0)
        found.append([(name.split(".")[0], record) for name, record in places_of(store.manifest, store.folder)])
    assert found[0] == [(str(i // 5), i % 5 + 1) for i in range(20)]
    assert all(places == found[0] for places in found)


def test_e10_huge_documents_stand_between_the_others_unharmed(tmp_path):
    """E10: a text of 2 million letters without a space, one of 300,000 words, and small ones around them."""
    small = [f"the fox number {i}" for i in range(200)]
    texts = [*small[:100], "a" * 2_000_000, "the quick dog " * 100_000, *small[100:]]
    corpus = Corpus(tmp_path, [], True)
    write_bpe(corpus.tokenizer, bpe(), CONFIGS["strings"])
    corpus.texts.mkdir()
    (corpus.texts / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    store = store_of(corpus)
    reference = TextTokenizer(corpus.tokenizer, "tokenizers")
    assert reference.fast() is None and TextTokenizer(corpus.tokenizer).fast() is not None
    assert documents_of(store) == [reference.encode_batch([text])[0].tolist() for text in texts]


@pytest.mark.parametrize("vocab", [65_535, 65_536, 65_537, 131_072])
def test_e12_largest_ids_reach_the_batch(tmp_path, vocab):
    """E12: one document of 14 words whose ids, and those of unknown and EOS, end at the vocabulary's last."""
    corpus = make_corpus(tmp_path, [14])
    write_tokenizer(corpus.tokenizer, corpus.lengths, first_id=vocab - 16)
    store = store_of(corpus)
    assert store.manifest.dtype == ("<u2" if vocab <= 65_536 else "<i4")
    ids = [*range(vocab - 16, vocab - 2), vocab - 1]
    assert documents_of(store) == [ids]
    (row,) = uninterrupted(builder(corpus, seq_len=14), 1, batch=1)
    assert (list(row.inputs), list(row.labels)) == (ids[:-1], ids[1:])


def test_e15_samples_past_2_31_and_2_32_tokens_and_bytes(tmp_path):
    """E15: a shard of 3 times 1.5e9 tokens by number, and a sparse file of 6 GiB by reading."""
    tokens = 3 * 1_500_000_000
    assert int(num_samples(np.array([tokens]), 4096)[0]) == -(-(tokens - 1) // 4096)
    assert span(1_000_000, 4096, tokens) == (4_096_000_000, 4_096_004_097)
    folder = make_store(tmp_path / "s", [[1]])
    tokens = 2**31 + 2**30 + 9
    with open(folder / "000000-000.bin", "r+b") as file:
        file.truncate(2 * tokens)
        file.seek(2 * (tokens - 9))
        file.write(np.arange(11, 20, dtype="<u2").tobytes())
        if (folder / "000000-000.bin").stat().st_blocks * 512 > 2**28:
            pytest.skip("this file system has no sparse files")
    (record,) = Manifest.read(folder).shards
    record = record.__class__(**{**vars(record), "tokens": tokens, "spots": {}})
    (folder / "manifest.json").write_bytes(Manifest({}, "<u2", [], [record]).to_json())
    store = TokenStore(folder)
    samples = int(num_samples(store.tokens_per_shard, 8)[0])
    row = np.empty(9, dtype=np.int64)
    assert fill_row(row, store.tokens(0), samples - 1) == 8
    assert row.tolist() == list(range(11, 20))
