"""The engines give the same arrays for the same tokenizer, and pass on what goes wrong."""

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from tests.prepare.ranks import write_ranks
from tests.prepare.test_tokenizers import ADDS, CONFIGS, TEXTS, bpe, word_level, write
from zephon_patches.prepare import engines
from zephon_patches.prepare.engines import FastokensEngine, TiktokenEngine, TokenizersEngine, UnsuitableEngine
from zephon_patches.prepare.exactness import compare
from zephon_patches.prepare.ranks import Ranks
from zephon_patches.prepare.tokenizers import TextTokenizer


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory) -> dict:
    ranks = Ranks.read(write_ranks(tmp_path_factory.mktemp("ranks")))
    tokenizer = ranks.to_tokenizer()
    return {
        "tokenizers": TokenizersEngine(tokenizer),
        "tiktoken": TiktokenEngine(ranks.encoding()),
        "fastokens": FastokensEngine(tokenizer.to_str()),
    }


@pytest.mark.parametrize("name", ["tokenizers", "tiktoken", "fastokens"])
@pytest.mark.parametrize("texts", [[], [""], ["", ""], ["the fox"], ["a", "", "the <|end|> dog", "é", ""]])
def test_ids_and_offsets(of_ranks, name, texts):
    ids, offsets = of_ranks[name].encode(texts)
    assert (ids.dtype, offsets.dtype) == (np.uint32, np.int64)
    assert len(offsets) == len(texts) + 1 and offsets[0] == 0 and offsets[-1] == len(ids)
    expected = [of_ranks["tokenizers"]._tokenizer.encode(text).ids for text in texts]
    assert [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)] == expected
    assert of_ranks[name].name.startswith(name)


@given(st.lists(st.text() | st.text(st.sampled_from("ab the\n\t 1<|end|>é中'S")), max_size=5))
def test_all_engines_give_the_same_ids(of_ranks, texts):
    expected = of_ranks["tokenizers"].encode(texts)
    for name in ("tiktoken", "fastokens"):
        for found, wanted in zip(of_ranks[name].encode(texts), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", ["tokenizers", "tiktoken", "fastokens"])
def test_a_lone_surrogate_is_an_exception(of_ranks, name):
    with pytest.raises(Exception, match="surrogates|TextEncodeInput"):
        of_ranks[name].encode(["fine", "\ud800"])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("adds", ADDS)
def test_fastokens_gives_the_references_ids_with_all_kinds_of_ends(tmp_path, adds, config):
    """Special tokens of tokenizer_config.json and of the post-processor, BOS and EOS in all their ways."""
    tokenizer = TextTokenizer(write(tmp_path, bpe(), CONFIGS[config], adds), "fastokens")
    fast = tokenizer.fast()
    assert fast is not None and isinstance(fast._engine, FastokensEngine)
    assert compare(fast, tokenizer, [*TEXTS, *tokenizer.nasty_texts()]) is None
    if tokenizer.bos_id is not None and tokenizer.eos_id is not None:
        for ends in ((False, True), (True, False), (False, False)):
            other = tokenizer.with_ends(*ends, "source 'web'")
            assert compare(other.fast(), other, TEXTS) is None


def test_truncation_and_padding_are_off_in_both(tmp_path):
    limited = bpe()
    limited.enable_truncation(4)
    limited.enable_padding(length=9)
    tokenizer = TextTokenizer(write(tmp_path, limited, CONFIGS["strings"]))
    assert compare(tokenizer.fast(), tokenizer, ["the quick brown fox" * 3, "a"]) is None


def test_fastokens_with_normalizers_is_the_reference_or_refused(tmp_path):
    served = 0
    forms = [normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()]
    for number, normalizer in enumerate(forms):
        tokenizer = bpe()
        tokenizer.normalizer = normalizer
        text_tokenizer = TextTokenizer(write(tmp_path / str(number), tokenizer, CONFIGS["strings"]))
        if (fast := text_tokenizer.fast()) is not None:
            served += 1
            assert compare(fast, text_tokenizer, [*TEXTS, *text_tokenizer.nasty_texts()]) is None, normalizer
    assert served


def test_fastokens_says_what_it_does_not_support(tmp_path):
    with pytest.raises(UnsuitableEngine, match=r"fastokens .* does not load the tokenizer \(.*Whitespace"):
        FastokensEngine(word_level().to_str())
    with pytest.raises(UnsuitableEngine, match="does not load"):
        FastokensEngine("{")


def test_a_missing_package_is_unsuitable(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fastokens._native", None)
    with pytest.raises(UnsuitableEngine, match=r"not installed .*pip install fastokens"):
        FastokensEngine(bpe().to_str())
    assert TextTokenizer(write(tmp_path, bpe())).fast() is None


def test_a_panic_of_the_library_is_an_exception_and_ctrl_c_is_not(monkeypatch):
    """Panics of Rust code are no ``Exception``: nobody would take the reference in their place."""
    panic = type("PanicException", (BaseException,), {})
    engine = FastokensEngine(bpe().to_str())

    class Failing:
        def __init__(self, error):
            self.error = error

        def encode_batch_flat(self, texts, add_special_tokens):
            raise self.error

    engine._tokenizer = Failing(panic("index out of bounds"))
    with pytest.raises(RuntimeError, match=r"fastokens .*: index out of bounds"):
        engine.encode(["a"])
    engine._tokenizer = Failing(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.encode(["a"])


def test_threads(monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    assert engines.num_threads() == 3
    monkeypatch.setenv("RAYON_NUM_THREADS", "many")
    assert engines.num_threads() >= 1
    monkeypatch.delenv("RAYON_NUM_THREADS")
    assert engines.num_threads() >= 1
