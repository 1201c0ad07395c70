"""A folder with BPE ranks gives the ids of the tokenizer.json made from the same ranks."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.prepare.ranks import PATTERN, TEXT, train_ranks, write_ranks
from zephon_patches.errors import ConfigError, InputError
from zephon_patches.prepare.engines import FastokensEngine
from zephon_patches.prepare.exactness import compare
from zephon_patches.prepare.ranks import Ranks, is_ranks_folder
from zephon_patches.prepare.tokenizers import TextTokenizer


def to_json(folder: Path, target: Path) -> Path:
    """The folder of a tokenizer.json made from ranks."""
    target.mkdir()
    ranks = Ranks.read(folder)
    ranks.to_tokenizer().save(str(target / "tokenizer.json"))
    config = {"bos_token": ranks.bos_token, "eos_token": ranks.eos_token}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_ranks(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def tokenizers(folder, tmp_path_factory) -> tuple[TextTokenizer, TextTokenizer]:
    """On the ranks, and on the tokenizer.json made from them."""
    json_folder = to_json(folder, tmp_path_factory.mktemp("json") / "tokenizer")
    return TextTokenizer(folder), TextTokenizer(json_folder, "tokenizers")


def ids(tokenizer, texts) -> list[list[int]]:
    tokens, lengths = tokenizer.encode_batch(texts)
    assert tokens.dtype == np.uint32
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]


def test_ids_are_those_of_the_tokenizer_json(tokenizers):
    ranks, reference = tokenizers
    assert ranks.engine_name.startswith("tiktoken")
    texts = [TEXT, "", "a<|end|>b <|begin|><|begin|>", " aaaaaaa", "\r\n\n  x", *reference.nasty_texts()]
    assert ids(ranks, texts) == ids(reference, texts)
    fast = ranks.fast()
    assert fast is not None
    assert compare(fast, ranks, texts) is None
    assert (ranks.bos_id, ranks.eos_id, ranks.largest_id) == (400, 402, 402)
    assert ids(ranks, ["a"])[0][0] == 400 and ids(ranks, ["a"])[0][-1] == 402


@given(st.lists(st.text(alphabet=st.sampled_from("abthequick fox,.\n'é中1")), max_size=4))
def test_ids_are_those_of_the_tokenizer_json_for_any_text(tokenizers, texts):
    ranks, reference = tokenizers
    assert ids(ranks, [*texts, "end"]) == ids(reference, [*texts, "end"])


def test_llama_3s_ranks(tmp_path):
    spec = importlib.util.find_spec("llama_models")
    if spec is None:
        pytest.skip("needs llama-models, which ships the ranks")
    [package] = spec.submodule_search_locations
    special = {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001, "<|eot_id|>": 128_009}
    folder = write_ranks(
        tmp_path / "ranks",
        pattern=PATTERN,
        special_tokens=special,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
    )
    shutil.copy(Path(package, "llama3", "tokenizer.model"), folder)
    ranks = TextTokenizer(folder)
    assert ids(ranks, ["hello world!"]) == [[128_000, 15_339, 1_917, 0, 128_001]]
    reference = TextTokenizer(to_json(folder, tmp_path / "json"), "tokenizers")
    texts = ["применять только для подписей", *reference.nasty_texts()]
    texts += [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    assert ids(ranks, texts) == ids(reference, texts)
    assert compare(ranks.fast(), ranks, texts) is None


def test_lone_surrogates_are_refused(tokenizers):
    """tiktoken itself would put another character there."""
    for texts in (["\ud800"], ["fine", "a\udfffb"]):
        with pytest.raises(UnicodeEncodeError):
            tokenizers[0].encode_batch(texts)


def test_a_long_text_takes_no_square_of_its_length(tokenizers):
    """With a tokenizer that does, this would take hours."""
    for tokenizer in (*tokenizers, tokenizers[0].fast()):
        _, [length] = tokenizer.encode_batch(["a" * 1_000_000])
        assert 0 < length < 1_000_000


def test_no_bos_and_eos(tmp_path):
    tokenizer = TextTokenizer(write_ranks(tmp_path, bos_token=..., eos_token=None))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)
    assert ids(tokenizer, ["", "a"]) == [[], [train_ranks()[b"a"]]]
    with pytest.raises(ConfigError, match=r"add_bos = true, but the tokenizer in .* has no BOS"):
        tokenizer.with_ends(True, None, "source 'web'")


def test_ends_may_be_set(folder):
    tokenizer = TextTokenizer(folder).with_ends(False, True, "source 'web'")
    assert ids(tokenizer, ["", "a"]) == [[402], [train_ranks()[b"a"], 402]]


def test_a_tokenizer_json_beside_counts(tmp_path):
    folder = write_ranks(tmp_path / "a")
    assert is_ranks_folder(folder)
    shutil.copy(to_json(folder, tmp_path / "b") / "tokenizer.json", folder)
    assert not is_ranks_folder(folder)
    assert TextTokenizer(folder).engine_name.startswith("tokenizers")


def test_identity_is_that_of_the_content(tmp_path):
    ranks = train_ranks()
    first = TextTokenizer(write_ranks(tmp_path / "a", ranks)).identity
    assert TextTokenizer(write_ranks(tmp_path / "a", ranks), "fastokens").identity == first
    other = write_ranks(tmp_path / "b", dict(reversed(ranks.items())), ranks="r.tiktoken")
    (other / "tokenizer.model").rename(other / "r.tiktoken")
    assert TextTokenizer(other).identity == first
    swapped = ranks | {b"a": ranks[b"b"], b"b": ranks[b"a"]}
    changes = [
        write_ranks(tmp_path / "c", swapped),
        write_ranks(tmp_path / "d", ranks, pattern=PATTERN.replace("{1,3}", "{1,2}")),
        write_ranks(tmp_path / "e", ranks, special_tokens={"<|begin|>": 400, "<|end|>": 403}),
        write_ranks(tmp_path / "f", ranks, eos_token=None),
    ]
    assert len({first, *(TextTokenizer(path).identity for path in changes)}) == 5


def test_an_engine_that_is_no_ranks_engine_is_an_error(folder):
    with pytest.raises(ConfigError, match=r"'tokenizers', but the tokenizer in .* is a tiktoken\.json; .*'tiktoken'"):
        TextTokenizer(folder, "tokenizers")
    assert TextTokenizer(folder, "tiktoken").fast() is None
    fast = TextTokenizer(folder, "fastokens").fast()
    assert fast is not None and isinstance(fast._engine, FastokensEngine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": ...}, r"tiktoken\.json: pattern is None, expected a text"),
        ({"pattern": 3}, r"pattern is 3, expected a text"),
        ({"pattern": "(unclosed"}, r"tiktoken\.json: tiktoken does not take it \(.*"),
        ({"special_tokens": ...}, r"special_tokens is None, expected an object of names and ids"),
        ({"special_tokens": {"<|begin|>": 5}}, r"the id 5 of '<\|begin\|>' is another token's, too"),
        ({"special_tokens": {"<|begin|>": 400, "<|end|>": 400}}, r"the id 400 of '<\|end\|>' is another token's, too"),
        ({"special_tokens": {"<|begin|>": True}}, r"'<\|begin\|>' has the id True, expected one below"),
        ({"special_tokens": {"": 400}}, r"'' has the id 400, expected one below"),
        ({"bos_token": "<s>"}, r"bos_token is '<s>', which is none of special_tokens"),
        ({"ranks": "nowhere"}, r"nowhere: cannot be read \(No such file"),
        ({"tokens": 1}, r"unknown key 'tokens'; the keys are ranks, pattern, special_tokens, bos_token, eos_token"),
    ],
)
def test_faults_in_the_config_are_named(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        TextTokenizer(write_ranks(tmp_path, **changes))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"\x0a\x0e\x0a\x05<unk>", r"tokenizer\.model, line \d: expected a token in base64 .*SentencePiece"),
        (b"YQ==\n", r"line 1: expected a token in base64 and its rank; found b'YQ=='"),
        (b"YQ== 1\nYQ== 2\n", r"line 2: the token b'a' has a rank already"),
        (b"YQ== -1\n", r"line 1: expected"),
        (b"YQ== 1\n", r"the byte 0x00 is no token, .*cut off\?"),
        (b"", r"the byte 0x00 is no token"),
    ],
)
def test_faults_in_the_ranks_are_named(tmp_path, lines, message):
    folder = write_ranks(tmp_path)
    (folder / "tokenizer.model").write_bytes(lines)
    with pytest.raises(InputError, match=message):
        TextTokenizer(folder)


def test_two_tokens_of_one_rank_are_refused(tmp_path):
    with pytest.raises(InputError, match="two tokens have the same rank"):
        TextTokenizer(write_ranks(tmp_path, train_ranks() | {b"zz": 17}))


@pytest.mark.parametrize(("content", "message"), [(b"{", "damaged, not JSON"), (b"[]", "expected a JSON object with")])
def test_a_damaged_config_is_named(tmp_path, content, message):
    (write_ranks(tmp_path) / "tiktoken.json").write_bytes(content)
    with pytest.raises(InputError, match=message):
        TextTokenizer(tmp_path)
