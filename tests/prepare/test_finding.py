"""Where the store of a source is."""

import json

import pytest

from tests.prepare.test_chat import TALK, write_tokenizer
from zephon_patches import SourceConfig
from zephon_patches.prepare.build import open_or_build
from zephon_patches.prepare.finding import find_store
from zephon_patches.prepare.inputs import make_input
from zephon_patches.prepare.tokenizers import TextTokenizer


@pytest.mark.parametrize("field", [{"text_field": "text"}, {"chat_field": "messages"}], ids=str)
@pytest.mark.parametrize("version", [None, "v1"])
def test_looking_finds_the_store_that_building_made(tmp_path, field, version):
    # A data set of the hub has a version, which its files' names begin with, and is found by it without them.
    texts = tmp_path / "texts" / "v1"
    texts.mkdir(parents=True)
    (texts / "0.jsonl").write_text(json.dumps({"text": "be kind", "messages": TALK}) + "\n")
    source = make_input(SourceConfig("web", str(tmp_path / "texts"), **field))
    source.version = version
    tokenizer = TextTokenizer(write_tokenizer(tmp_path / "tokenizer"))
    built = open_or_build(source, tokenizer, tmp_path / "cache", 0)
    assert find_store(source, tokenizer, tmp_path / "cache", 0) == built.folder
