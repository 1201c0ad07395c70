"""Conversations: the template, where the assistant speaks, the tokens that count, and what is left out."""

import gzip
import json
import shlex
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.prepare.stores import contents
from tests.resume import Place, check_every_stop
from zephon_patches import DataConfig, SourceConfig, build_loader
from zephon_patches.cli.__main__ import main
from zephon_patches.errors import ConfigError, InputError
from zephon_patches.prepare.build import open_or_build
from zephon_patches.prepare.builder import Builder
from zephon_patches.prepare.chat import ChatTemplate
from zephon_patches.prepare.encoding import _inside
from zephon_patches.prepare.finding import tokenizer_for
from zephon_patches.prepare.inputs import make_input
from zephon_patches.prepare.readers import BadRecord
from zephon_patches.prepare.rendered import Rendered
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.prepare.unfinished import Unfinished
from zephon_patches.samples.sequence import IGNORE_INDEX
from zephon_patches.store.verify import verify_store

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
)
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]
TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi  there\n\n you"},
    {"role": "assistant", "content": " yes,\tnaïve 日本 🙂 "},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "no"},
]


def write_tokenizer(folder, template=CHATML, key="chat_template", **config):
    """A byte-level BPE that adds BOS by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["be kind hi there you and yes no assistant user system"] * 5, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]),
        ]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, **config}
    if key == "chat_template":
        content[key] = template
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def template(tmp_path, text, **more):
    return ChatTemplate(write_tokenizer(tmp_path / "t", text, **more))


def said(rendered):
    return [rendered.text[start:stop] for start, stop in rendered.spans]


# --- the template ---


def test_turns_of_the_assistant_are_found_by_prefixes(tmp_path):
    rendered = template(tmp_path, CHATML).render(TALK, "field 'messages'")
    assert rendered.text.startswith("<s><|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n")
    assert said(rendered) == [TALK[2]["content"] + "<|im_end|>\n", "no<|im_end|>\n"]


def test_turns_of_the_assistant_are_found_by_generation_blocks(tmp_path):
    rendered = template(tmp_path, GENERATION).render(TALK, "m")
    assert said(rendered) == [TALK[2]["content"] + "<|im_end|>", "no<|im_end|>"]
    assert rendered.text == template(tmp_path, CHATML).render(TALK, "m").text


def test_a_template_stands_in_its_own_file_or_under_the_name_default(tmp_path):
    texts = set()
    for number, (key, value) in enumerate(
        [("chat_template", CHATML), ("file", CHATML), ("chat_template", [{"name": "default", "template": CHATML}])]
    ):
        found = ChatTemplate(write_tokenizer(tmp_path / str(number), value, key))
        texts.add((found.render(TALK, "m").text, found.identity))
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no chat template: expected chat_template.jinja, or the key chat_template"),
        ("{% for %}", "is no Jinja template"),
        ([{"name": "tool_use", "template": CHATML}], "no chat template"),
    ],
)
def test_a_folder_without_a_template_is_an_error(tmp_path, text, said):
    with pytest.raises(InputError, match=said):
        template(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "messages", "reason", "said"),
    [
        (CHATML, "hi", "wrong type", "m is no conversation: expected a list of messages"),
        (CHATML, [], "wrong type", "expected a list"),
        (CHATML, [{"content": "x"}], "wrong type", "each an object with a role"),
        (CHATML, [{"role": "user", "content": "\ufdd0"}], "noncharacter", "U\\+FDD0"),
        (CHATML, [{"role": "user", "content": "\ud800"}], "lone surrogate", "m has a lone"),
        ("{{ raise_exception('no system') }}", TALK, "template error", "no system"),
        ("{{ messages[7].content.x }}", TALK, "template error", "UndefinedError"),
        ("{{ messages.append(1) }}", TALK, "template error", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", TALK, "template error", "SecurityError"),
        ("{{ strftime_now('%Y') }}", TALK, "template error", "strftime_now"),
        ("{{ messages | length }}{{ messages[-1].content }}", TALK, "not a prefix", "message 2 .*generation"),
        ("{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}", TALK, "template error", "nests"),
    ],
)
def test_a_conversation_that_cannot_be_written_is_a_bad_record(tmp_path, text, messages, reason, said):
    found = template(tmp_path, text).render(messages, "m")
    assert isinstance(found, BadRecord)
    assert found.reason == reason
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(found.message)


def test_a_template_gets_what_templates_expect(tmp_path):
    text = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ eos_token }}{{ tools is none }}{{ strftime_now is defined }}{{ documents is none }}"
    )
    rendered = template(tmp_path, text).render([{"role": "user", "content": "<é>"}], "m")
    assert rendered == Rendered('{"role": "user", "content": "<é>"}<|im_end|>TrueFalseTrue', [])


# --- tokens and mask ---


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def write_chats(folder, *chats, name="texts/a.jsonl", field="messages"):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({field: chat}) + "\n" for chat in chats))
    return path


def build(folder, path=None, **settings):
    source = SourceConfig("chat", str(path or folder / "texts"), chat_field="messages", **settings)
    config = DataConfig(sources=[source], packing="document")
    found = make_input(source)
    return open_or_build(found, tokenizer_for(found, config, TextTokenizer(folder / "tokenizer")), folder / "cache", 0)


def test_ids_are_those_of_the_whole_text_and_the_mask_is_what_the_assistant_says(folder):
    write_chats(folder, TALK, TALK[1:3])
    store = build(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    template = ChatTemplate(folder / "tokenizer")
    texts = [template.render(chat, "m").text for chat in (TALK, TALK[1:3])]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert store.tokens(0).tolist() == ids[0] + ids[1]
    assert [each.count(tokenizer.token_to_id("<s>")) for each in ids] == [1, 1]  # the template's own, once
    mask = store.mask(0)
    assert mask.dtype == np.uint8
    labelled = [token for token, inside in zip(store.tokens(0).tolist(), mask.tolist(), strict=True) if inside]
    text = tokenizer.decode(labelled, skip_special_tokens=False)
    answer = TALK[2]["content"] + "<|im_end|>\n"
    assert text == answer + "no<|im_end|>\n" + answer
    assert verify_store(store.folder) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["user", "assistant", "system"]),
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0\ufdd1"), max_size=12),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([CHATML, GENERATION]),
)
def test_labels_are_the_assistant_s_characters_for_any_conversation(tmp_path_factory, turns, text):
    folder = tmp_path_factory.mktemp("any")
    tokenizer = TextTokenizer(write_tokenizer(folder, text))
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = tokenizer.chat_template().render(messages, "m")
    assert isinstance(rendered, Rendered)
    end = "<|im_end|>\n" if text == CHATML else "<|im_end|>"
    assert said(rendered) == [content + end for role, content in turns if role == "assistant"]
    [(ids, offsets)] = tokenizer.encode_rendered([rendered.text])
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ids.tolist() == library.encode(rendered.text, add_special_tokens=False).ids
    inside = _inside(offsets, rendered.spans).tolist()
    # Special tokens hold each span's ends, so no token reaches over them but white space behind <|im_end|>.
    decoded = library.decode([i for i, m in zip(ids.tolist(), inside, strict=True) if m], skip_special_tokens=False)
    assert decoded.replace("\n", "") == "".join(said(rendered)).replace("\n", "")


def test_records_without_a_label_are_left_out_and_counted(folder, capsys):
    write_chats(folder, TALK[:2], TALK, [{"role": "assistant", "content": "x"}], TALK[1:2])
    store = build(folder)
    assert store.num_documents == 2
    assert store.manifest.skipped == {"no label": 2}
    lines = (store.folder / "skipped.jsonl").read_text().splitlines()
    assert [(json.loads(line)["record"], json.loads(line)["reason"]) for line in lines] == [
        (0, "no label"),
        (3, "no label"),
    ]


def test_bad_conversations_stop_the_build_or_are_skipped_as_asked(folder):
    path = write_chats(folder, TALK, "hello", TALK)
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: field 'messages' is no conversation"):
        build(folder)
    store = build(folder, path, on_bad_record="skip")
    assert store.num_documents == 2
    assert store.manifest.skipped == {"wrong type": 1}


def test_parquet_and_compressed_lines_give_the_same_tokens(folder):
    path = write_chats(folder, TALK, TALK[1:3])
    expected = build(folder)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    pq.write_table(pa.table({"messages": [TALK, TALK[1:3]]}), folder / "c.parquet")
    for other in ("b.jsonl.gz", "c.parquet"):
        store = build(folder, folder / other)
        assert store.tokens(0).tolist() == expected.tokens(0).tolist()
        assert store.mask(0).tolist() == expected.mask(0).tolist()


def test_another_template_or_other_special_tokens_make_another_store(folder):
    write_chats(folder, TALK)
    stores = {build(folder).folder.name}
    write_tokenizer(folder / "tokenizer", GENERATION)
    stores.add(build(folder).folder.name)
    write_tokenizer(folder / "tokenizer", GENERATION, "file")
    stores.add(build(folder).folder.name)  # the same template from a file
    assert len(stores) == 2


def test_bos_and_eos_of_the_data_s_settings_are_no_matter_and_the_advice_can_be_followed(folder, capsys):
    path = write_chats(folder, TALK)
    source = make_input(SourceConfig("chat", str(path), chat_field="messages"))
    names = set()
    for ends in ({}, {"add_bos": True, "add_eos": True}, {"add_eos": False}):
        data = DataConfig(packing="document", **ends)
        tokenizer = tokenizer_for(source, data, TextTokenizer(folder / "tokenizer"))
        names.add(open_or_build(source, tokenizer, folder / "cache", 0).folder)
    [store] = names
    before = contents(store)
    (store / "manifest.json").unlink()
    advice = Builder(source, tokenizer, store, {"shard_bytes": 0}).advice()
    command = shlex.split(advice[advice.index("prepare") :])
    assert main(command) == 0
    assert contents(store) == before


# --- samples ---


def config(folder, packing="best_fit", **settings):
    source = SourceConfig("chat", str(folder / "texts"), chat_field="messages")
    return DataConfig(sources=[source], cache_dir=str(folder / "cache"), packing=packing, **settings)


def loader_of(folder, seq_len, **settings):
    return build_loader(
        config(folder, shuffle_shards=0, **settings),
        folder / "tokenizer",
        seq_len=seq_len,
        global_batch_size=1,
        local_batch_size=1,
        infinite=False,
    )


@pytest.mark.parametrize("packing", ["best_fit", "document"])
@pytest.mark.parametrize("seq_len", [5, 16, 400])
def test_each_label_is_the_next_token_and_the_assistant_s_and_comes_once(folder, packing, seq_len):
    write_chats(folder, *[TALK, TALK[1:3], TALK[1:], TALK[2:3]] * 4)
    store = build(folder)
    tokens, mask = store.tokens(0).tolist(), store.mask(0).tolist()
    starts = (store.pointers(0) // store.itemsize).tolist()
    expected = sorted((tokens[i - 1], tokens[i]) for i, m in enumerate(mask) if m and i not in starts)
    found = []
    for inputs, labels in loader_of(folder, seq_len, packing=packing):
        valid = labels != IGNORE_INDEX
        assert valid.any(), "a sample without a label"
        found += zip(inputs["input"][valid].tolist(), labels[valid].tolist(), strict=True)
    assert sorted(found) == expected


def test_a_damaged_mask_is_found_and_made_again(folder):
    write_chats(folder, TALK)
    store = build(folder)
    list(loader_of(folder, 16))
    path = store.folder / "000000-000.mask"
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with pytest.raises(Exception, match=r"000000-000.mask: .* bytes, but the manifest says"):
        list(loader_of(folder, 16))
    path.write_bytes(bytes([1]) + good[1:])
    assert main(["verify", str(store.folder)]) == 1
    assert main(["verify", "--repair", str(store.folder)]) == 0
    assert not path.exists()
    build(folder)
    assert path.read_bytes() == good


def test_another_mask_is_other_data(folder):
    """Two templates with the same text, and other spans: the order's data differs."""
    write_chats(folder, TALK)
    one = build(folder).data_fingerprint
    write_tokenizer(folder / "tokenizer", GENERATION)
    assert build(folder).data_fingerprint != one


# --- settings and commands ---


@pytest.mark.parametrize(
    "more", [{"text_field": "t"}, {"token_field": "t"}, {"processor": "a:b"}, {"add_bos": True}, {"add_eos": True}]
)
def test_settings_that_do_not_go_with_conversations_are_refused_by_name(more):
    with pytest.raises(ConfigError, match=f"both chat_field and {next(iter(more))} are set"):
        SourceConfig("chat", "x", chat_field="messages", **more)


def test_conversations_are_not_concatenated():
    source = SourceConfig("chat", "x", chat_field="messages")
    with pytest.raises(ConfigError, match="source 'chat' has a chat_field, which goes with data.packing"):
        DataConfig(sources=[source])
    with pytest.raises(ConfigError, match="source 'chat' has a chat_field"):
        DataConfig(validation_sources=[source])


def test_prepare_makes_a_store_of_conversations_and_its_plans(folder, capsys):
    path = write_chats(folder, TALK, TALK[:2])
    source = ["prepare", "--source", f"chat={path}", "--tokenizer", str(folder / "tokenizer"), "--cache-dir"]
    command = [*source, str(folder / "c"), "--chat-field", "messages", "--packing", "best_fit", "--seq-len", "16"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "1 no label" in out
    assert "best_fit" in out
    assert main([*source, str(folder / "d"), "--chat-field", "messages"]) == 0
    [store] = (folder / "d" / "chat").iterdir()
    assert (store / "000000-000.mask").exists()


def test_a_run_is_stopped_at_every_step_and_goes_on_at_other_sizes(folder):
    write_chats(
        folder,
        *[[{"role": "user", "content": f"hi {n}"}, {"role": "assistant", "content": "no " * n}] for n in range(40)],
    )

    def build_rank(place, rank):
        return build_loader(
            config(folder, positions=True),
            folder / "tokenizer",
            seq_len=24,
            global_batch_size=place.batch,
            local_batch_size=place.local,
            dp_rank=rank,
            dp_size=place.dp,
            num_workers=place.workers,
        )

    check_every_stop(build_rank, Place(2, 3), [Place(3, 4), Place(1, 12), Place(5, 2, workers=1)], 5)


def test_a_mask_that_an_unfinished_store_lost_is_made_again(folder):
    write_chats(folder, TALK)
    found = build(folder)
    store, [shard] = found.folder, found.manifest.shards
    before = contents(store)
    (store / "manifest.json").unlink()
    (store / "units").mkdir()
    unfinished = Unfinished(store, np.dtype("<u2"))
    unfinished.mark(shard, last=True)
    assert unfinished.has(0, 0)
    (store / "000000-000.mask").unlink()
    assert not unfinished.has(0, 0)
    assert contents(build(folder).folder) == before


def test_a_source_in_which_the_assistant_never_speaks_is_an_error(folder):
    write_chats(folder, TALK[:2], TALK[1:2])
    assert verify_store(build(folder).folder) == []
    with pytest.raises(InputError, match=r"0 tokens in 0 documents .* give no sample; .*no label 2"):
        loader_of(folder, 16)


def test_skipped_records_are_listed_in_their_order(folder):
    write_chats(folder, TALK, TALK[:2], "bad", TALK[:1], 7, TALK)
    store = build(folder, on_bad_record="skip")
    lines = [json.loads(line) for line in (store.folder / "skipped.jsonl").read_text().splitlines()]
    assert [line["record"] for line in lines] == [1, 2, 3, 4]
    assert store.manifest.skipped == {"no label": 2, "wrong type": 2}


def test_ranks_have_no_chat_template(folder, monkeypatch):
    tokenizer = TextTokenizer(folder / "tokenizer")
    monkeypatch.setattr(tokenizer, "_loaded", replace(tokenizer._loaded, tokenizer=None))
    with pytest.raises(InputError, match="conversations need a tokenizer.json and its chat template"):
        tokenizer.chat_template()
