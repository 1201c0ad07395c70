"""Workers and memory: group I of the known faults of data loaders. How workers start is in tests/loader."""

import multiprocessing
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tests.corpora import D240, Corpus, make_corpus, write_jsonl, write_tokenizer
from tests.resume import Place, Run, builder, expected_stream, uninterrupted
from zephon_patches import build_loader
from zephon_patches.errors import InputError
from zephon_patches.prepare.tokenizers import TextTokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d240"), D240)


def own_bytes(pid: int) -> int:
    """Memory of a process that it shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from Linux's /proc")
def test_workers_over_many_documents_need_no_more_memory_as_they_go_on(tmp_path):
    """I01: 4 workers, 2,000 items; 300,000 documents, of which a copy of any list would be seen."""
    texts = tmp_path / "texts" / "a.jsonl"
    texts.parent.mkdir()
    texts.write_bytes(b'{"text":"0_0"}\n' * 300_000)
    corpus = Corpus(tmp_path, [1], False)
    write_tokenizer(corpus.tokenizer, corpus.lengths, eos=False)
    loader = build_loader(
        corpus.config(),
        corpus.tokenizer,
        seq_len=8,
        global_batch_size=8,
        local_batch_size=8,
        num_workers=4,
        multiprocessing_context="fork",
    )
    before = set(multiprocessing.active_children())
    items = iter(loader)
    grown = []
    for count in (200, 1800):
        for _ in islice(items, count):
            pass
        workers = set(multiprocessing.active_children()) - before
        assert len(workers) == 4
        grown.append(sum(own_bytes(worker.pid) for worker in workers))
    assert grown[1] - grown[0] < 4 << 20, "all four together, over 1,800 items"
    assert grown[1] < 4 * (60 << 20)


def test_a_tokenizer_that_raises_is_an_error_with_the_record(tmp_path, monkeypatch):
    """I04: on document 17; workers only read what is tokenized, so this is before there are any."""
    corpus = make_corpus(tmp_path, D240)
    real = TextTokenizer.encode_batch

    def encode_batch(self, texts, *given, **named):
        if any(text.startswith("17_0 ") for text in texts):
            raise RuntimeError("no id for this")
        return real(self, texts, *given, **named)

    monkeypatch.setattr(TextTokenizer, "encode_batch", encode_batch)
    with pytest.raises(InputError, match=r"00\.jsonl, line 18\b.*no id for this"):
        builder(corpus)(Place(1, 12), 0)


def test_each_sample_comes_once_an_epoch_with_several_workers(corpus):
    """I08: 3 workers on each of 2 ranks."""
    run = Run(builder(corpus, infinite=False), Place(2, 3, 12, 3))
    rows: list = []
    while step := run.step():
        rows += step
    expected = expected_stream(corpus)
    assert Counter(rows) == Counter(expected.rows(0, expected.epoch_samples))
    assert len(rows) == 330


@pytest.mark.parametrize("files", [[32], [1, 2, 29]])
def test_there_may_be_fewer_files_than_ranks(tmp_path, files):
    """I10: documents of one sample in 1 file and in 3 uneven ones, on 8 ranks."""
    corpus = Corpus(tmp_path, [8] * 32, eos=True)
    write_tokenizer(corpus.tokenizer, corpus.lengths)
    first = 0
    for number, count in enumerate(files):
        write_jsonl(corpus.texts / f"{number}.jsonl", corpus.lengths[first : first + count], first)
        first += count
    build = builder(corpus, seq_len=9, infinite=False)
    samples = uninterrupted(build, 1, 32)
    ranks = Run(build, Place(8, 4, 32)).step_by_rank()
    assert [len(rank) for rank in ranks] == [4] * 8
    assert [row for rank in ranks for row in rank] == samples
    assert len(set(samples)) == 32
