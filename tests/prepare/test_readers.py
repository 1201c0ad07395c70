"""The texts of each format, and the place that an error names."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zephon_patches.errors import InputError
from zephon_patches.prepare.readers import FORMATS, format_of

JSONL, PARQUET, TXT = FORMATS[".jsonl"], FORMATS[".parquet"], FORMATS[".txt"]


def jsonl(folder, *lines: bytes, name="a.jsonl"):
    path = folder / name
    path.write_bytes(b"".join(lines))
    return path


def row(text) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def texts(path, start=0, stop=None, field="text"):
    reader = format_of(path)
    stop = reader.end(path, path.stat().st_size) if stop is None else stop
    return list(reader.texts(path, start, stop, field)) if stop else []


# --- .jsonl ---


def test_jsonl_gives_the_field_of_each_line(tmp_path):
    path = jsonl(tmp_path, b'{"text": "one", "id": 1}\n', b'{"id": 2, "text": ""}\n', row("drei \u20ac \U0001f600"))
    assert texts(path) == ["one", "", "drei \u20ac \U0001f600"]


def test_other_text_field_is_read(tmp_path):
    assert texts(jsonl(tmp_path, b'{"text": "a", "content": "b"}\n'), field="content") == ["b"]


def test_crlf_file_gives_the_texts_of_the_lf_file(tmp_path):
    lines = [row("a"), row("b\r\nc"), row("d")]
    crlf = jsonl(tmp_path, *(line.replace(b"\n", b"\r\n") for line in lines), name="b.jsonl")
    assert texts(crlf) == texts(jsonl(tmp_path, *lines)) == ["a", "b\r\nc", "d"]


def test_byte_order_mark_is_skipped_at_the_start_only(tmp_path):
    assert texts(jsonl(tmp_path, b"\xef\xbb\xbf", row("a"), row("b"))) == ["a", "b"]
    with pytest.raises(InputError, match="line 2: not a JSON record"):
        texts(jsonl(tmp_path, row("a"), b"\xef\xbb\xbf", row("b")))


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b"   \n", b"\t\r\n"])
def test_blank_lines_count_as_records_and_give_no_text(tmp_path, blank):
    """E03: at the start, in the middle, at the end."""
    path = jsonl(tmp_path, blank, row("a"), blank, blank, row("b"), blank)
    assert texts(path) == [None, "a", None, None, "b", None]


@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf", b" \r\n \n"])
def test_file_without_a_record_has_no_text(tmp_path, content):
    assert [text for text in texts(jsonl(tmp_path, content)) if text is not None] == []


def test_last_line_needs_no_line_end(tmp_path):
    assert texts(jsonl(tmp_path, row("a"), row("b").rstrip())) == ["a", "b"]


def test_line_longer_than_a_block_is_one_record(tmp_path):
    path = jsonl(tmp_path, row("x" * 3_000_000), row("y"))
    assert [len(text) for text in texts(path)] == [3_000_000, 1]
    assert JSONL.advance(path, 0, path.stat().st_size, 1) == (3_000_000 + 13, 3_000_000 + 13)


BAD_LINES = {
    b'{"text": "a': r"not a JSON record \(unexpected end of data, at column 12\); the line starts '{\"text\": \"a'",
    b'{"text": "a"} {"text": "b"}': "not a JSON record .unexpected content after document",
    b"no json": "not a JSON record .*the line starts 'no json'",
    b'{"text": "\xe6"}': "not a JSON record .byte 11 of the line is not UTF-8: invalid continuation byte",
    b'{"text": "\xb0\xa1"}': "not a JSON record .byte 11 of the line is not UTF-8: invalid start byte",  # GBK
    b'{"text": "caf\xe9"}': "not a JSON record .byte 14 of the line is not UTF-8",  # latin-1
    b'"abc"': "a text, expected a JSON object with the field 'text'",
    b"3": "a number, expected a JSON object",
    b"true": "true or false, expected a JSON object",
    b"null": "null, expected a JSON object",
    b'["text"]': "a list, expected a JSON object",
    b'{"txt": "a", "id": 3}': "no field 'text'; its fields are 'txt', 'id'; set text_field",
    b"{}": "no field 'text'; its fields are none",
    b'{"text": null}': "field 'text' holds null, expected a text",
    b'{"text": 5}': "field 'text' holds a number, expected a text",
    b'{"text": ["a"]}': "field 'text' holds a list, expected a text",
    b'{"text": {"a": 1}}': "field 'text' holds an object, expected a text",
    b'{"text": false}': "field 'text' holds true or false, expected a text",
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_bad_line_is_named_by_file_line_and_reason(tmp_path, bad):
    """E02, E05, E07."""
    path = jsonl(tmp_path, row("a"), b"\n", row("c" * 50), bad + b"\n", row("e"))
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}, line 4: {BAD_LINES[bad]}"):
        texts(path)


@pytest.mark.parametrize("bad", BAD_LINES)
def test_line_number_is_the_files_in_a_later_range_too(tmp_path, bad):
    lines = [row("a"), b"\r\n", row("c" * 50)]
    path = jsonl(tmp_path, *lines, row("d"), bad)  # the last line has no line end
    start = sum(map(len, lines))
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}, line 5: {BAD_LINES[bad]}"):
        texts(path, start)


def test_reason_names_no_line_of_its_own(tmp_path):
    with pytest.raises(InputError) as caught:
        texts(jsonl(tmp_path, row("a"), row("b"), b"{\n"))
    assert re.findall(r"line \d+", str(caught.value)) == ["line 3"]


def test_file_that_ended_early_is_named(tmp_path):
    path = jsonl(tmp_path, row("a"))
    with pytest.raises(InputError, match="ends at byte 14, before byte 100"):
        texts(path, 0, 100)


# --- .parquet ---


def parquet(folder, column, name="a.parquet", rows_per_group=None):
    path = folder / name
    pq.write_table(pa.table({"id": pa.array(range(len(column))), "text": column}), path, row_group_size=rows_per_group)
    return path


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())],
    ids=["string", "large", "dictionary"],
)
def test_parquet_gives_the_same_texts_for_every_string_type(tmp_path, kind):
    words = ["a", "", "drei \u20ac", "a"]
    path = parquet(tmp_path, pa.array(words).cast(kind))
    assert pq.read_schema(path).field("text").type == kind
    assert texts(path) == words


def test_parquet_is_read_and_cut_by_row_groups(tmp_path):
    path = parquet(tmp_path, pa.array([f"row {i}" for i in range(2500)]), rows_per_group=1000)
    assert PARQUET.end(path, path.stat().st_size) == 3
    assert texts(path, 1, 2) == [f"row {i}" for i in range(1000, 2000)]
    assert texts(path, 1, 3) == [f"row {i}" for i in range(1000, 2500)]
    start, stop = PARQUET.bytes_of(path, 1, 2)
    assert PARQUET.advance(path, 1, 3, 1) == (2, stop - start)  # at least one group
    assert PARQUET.advance(path, 1, 3, 1 << 30)[0] == 3
    assert PARQUET.bytes_of(path, 0, 1)[1] <= start < stop <= PARQUET.bytes_of(path, 2, 3)[0]


@pytest.mark.parametrize("start", [0, 1])
def test_null_in_parquet_is_named_by_its_row_in_the_file(tmp_path, start):
    path = parquet(tmp_path, pa.array(["a", "b", "c", "d", None, "f"]), rows_per_group=2)
    with pytest.raises(InputError, match=r"a.parquet, row 5: column 'text' holds null, expected a text"):
        texts(path, start)


def test_wrong_type_in_parquet_is_named(tmp_path):
    with pytest.raises(InputError, match="row 1: column 'text' holds a number"):
        texts(parquet(tmp_path, pa.array([1, 2])))
    with pytest.raises(InputError, match="row 1: column 'text' holds bytes"):
        texts(parquet(tmp_path, pa.array([b"a"])))


def test_missing_column_names_those_there_are(tmp_path):
    path = parquet(tmp_path, pa.array(["a"]))
    with pytest.raises(InputError, match="no column 'content'; its columns are 'id', 'text'; set text_field"):
        texts(path, field="content")


def test_parquet_without_rows_or_row_groups_has_no_text(tmp_path):
    assert texts(parquet(tmp_path, pa.array([], pa.string()))) == []
    path = tmp_path / "b.parquet"
    pq.ParquetWriter(path, pa.schema([("text", pa.string())])).close()
    assert PARQUET.end(path, path.stat().st_size) == 0


def test_parquet_without_columns_is_refused_by_name(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({}), path)
    assert PARQUET.advance(path, 0, 1, 100) == (1, 0)
    with pytest.raises(InputError, match="no column 'text'; its columns are none"):
        texts(path)


def test_what_is_no_parquet_is_refused_by_name(tmp_path):
    path = tmp_path / "a.parquet"
    for content in (b"", b"PAR1", b"something else entirely"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="a.parquet: cannot be read as parquet"):
            PARQUET.end(path, len(content))


def test_damaged_page_is_an_input_error_with_a_row(tmp_path):
    path = parquet(tmp_path, pa.array([f"{i}" * 50 for i in range(4000)]), rows_per_group=2000)
    start, stop = PARQUET.bytes_of(path, 1, 2)
    data = bytearray(path.read_bytes())
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a.parquet, row [\d,]+ or soon after: cannot be read as parquet"):
        texts(path)


# --- .txt, and what is neither ---


def test_txt_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("line\r\n\nü\n".encode())
    assert texts(path) == ["line\r\n\nü\n"]
    path.write_bytes(b"\xef\xbb\xbfa")
    assert texts(path) == ["a"]
    assert TXT.advance(path, 0, 4, 1) == (4, 4)  # never cut
    path.write_bytes(b"")
    assert texts(path) == []


def test_txt_that_is_not_utf8_names_the_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9!")
    with pytest.raises(InputError, match="a.txt: byte 3 is not UTF-8"):
        texts(path)


@pytest.mark.parametrize("name", ["a.xyz", "a.jsonl.gz", "a.json", "jsonl", "a.JSONL"])
def test_unknown_suffix_is_refused_by_name(tmp_path, name):
    """E08."""
    with pytest.raises(
        InputError, match=rf"{name}: files of this kind are not read; expected one of .jsonl, .parquet, .txt"
    ):
        format_of(tmp_path / name)


def test_places_count_lines_and_rows_of_the_file(tmp_path):
    lines = jsonl(tmp_path, row("a"), b"\n", row("c"))
    assert JSONL.place(lines, 0, 0) == f"{lines}, line 1"
    assert JSONL.place(lines, 15, 0) == f"{lines}, line 3"
    rows = parquet(tmp_path, pa.array(list("abcdef")), rows_per_group=2)
    assert PARQUET.place(rows, 0, 1) == f"{rows}, row 2"
    assert PARQUET.place(rows, 2, 1) == f"{rows}, row 6"
