"""The trainer takes a folder with BPE ranks, and its ids are those of the tokenizer.json made from them."""

import json

import pytest

from tests.corpora import make_corpus
from tests.prepare.ranks import TEXT, train_ranks, write_ranks
from tests.prepare.test_ranks import to_json
from tests.resume import rows_of
from tests.titan.jobs import changed, job
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer, build_hf_tokenizer
from torchtitan.hf_datasets.text_datasets import build_text_dataloader, build_text_validation_dataloader
from zephon_patches import SourceConfig
from zephon_patches.titan.tokenizer import RanksTokenizer


@pytest.fixture
def config(tmp_path):
    corpus = make_corpus(tmp_path / "corpus", [5, 6])
    return job(corpus, model__hf_assets_path=str(write_ranks(tmp_path / "ranks")))


def test_ids_are_those_of_upstreams_tokenizer_on_the_tokenizer_json(config, tmp_path):
    tokenizer = build_hf_tokenizer(config)
    assert isinstance(tokenizer, RanksTokenizer) and isinstance(tokenizer, BaseTokenizer)
    upstream = HuggingFaceTokenizer(str(to_json(tmp_path / "ranks", tmp_path / "json")))
    for text in (TEXT, "", "a<|end|>b", " é中 "):
        for ends in ({}, {"add_bos": True}, {"add_eos": True}, {"add_bos": True, "add_eos": True}):
            ids = tokenizer.encode(text, **ends)
            assert ids == upstream.encode(text, **ends)
            assert tokenizer.decode(ids) == upstream.decode(ids)
            assert tokenizer.decode(ids, skip_special_tokens=False) == upstream.decode(ids, skip_special_tokens=False)
    for key in ("bos_id", "eos_id", "bos_token", "eos_token", "vocab_size"):
        assert getattr(tokenizer, key) == getattr(upstream, key), key
    assert tokenizer.get_vocab_size() == upstream.get_vocab_size()
    ids = [train_ranks()[b"a"], 400, 402]
    assert [tokenizer.id_to_token(number) for number in ids] == [upstream.id_to_token(number) for number in ids]
    assert [tokenizer.token_to_id(token) for token in ("a", "<|begin|>", "<|end|>")] == ids
    assert tokenizer.get_vocab()["<|end|>"] == 402
    assert tokenizer.token_to_id("no such token") is None and tokenizer.id_to_token(401) is None


def test_a_tokenizer_json_is_upstreams_affair(config, tmp_path):
    folder = to_json(tmp_path / "ranks", tmp_path / "json")
    assert isinstance(build_hf_tokenizer(changed(config, model__hf_assets_path=str(folder))), HuggingFaceTokenizer)


def test_the_stock_strategy_is_as_upstream(config):
    with pytest.raises(FileNotFoundError, match="No supported tokenizer files"):
        build_hf_tokenizer(changed(config, data__loading_strategy="stock"))


@pytest.mark.parametrize("validation", [False, True])
def test_training_and_validation_read_what_the_trainers_tokenizer_encodes(config, tmp_path, validation):
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = [f"{TEXT} {i}" for i in range(20)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config.data.sources = config.data.validation_sources = [SourceConfig("ranks", str(folder))]
    config = changed(config, data__shuffle_shards=0, validation__steps=-1, validation__seq_len=8)
    config.validation.local_batch_size = 1
    tokenizer = build_hf_tokenizer(config)
    build = build_text_validation_dataloader if validation else build_text_dataloader
    loader = build(1, 0, tokenizer, config, infinite=False)
    stream = [token for text in texts for token in tokenizer.encode(text, add_bos=True, add_eos=True)]
    rows = [row for batch in loader for row in rows_of(batch)]
    seen = [token for row in rows for token in row[0]]
    assert seen[: len(stream) // 8 * 8] == stream[: len(stream) // 8 * 8]
