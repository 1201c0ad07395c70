"""Token ids that are given: from each format into a store as they are, and every fault told with its place."""

import gzip
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import write_tokenizer
from tests.prepare.stores import documents_of, file_input
from zephon_patches import SourceConfig
from zephon_patches.cli.__main__ import main
from zephon_patches.errors import ConfigError, InputError
from zephon_patches.prepare.build import open_or_build
from zephon_patches.prepare.encoding import Encoder
from zephon_patches.prepare.finding import tokenizer_for
from zephon_patches.prepare.readers import Reading, _rows
from zephon_patches.prepare.repair import rebuild_command
from zephon_patches.prepare.tokenizers import TextTokenizer

DOCUMENTS = [[3, 0, 11], [], [7], [5, 5], list(range(12))]
LARGEST = 11  # 10 words, <unk> and EOS, which is 11


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path / "tokenizer", [10])
    (tmp_path / "texts").mkdir()
    return tmp_path


def store(folder, **settings):
    source = file_input(folder, **{"token_field": "input_ids", **settings})
    tokenizer = tokenizer_for(source, DATA, TextTokenizer(folder / "tokenizer"))
    return open_or_build(source, tokenizer, folder / "cache", 0)


class DATA:  # settings that are of texts, and change nothing here
    add_bos = None
    add_eos = True


def write(path, documents, kind=None):
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        data = "".join(json.dumps({"input_ids": ids}) + "\n" for ids in documents).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return
    table = pa.table({"other": ["x"] * len(documents), "input_ids": pa.array(documents, kind)})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", None),
        ("a.jsonl.gz", None),
        ("a.parquet", pa.list_(pa.int32())),
        ("a.parquet", pa.large_list(pa.uint16())),
        ("a.arrow", pa.list_(pa.int64())),
        ("a.arrow", pa.list_(pa.uint8())),
        ("a.arrow", pa.list_(pa.uint64())),
    ],
)
def test_ids_are_stored_as_they_are(folder, name, kind):
    write(folder / "texts" / name, DOCUMENTS, kind)
    found = store(folder)
    assert documents_of(found) == DOCUMENTS
    assert found.manifest.recipe["token_field"] == "input_ids"
    assert "text_field" not in found.manifest.recipe


def test_lists_of_fixed_size_and_fields_in_structs(folder):
    kind = pa.struct([("n", pa.int8()), ("ids", pa.list_(pa.int32(), 2))])
    table = pa.table({"meta": pa.array([{"n": 1, "ids": [1, 2]}, {"n": 1, "ids": [3, 4]}], kind)})
    pq.write_table(table, folder / "texts" / "a.parquet")
    (folder / "texts" / "b.jsonl").write_text('{"meta": {"ids": [5, 6]}}\n\n{"meta.ids": [7]}\n')
    assert documents_of(store(folder, token_field="meta.ids")) == [[1, 2], [3, 4], [5, 6], [7]]


def test_columns_of_integer_lists_make_no_python_numbers():
    batch = pa.record_batch({"a": pa.array([[1, 2], None, [3]], pa.list_(pa.int32()))})
    rows = [row["a"] for row in _rows(batch.slice(0, 2), "a")]
    assert isinstance(rows[0], np.ndarray) and rows[0].dtype == np.int32 and rows[1] is None
    assert rows[0].base is not None  # a view


ids_or_null = st.none() | st.lists(st.integers(0, 255), max_size=5)


@given(
    st.lists(ids_or_null, max_size=12),
    st.sampled_from([pa.list_(pa.uint8()), pa.large_list(pa.int64()), pa.list_(pa.int16(), 3)]),
    st.integers(0, 12),
    st.integers(0, 12),
    st.booleans(),
)
def test_arrow_s_own_memory_gives_what_python_s_lists_would(rows, kind, start, length, in_struct):
    if pa.types.is_fixed_size_list(kind):
        rows = [row and [*row, 0, 0, 0][:3] for row in rows if row != []]
    column = pa.array(rows, kind)
    if in_struct:
        column = pa.array([None if row == [1] else {"x": 1, "ids": row} for row in rows], pa.struct({"ids": kind}))
    batch = pa.record_batch({"m": column}).slice(start, length)
    field = "m.ids" if in_struct else "m"
    slow = [Reading(field, "token_field").documents(row, "column") for row in batch.to_pylist()]
    fast = [Reading(field, "token_field").documents(row, "column") for row in _rows(batch, field)]
    for one, other in zip(slow, fast, strict=True):
        assert one == other if not isinstance(one, list) else one[0].tolist() == other[0].tolist()


BAD = [
    ("[1, -2, 3]", "bad id", "token id -2 at place 1 (from 0), expected 0 to 11"),
    ("[1, 12]", "bad id", "token id 12 at place 1 (from 0), expected 0 to 11"),
    ("[18446744073709551615]", "bad id", "token id 18446744073709551615 at place 0"),
    ("[1, 2.0]", "wrong type", "holds 2.0 at place 1 (from 0), expected token ids"),
    ("[1, true]", "wrong type", "holds true or false at place 1"),
    ('[1, 2, "3"]', "wrong type", "holds '3' at place 2"),
    ("[[1]]", "wrong type", "holds a list at place 0"),
    ("[null]", "wrong type", "holds null at place 0"),
    ("null", "wrong type", "field 'input_ids' holds null, expected a list of token ids"),
    ('"1 2"', "wrong type", "holds a text, expected a list of token ids"),
    ("5", "wrong type", "holds a number, expected"),
]


@pytest.mark.parametrize(("value", "reason", "text"), BAD)
def test_a_wrong_id_is_an_error_that_names_file_line_id_and_place(folder, value, reason, text):
    (folder / "texts" / "a.jsonl").write_text(f'{{"input_ids": [1]}}\n{{"input_ids": {value}}}\n')
    with pytest.raises(InputError) as caught:
        store(folder)
    assert str(caught.value).startswith(f"{folder}/texts/a.jsonl, line 2: ")
    assert text in str(caught.value)


def test_bad_ids_may_be_skipped_and_are_listed(folder):
    lines = [f'{{"input_ids": {value}}}' for value, _, _ in BAD]
    (folder / "texts" / "a.jsonl").write_text("\n".join(['{"input_ids": [4, 5]}', *lines, '{"input_ids": [6]}', "{}"]))
    found = store(folder, on_bad_record="skip")
    assert documents_of(found) == [[4, 5], [6]]
    assert found.manifest.skipped == {"bad id": 3, "no field": 1, "wrong type": 8}
    listed = [json.loads(line) for line in (found.folder / "skipped.jsonl").read_text().splitlines()]
    assert [entry["record"] for entry in listed] == [*range(1, 12), 13]
    assert [entry["reason"] for entry in listed[:-1]] == [reason for _, reason, _ in BAD]


@pytest.mark.parametrize(
    ("column", "reason", "text"),
    [
        (pa.array([[1], [2, None]]), "wrong type", "row 2: column 'input_ids' holds null at place 1"),
        (pa.array([[1], None]), "wrong type", "row 2: column 'input_ids' holds null, expected a list"),
        (pa.array([[1], [2, -1]]), "bad id", "row 2: token id -1 at place 1"),
        (pa.array([[1], [2, 2**64 - 1]], pa.list_(pa.uint64())), "bad id", f"row 2: token id {2**64 - 1} at place 1"),
        (pa.array([[], [0.5]]), "wrong type", "row 2: column 'input_ids' holds 0.5 at place 0"),
        (pa.array([[], [True]]), "wrong type", "row 2: column 'input_ids' holds true or false at place 0"),
        (pa.array([[], ["x"]]), "wrong type", "row 2: column 'input_ids' holds 'x' at place 0"),
        (pa.array([[], [[1]]]), "wrong type", "row 2: column 'input_ids' holds a list at place 0"),
    ],
)
def test_wrong_ids_of_a_column(folder, column, reason, text):
    pq.write_table(pa.table({"input_ids": column}), folder / "texts" / "a.parquet")
    with pytest.raises(InputError, match=r"a.parquet, row 2: ") as caught:
        store(folder)
    assert text in str(caught.value)
    assert store(folder, on_bad_record="skip").manifest.skipped == {reason: 1}


def test_a_column_of_ids_is_no_text_and_a_column_of_texts_no_ids(folder):
    write(folder / "texts" / "a.parquet", [[1]])
    with pytest.raises(InputError, match="column 'input_ids' holds a list, expected a text"):
        store(folder, token_field="", text_field="input_ids")
    with pytest.raises(InputError, match="column 'other' holds a text, expected a list of token ids"):
        store(folder, token_field="other")


def test_ends_are_added_where_they_are_asked_for_and_missing(folder):
    """E12 and issue 4: each exactly once; not by [data]'s settings, which are of texts."""
    write(folder / "texts" / "a.jsonl", [[3, 11], [], [4], [11], [11, 4]])
    assert documents_of(store(folder)) == [[3, 11], [], [4], [11], [11, 4]]
    assert documents_of(store(folder, add_eos=False)) == [[3, 11], [], [4], [11], [11, 4]]
    assert documents_of(store(folder, add_eos=True)) == [[3, 11], [11], [4, 11], [11], [11, 4, 11]]
    with pytest.raises(ConfigError, match="add_bos = true, but the tokenizer in .* has no BOS"):
        store(folder, add_bos=True)
    assert len(list((folder / "cache" / "web").iterdir())) == 2


def test_bos_and_eos_of_one_token(folder):
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"bos_token": "<eos>", "eos_token": "<eos>"}')
    write(folder / "texts" / "a.parquet", [[], [11], [4], [11, 4]], pa.list_(pa.uint64()))
    assert documents_of(store(folder, add_bos=True, add_eos=True)) == [[11, 11], [11], [11, 4, 11], [11, 4, 11]]


@given(st.lists(st.lists(st.integers(-1, 13), max_size=6), max_size=30))
def test_the_tokens_are_those_of_the_good_documents_in_their_order(tmp_path_factory, documents):
    folder = tmp_path_factory.mktemp("ids")
    write_tokenizer(folder / "tokenizer", [10])
    (folder / "texts").mkdir()
    write(folder / "texts" / "a.jsonl", documents)
    source = file_input(folder, token_field="input_ids", on_bad_record="skip")
    good = [ids for ids in documents if all(0 <= i <= LARGEST for i in ids)]
    found = []
    for unit in source.units(1000):
        for piece in source.pieces(unit, 1000, 0):
            for batch in Encoder(TextTokenizer(folder / "tokenizer"), None, "ids").batches(piece):
                assert batch.tokens.dtype == np.uint32
                found += [x.tolist() for x in np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])]
            assert len(piece.skipped) == len(documents) - len(good)
    assert found == good


@pytest.mark.parametrize(("key", "value"), [("text_field", "content"), ("processor", "a:b")])
def test_a_record_gives_ids_or_texts(key, value):
    with pytest.raises(ConfigError, match=f"source 'a': both token_field and {key} are set"):
        SourceConfig("a", "p", token_field="ids", **{key: value})


def test_the_command_prepares_the_same_store(folder, capsys):
    write(folder / "texts" / "a.jsonl", [[3], [4]])
    expected = store(folder).folder
    arguments = ["--source", f"web={folder / 'texts'}", "--tokenizer", folder / "tokenizer", "--cache-dir"]
    assert main(["prepare", *map(str, [*arguments, folder / "other", "--token-field", "input_ids"])]) == 0
    assert re.search(r"^web +training +2 +2 ", capsys.readouterr().out, re.MULTILINE)
    [made] = (folder / "other" / "web").iterdir()
    assert made.name == expected.name
    assert "--token-field input_ids" in rebuild_command(made)
