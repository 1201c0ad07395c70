"""Functions of the user's that make texts of records."""

import gzip
import importlib
import json
import linecache
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpora import line
from tests.prepare.stores import (
    LENGTHS,
    SHARD_BYTES,
    document,
    documents_of,
    file_input,
    open_store,
    places_of,
    write_mixed,
)
from zephon_patches.cli.__main__ import main
from zephon_patches.config import SourceConfig
from zephon_patches.errors import ConfigError, InputError
from zephon_patches.prepare.shards import FileInput
from zephon_patches.prepare.tokenizers import TextTokenizer

MODULE = """
class Kept:
    @staticmethod
    def text(record):
        return record["text"]


def text(record):
    return record["text"]


def by_id(record):
    return {0: None, 1: [], 2: "0_0", 3: ["0_0", "0_1"], 4: ("",)}[record["id"]]


def surrogate(record):
    return ["0_0", "\\ud800"] if record["id"] == 2 else "0_0"


def number(record):
    return record["id"]


NO_FUNCTION = 5
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module with processors, and a way to change its text."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(text: str = MODULE) -> None:
        sys.modules.pop("user_processors", None)
        (folder / "user_processors.py").write_text(text)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        linecache.clearcache()
        importlib.invalidate_caches()

    write()
    yield write
    sys.modules.pop("user_processors", None)


def ids_of(folder, texts):
    tokenizer = TextTokenizer(folder / "tokenizer")
    return [tokenizer.encode_batch([text])[0].tolist() for text in texts]


def write_numbered(folder, numbers, name="a.jsonl"):
    write_mixed(folder)
    for path in (folder / "texts").rglob("*.*"):
        path.unlink()
    data = "".join(json.dumps({"id": i}) + "\n" for i in numbers).encode()
    (folder / "texts" / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)


@pytest.mark.parametrize("name", ["text", "Kept.text"])
def test_processor_that_gives_the_field_gives_the_same_documents_of_every_format(tmp_path, module, name):
    write_mixed(tmp_path)
    (tmp_path / "texts" / "f.jsonl.gz").write_bytes(gzip.compress(line(3, LENGTHS[3]).encode()))
    store = open_store(tmp_path, processor=f"user_processors:{name}")
    assert documents_of(store) == ids_of(tmp_path, [*map(document, range(60)), document(3)])
    assert store.data_fingerprint == open_store(tmp_path).data_fingerprint


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_record_gives_a_text_several_or_none(tmp_path, module, name):
    write_numbered(tmp_path, [0, 3, 1, 2, 4, 3], name)
    for shard_bytes in (SHARD_BYTES, 20):
        store = open_store(tmp_path, shard_bytes=shard_bytes, processor="user_processors:by_id")
        assert documents_of(store) == ids_of(tmp_path, ["0_0", "0_1", "0_0", "", "0_0", "0_1"])
        places = places_of(store.manifest, store.folder)
        assert places == [(name, 1), (name, 1), (name, 3), (name, 4), (name, 5), (name, 5)]


def test_all_columns_of_parquet_are_given(tmp_path, module):
    write_numbered(tmp_path, [])
    pq.write_table(pa.table({"other": [[1], []], "id": [3, 0]}), tmp_path / "texts" / "a.parquet")
    store = open_store(tmp_path, processor="user_processors:by_id")
    assert documents_of(store) == ids_of(tmp_path, ["0_0", "0_1"])


@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_exception_names_file_and_record(tmp_path, module, on_bad_record):
    """A fault of the function, not of the record, so it is never skipped."""
    for name in ("a.jsonl", "a.jsonl.gz"):
        write_numbered(tmp_path / name, [0, 3, 1, 2, 9, 3], name)
        with pytest.raises(InputError, match=rf"{name}, line 5: the processor raised KeyError\(9\)") as caught:
            open_store(tmp_path / name, processor="user_processors:by_id", shard_bytes=20, on_bad_record=on_bad_record)
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(InputError, match=rf"{name}, line 1: the processor gave int, expected a text, a list"):
            open_store(tmp_path / name, processor="user_processors:number", on_bad_record=on_bad_record)


BAD = {b"no json": "not a JSON record", b"5": "a number, expected a JSON object$", b"null": "null, expected"}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_record_does_not_reach_it(tmp_path, module, bad):
    write_numbered(tmp_path, [3])
    path = tmp_path / "texts" / "a.jsonl"
    path.write_bytes(bad + b"\n" + path.read_bytes())
    with pytest.raises(InputError, match=f"line 1: {BAD[bad]}"):
        open_store(tmp_path, processor="user_processors:by_id")
    store = open_store(tmp_path, processor="user_processors:by_id", on_bad_record="skip")
    assert sum(store.manifest.skipped.values()) == 1
    assert documents_of(store) == ids_of(tmp_path, ["0_0", "0_1"])


def test_lone_surrogate_in_a_text_of_its_makes_the_record_a_bad_one(tmp_path, module):
    write_numbered(tmp_path, [3, 2, 3])
    with pytest.raises(InputError, match=r"line 2: the processor gave a text with a lone surrogate"):
        open_store(tmp_path, processor="user_processors:surrogate")
    store = open_store(tmp_path, processor="user_processors:surrogate", on_bad_record="skip")
    assert store.manifest.skipped == {"lone surrogate": 1}
    assert documents_of(store) == ids_of(tmp_path, ["0_0", "0_0"])


def test_recipe_knows_the_function_by_name_and_text(tmp_path, module):
    write_mixed(tmp_path)
    first = file_input(tmp_path, processor="user_processors:text").recipe()
    assert first["processor"][0] == "user_processors:text"
    assert file_input(tmp_path, processor="user_processors:Kept.text").recipe() != first
    module(MODULE.replace("NO_FUNCTION = 5", "NO_FUNCTION = 6"))
    assert file_input(tmp_path, processor="user_processors:text").recipe() == first
    module(MODULE.replace('return record["text"]', 'return record["text"].lower()'))
    assert file_input(tmp_path, processor="user_processors:text").recipe() != first
    assert file_input(tmp_path, processor="json:dumps").recipe()["processor"][0] == "json:dumps"
    assert file_input(tmp_path, processor="builtins:str").recipe()["processor"] == ["builtins:str"]
    assert "processor" not in file_input(tmp_path).recipe()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module:f", "no_such_module cannot be imported .ModuleNotFoundError"),
        ("broken_module:f", "broken_module cannot be imported .ZeroDivisionError"),
        ("user_processors:no", "user_processors has no 'no'"),
        ("user_processors:Kept.no", "user_processors has no 'Kept.no'"),
        ("user_processors:NO_FUNCTION", "int, which cannot be called"),
    ],
)
def test_processor_that_cannot_be_had_is_a_config_error(tmp_path, module, name, text):
    (tmp_path / "modules" / "broken_module.py").write_text("1 / 0")
    write_mixed(tmp_path)
    with pytest.raises(ConfigError, match=f"source 'web': processor = '{name}': {text}"):
        file_input(tmp_path, processor=name)


@pytest.mark.parametrize("name", ["json", "json.dumps", "json:", ":dumps", "a:b:c", "a b:c", "a/b:c", "..a:b"])
def test_name_of_another_form_is_refused(name):
    with pytest.raises(ConfigError, match="expected 'package.module:function'"):
        SourceConfig(name="a", path="p", processor=name)


def test_processor_and_text_field_exclude_each_other():
    with pytest.raises(ConfigError, match="both processor and text_field are set"):
        SourceConfig(name="a", path="p", processor="a:b", text_field="body")


def test_command_that_prepares_it_has_all_its_settings(tmp_path, module, capsys):
    write_mixed(tmp_path)
    source = SourceConfig(
        name="web", path=str(tmp_path / "texts"), processor="user_processors:text", on_bad_record="skip"
    )
    arguments = FileInput(source).prepare_arguments()
    arguments += ["--tokenizer", str(tmp_path / "tokenizer"), "--cache-dir", str(tmp_path / "cache")]
    assert main(["prepare", *arguments, "--shard-bytes", str(SHARD_BYTES)]) == 0
    store = open_store(tmp_path, processor="user_processors:text", on_bad_record="skip")
    assert [store.folder] == list((tmp_path / "cache" / "web").iterdir())
