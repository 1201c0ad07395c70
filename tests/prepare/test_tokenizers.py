"""Ids as TorchTitan's tokenizer gives them, BOS and EOS each once, and what the identity stands for."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from zephon_patches.errors import ConfigError, InputError
from zephon_patches.prepare.tokenizers import TextTokenizer

TEXTS = [
    "the quick brown fox",
    "",
    " leading and trailing ",
    "a<s>b</s>c",
    "unknown: \u20ac \U0001f600 \u4e2d\u6587",
    "line\nbreak\ttab",
    "<|x|> <pad>the",
]
SPECIAL = ["<s>", "</s>", "<pad>"]


def bpe() -> Tokenizer:
    """A byte-level BPE, trained on a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, then the fox naps"] * 20, trainer)
    return tokenizer


def word_level() -> Tokenizer:
    words = ["<unk>", *SPECIAL, "the", "quick", "brown", "fox", "a", "b", "c"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


MODELS = {"bpe": bpe, "words": word_level}

# What a post-processor of the tokenizer's own adds.
ADDS = {"nothing": None, "bos": "<s> $A", "eos": "$A </s>", "both": "<s> $A </s>"}

FORM = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
CONFIGS = {
    "no config": None,
    "empty": {},
    "strings": {"bos_token": "<s>", "eos_token": "</s>"},
    "objects": {"bos_token": {"content": "<s>", **FORM}, "eos_token": {"content": "</s>", "__type": "AddedToken"}},
    "eos only": {"bos_token": None, "eos_token": "</s>"},
    "bos only": {"bos_token": "<s>"},
    "one token for both": {"bos_token": "<s>", "eos_token": "<s>"},
    "new tokens": {"bos_token": "<begin>", "eos_token": {"content": "<end>", **FORM}, "pad_token": "<pad>"},
    "added later": {
        "bos_token": "<s>",
        "eos_token": "<|x|>",
        "added_tokens_decoder": {"900": {"content": "<|x|>", **FORM}, "901": {"content": "<|y|>", "lstrip": True}},
    },
    "settings that only upstream's default reads": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False},
}


def write(folder, tokenizer: Tokenizer, config: dict | None = None, adds: str = "nothing"):
    folder.mkdir(parents=True, exist_ok=True)
    if ADDS[adds]:
        ids = [(token, tokenizer.token_to_id(token)) for token in SPECIAL]
        tokenizer.post_processor = processors.TemplateProcessing(single=ADDS[adds], special_tokens=ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def encode(tokenizer: TextTokenizer, texts) -> list[list[int]]:
    tokens, lengths = tokenizer.encode_batch(texts)
    assert tokens.dtype == np.uint32
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])] if lengths else []


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("adds", ADDS)
@pytest.mark.parametrize("model", MODELS)
def test_ids_are_those_of_torchtitans_tokenizer(tmp_path, model, adds, config):
    upstream = pytest.importorskip("torchtitan.components.tokenizer")
    folder = write(tmp_path, MODELS[model](), CONFIGS[config], adds)
    theirs = upstream.HuggingFaceTokenizer(str(folder))
    ours = TextTokenizer(folder)
    assert encode(ours, TEXTS) == [theirs.encode(text, add_bos=True, add_eos=True) for text in TEXTS]
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_id, theirs.eos_id)
    assert ours.largest_id == max(theirs.get_vocab().values())


@pytest.mark.parametrize("adds", ADDS)
@pytest.mark.parametrize("model", MODELS)
def test_bos_and_eos_come_once_each_whoever_adds_them(tmp_path, model, adds):
    """F09."""
    tokenizer = TextTokenizer(write(tmp_path, MODELS[model](), CONFIGS["strings"], adds))
    for ids in encode(tokenizer, ["the quick fox", "", "brown"]):
        assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
        assert ids.count(tokenizer.bos_id) == ids.count(tokenizer.eos_id) == 1


def test_tokenizer_without_bos_gives_eos_alone(tmp_path):
    """F10: nothing is required that was not asked for."""
    tokenizer = TextTokenizer(write(tmp_path, word_level(), CONFIGS["eos only"]))
    assert tokenizer.bos_id is None
    assert encode(tokenizer, ["the fox", ""]) == [[4, 7, 2], [2]]


def test_tokenizer_without_either_gives_the_text_alone(tmp_path):
    tokenizer = TextTokenizer(write(tmp_path, word_level()))
    assert encode(tokenizer, ["the fox", ""]) == [[4, 7], []]
    assert encode(tokenizer, []) == []


def test_string_and_object_form_of_a_token_give_the_same_ids(tmp_path):
    strings = TextTokenizer(write(tmp_path / "a", bpe(), CONFIGS["strings"]))
    objects = TextTokenizer(write(tmp_path / "b", bpe(), CONFIGS["objects"]))
    assert encode(strings, TEXTS) == encode(objects, TEXTS)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    plain = TextTokenizer(write(tmp_path / "a", bpe(), CONFIGS["strings"]))
    limited = bpe()
    limited.enable_truncation(4)
    limited.enable_padding(length=8, pad_id=2, pad_token="<pad>")
    limited = TextTokenizer(write(tmp_path / "b", limited, CONFIGS["strings"]))
    texts = ["the quick brown fox jumps over the lazy dog", "the"]
    assert encode(limited, texts) == encode(plain, texts)
    assert limited.identity == plain.identity


def test_a_batch_gives_what_single_texts_give(tmp_path):
    tokenizer = TextTokenizer(write(tmp_path, bpe(), CONFIGS["strings"]))
    assert encode(tokenizer, TEXTS) == [encode(tokenizer, [text])[0] for text in TEXTS]


# --- the identity ---


def identity(folder, tokenizer=None, config=None, adds="nothing") -> str:
    return TextTokenizer(write(folder, tokenizer or word_level(), config, adds)).identity


def test_identity_does_not_follow_formatting_names_or_unused_settings(tmp_path):
    first = identity(tmp_path / "a", config=CONFIGS["strings"])
    content = json.loads((tmp_path / "a" / "tokenizer.json").read_text())
    content = dict(reversed(content.items()))
    content["model"] = dict(reversed(content["model"].items()))
    (tmp_path / "a" / "tokenizer.json").write_text(json.dumps(content, indent=7))
    assert TextTokenizer(tmp_path / "a").identity == first
    assert identity(tmp_path / "elsewhere", config=CONFIGS["strings"]) == first
    assert identity(tmp_path / "b", config={**CONFIGS["strings"], "model_max_length": 5, "chat_template": "x"}) == first


def test_identity_follows_all_that_the_ids_depend_on(tmp_path):
    """H05: same file names, other ids."""
    words = ["<unk>", *SPECIAL, "the", "quick", "brown", "fox", "a", "b", "c"]
    permuted = Tokenizer(models.WordLevel({word: i for i, word in enumerate(reversed(words))}, unk_token="<unk>"))
    permuted.pre_tokenizer = pre_tokenizers.Whitespace()
    other_split = word_level()
    other_split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    one_more = word_level()
    one_more.add_tokens(["dog"])
    found = [
        identity(tmp_path / "0"),
        identity(tmp_path / "1", permuted),
        identity(tmp_path / "2", other_split),
        identity(tmp_path / "3", one_more),
        identity(tmp_path / "4", bpe()),
        identity(tmp_path / "5", adds="bos"),
        *(
            identity(tmp_path / name, config=config)
            for name, config in CONFIGS.items()
            if config and "settings" not in name
        ),
    ]
    assert len(set(found)) == len(found)
    assert all(len(digits) == 16 for digits in found)


# --- what cannot be used ---


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer.json: not found; expected a folder with the tokenizer's"):
        TextTokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(("content", "reason"), [("{", "damaged, not JSON"), ("[]", "expected a JSON object")])
def test_damaged_file_is_named(tmp_path, name, content, reason):
    write(tmp_path, word_level(), {})
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=f"{name}: {reason}"):
        TextTokenizer(tmp_path)


def test_json_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "none"}}')
    with pytest.raises(InputError, match="cannot be read as a tokenizer"):
        TextTokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"bos_token": 3}, "bos_token is 3, expected a text or an object"),
        ({"eos_token": {"lstrip": True}}, "eos_token is an object without 'content'"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is no object"),
        ({"added_tokens_decoder": {"5": {"content": [1]}}}, "an entry of added_tokens_decoder is of type list"),
        ({"added_tokens_decoder": {"5": {"content": None}}}, "an entry of added_tokens_decoder is an object without"),
    ],
)
def test_token_of_another_form_is_named(tmp_path, config, reason):
    with pytest.raises(InputError, match=f"tokenizer_config.json: {reason}"):
        TextTokenizer(write(tmp_path, word_level(), config))


def test_dropout_is_refused_since_ids_would_be_random(tmp_path):
    tokenizer = bpe()
    tokenizer.model.dropout = 0.5
    with pytest.raises(InputError, match=r"model.dropout is 0.5.* set it to null"):
        TextTokenizer(write(tmp_path, tokenizer))


# --- BOS and EOS as set ---


@pytest.mark.parametrize("config", ["strings", "one token for both", "new tokens", "no config", "eos only", "bos only"])
@pytest.mark.parametrize("adds", ADDS)
@pytest.mark.parametrize("model", MODELS)
def test_each_end_is_there_once_or_not_at_all_whoever_adds_it(tmp_path, model, adds, config):
    tokenizer = TextTokenizer(write(tmp_path, MODELS[model](), CONFIGS[config], adds))
    bos, eos = tokenizer.bos_id, tokenizer._eos_id
    texts = ["the quick fox", "", "brown"]
    own = {
        token: side for token, side in ((1, "front"), (2, "back")) if ADDS[adds] and SPECIAL[token - 1] in ADDS[adds]
    }
    plain = [
        Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(t, add_special_tokens=False).ids for t in texts
    ]
    first_special = MODELS[model]().token_to_id("<s>")
    # What the tokenizer adds on its own account and that is neither BOS nor EOS stays.
    front = [first_special] if 1 in own and first_special != bos else []
    back = [first_special + 1] if 2 in own and first_special + 1 != eos else []
    for add_bos in (True, False):
        for add_eos in (True, False):
            if (add_bos and bos is None) or (add_eos and eos is None):
                with pytest.raises(
                    ConfigError, match="source 'web': add_(b|e)os = true, but the tokenizer in .* has no"
                ):
                    tokenizer.with_ends(add_bos, add_eos, "source 'web'")
                continue
            found = encode(tokenizer.with_ends(add_bos, add_eos, ""), texts)
            assert found == [[bos] * add_bos + front + ids + back + [eos] * add_eos for ids in plain]


@pytest.mark.parametrize("adds", ADDS)
def test_one_end_that_is_set_leaves_the_other_as_it_is(tmp_path, adds):
    tokenizer = TextTokenizer(write(tmp_path, bpe(), CONFIGS["strings"], adds))
    (ids,) = encode(tokenizer, ["the fox"])
    assert encode(tokenizer.with_ends(None, None, ""), ["the fox"]) == [ids]
    assert encode(tokenizer.with_ends(False, None, ""), ["the fox"]) == [ids[1:]]
    assert encode(tokenizer.with_ends(None, False, ""), ["the fox"]) == [ids[:-1]]
    assert encode(tokenizer.with_ends(True, None, ""), ["the fox"]) == [ids]


def test_identity_is_that_of_the_default_where_the_ids_are(tmp_path):
    for adds in ADDS:
        tokenizer = TextTokenizer(write(tmp_path / adds, bpe(), CONFIGS["strings"], adds))
        assert tokenizer.with_ends(True, True, "").identity == tokenizer.identity
        others = [tokenizer.with_ends(*ends, "").identity for ends in ((False, None), (None, False), (False, False))]
        assert len({tokenizer.identity, *others}) == 4


def test_text_that_gives_nothing_hides_no_end(tmp_path):
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "zebra": 2}, unk_token="<none>"))
    words.add_special_tokens(["<s>", "</s>"])
    words.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    path = tmp_path / "t"
    path.mkdir()
    words.model = models.BPE({"<s>": 0, "</s>": 1, "z": 2}, [])
    words.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(CONFIGS["strings"]))
    tokenizer = TextTokenizer(path)
    assert encode(tokenizer, ["z", "a"]) == [[0, 2, 1], [0, 1]]
    assert encode(tokenizer.with_ends(False, False, ""), ["z", "a"]) == [[2], []]
