"""The texts of each format, and the place that an error names."""

import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from zephon_patches.errors import InputError
from zephon_patches.prepare.readers import BLANK, FORMATS, BadRecord, Reading, StreamFormat, format_of

JSONL, PARQUET, TXT = FORMATS[".jsonl"], FORMATS[".parquet"], FORMATS[".txt"]


def jsonl(folder, *lines: bytes, name="a.jsonl"):
    path = folder / name
    path.write_bytes(b"".join(lines))
    return path


def row(text) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def texts(path, start=0, stop=None, field="text"):
    reader = format_of(path)
    if isinstance(reader, StreamFormat):
        records = (record for record, _ in reader.stream(path, field, start))
    else:
        stop = reader.end(path, path.stat().st_size) if stop is None else stop
        records = reader.records(path, start, stop, field) if stop else []
    found = []
    for number, record in enumerate(records):
        if record is BLANK:
            found.append(None)
            continue
        result = record if isinstance(record, BadRecord) else Reading(field).documents(record, reader.noun)
        if isinstance(result, BadRecord):
            raise InputError(f"{reader.place(path, start, number)}: {result.message}")
        found += result
    return found


# --- .jsonl ---


def test_jsonl_gives_the_field_of_each_line(tmp_path):
    path = jsonl(tmp_path, b'{"text": "one", "id": 1}\n', b'{"id": 2, "text": ""}\n', row("drei \u20ac \U0001f600"))
    assert texts(path) == ["one", "", "drei \u20ac \U0001f600"]


def test_other_text_field_is_read(tmp_path):
    assert texts(jsonl(tmp_path, b'{"text": "a", "content": "b"}\n'), field="content") == ["b"]


@pytest.mark.parametrize(
    ("record", "field", "expected"),
    [
        ({"meta": {"body": "a"}}, "meta.body", "a"),
        ({"meta.body": "own", "meta": {"body": "a"}}, "meta.body", "own"),
        ({"meta": {"body": "a"}, "meta.body": "own"}, "meta.body", "own"),
        ({"a": {"b": {"c": "deep"}}}, "a.b.c", "deep"),
        ({"a": {"b.c": "own", "b": {"c": "deep"}}}, "a.b.c", "own"),
        ({"a.b": {"c": "x"}, "a": {"b": {"c": "deep"}}}, "a.b.c", "x"),
        ({"a.b": {"d": "x"}, "a": {"b": {"c": "deep"}}}, "a.b.c", "deep"),
        ({".": "dot"}, ".", "dot"),
    ],
)
def test_dotted_field_is_looked_up_in_objects_unless_a_field_has_that_name(tmp_path, record, field, expected):
    assert texts(jsonl(tmp_path, json.dumps(record).encode()), field=field) == [expected]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([record, record]), path)
    assert texts(path, field=field) == [expected] * 2


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"meta": {"id": "a"}}, "no field 'meta.body'; its fields are 'meta'"),
        ({"meta": "a"}, "no field 'meta.body'; its fields are 'meta'"),
        ({"body": "a"}, "no field 'meta.body'; its fields are 'body'"),
        ({"meta": {"body": 5}}, "field 'meta.body' holds a number"),
        ({"meta": {"body": None}}, "field 'meta.body' holds null"),
        ({"meta": None}, "field 'meta.body' holds null"),
    ],
)
def test_dotted_field_that_is_not_there_is_named(tmp_path, record, text):
    with pytest.raises(InputError, match=f"line 1: {text}"):
        texts(jsonl(tmp_path, json.dumps(record).encode()), field="meta.body")
    path = tmp_path / "a.parquet"
    if record != {"meta": None}:
        pq.write_table(pa.Table.from_pylist([record]), path)
        with pytest.raises(InputError, match=text.replace("field", "column")):
            texts(path, field="meta.body")
    pq.write_table(pa.Table.from_pylist([{"meta": {"body": "a"}}, {"meta": None}]), path)
    with pytest.raises(InputError, match="row 2: column 'meta.body' holds null"):
        texts(path, field="meta.body")


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


# --- compressed files ---


def gz(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


COMPRESSIONS = {"gz": gz, "zst": zst}


@pytest.fixture(params=COMPRESSIONS)
def compression(request):
    return request.param


def compressed(folder, compression, *members: bytes, kind="jsonl"):
    path = folder / f"a.{kind}.{compression}"
    path.write_bytes(b"".join(map(COMPRESSIONS[compression], members)))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_compressed_lines_are_those_of_the_plain_file(tmp_path, compression, kind):
    lines = [
        b"\xef\xbb\xbf",
        row("a"),
        b"\n",
        row("drei \u20ac").replace(b"\n", b"\r\n"),
        row("x" * 3_000_000),
        row("z")[:-1],
    ]
    expected = texts(jsonl(tmp_path, *lines))
    path = compressed(tmp_path, compression, b"".join(lines), kind=kind)
    assert texts(path) == expected
    assert texts(path, 2) == expected[2:]
    sizes = [size for _, size in format_of(path).stream(path, "text", 0)]
    assert sizes == [len(lines[0] + lines[1]), *map(len, lines[2:])]


def test_all_members_and_frames_are_read(tmp_path, compression):
    """A cut inside a line is nothing special, an empty member neither."""
    data = b"".join(row(f"{i} " * 1000) for i in range(300))
    path = compressed(tmp_path, compression, data[:10], b"", data[10:500_000], data[500_000:])
    assert texts(path) == texts(jsonl(tmp_path, data))


def test_zstd_frames_that_hold_no_data_and_long_windows_are_read(tmp_path):
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    parameters = zstandard.ZstdCompressionParameters(window_log=28, compression_level=1, write_content_size=0)
    long = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(skippable + zst(row("a")) + skippable + long.compress(row("b")) + long.flush())
    assert texts(path) == ["a", "b"]


def test_gzip_with_zeros_behind_it_is_read_and_with_other_bytes_refused(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gz(row("a")) + bytes(512))
    assert texts(path) == ["a"]
    path.write_bytes(gz(row("a")) + b"more")
    with pytest.raises(InputError, match="a.jsonl.gz, line 2 or soon after: the gzip data is damaged"):
        texts(path)


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_compressed_file_that_is_cut_off_anywhere_is_refused(tmp_path, compression, kind):
    """Also between the data and the checksum, and inside a later member's head."""
    path = compressed(tmp_path, compression, row("a"), b"".join(row(f"text {i}") for i in range(20)), kind=kind)
    data = path.read_bytes()
    whole = len(COMPRESSIONS[compression](row("a")))
    assert texts(path)
    for size in range(len(data)):
        if size == whole:
            continue  # the first member alone is a file as well
        path.write_bytes(data[:size])
        with pytest.raises(
            InputError, match=rf"a.{kind}.{compression}(, line \d+ or soon after| or soon after|: empty)"
        ):
            texts(path)


def test_damage_names_the_line_and_the_byte_it_is_near_to(tmp_path, compression):
    lines = [row(f"{i} {hash_text(i)}") for i in range(20_000)]
    path = compressed(tmp_path, compression, b"".join(lines))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError) as caught:
        texts(path)
    (line, byte, size) = re.search(
        r", line ([\d,]+) or soon after: .* near byte ([\d,]+) of ([\d,]+)", str(caught.value)
    ).groups()
    assert 2_000 < int(line.replace(",", "")) < 11_000
    assert byte == size == f"{len(data) // 2:,}"
    checksum = len(data) - (8 if compression == "gz" else 4)
    path.write_bytes(data[:checksum] + bytes([data[checksum] ^ 1]) + data[checksum + 1 :])
    with pytest.raises(InputError, match=r"line [\d,]+ or soon after: the \w+ data is damaged or cut off, near byte"):
        texts(path)
    # Deflated data that was damaged may go on as other text for a while: a line is named either way.
    path.write_bytes(data[: len(data) // 2] + bytes(100) + data[len(data) // 2 + 100 :])
    with pytest.raises(InputError, match=r"a.jsonl.\w+, line [\d,]+"):
        texts(path)


def hash_text(i: int) -> str:
    return f"{(i * 2654435761) % 2**32:x} {(i * 40503) % 65536:x}"


def test_file_that_is_not_compressed_at_all_is_refused(tmp_path, compression):
    path = tmp_path / f"a.jsonl.{compression}"
    path.write_bytes(row("a"))
    with pytest.raises(InputError, match="line 1 or soon after: the .* data is damaged or cut off"):
        texts(path)


def test_compressed_text_is_one_document(tmp_path, compression):
    assert texts(compressed(tmp_path, compression, "line\r\n\nü\n".encode(), b"more", kind="txt")) == [
        "line\r\n\nü\nmore"
    ]
    assert texts(compressed(tmp_path, compression, b"", kind="txt")) == []
    with pytest.raises(InputError, match="byte 3 is not UTF-8"):
        texts(compressed(tmp_path, compression, b"caf\xe9!", kind="txt"))


def test_bad_line_of_a_compressed_file_is_named(tmp_path, compression):
    path = compressed(tmp_path, compression, row("a"), b"\n", b'{"text": 5}\n')
    for skip in (0, 1):
        reader = format_of(path)
        (*_, record) = (record for record, _ in reader.stream(path, "text", skip))
        assert Reading("text").documents(record, reader.noun).message == "field 'text' holds a number, expected a text"
    assert reader.place(path, 0, 2) == f"{path}, line 3"


def test_how_much_of_the_file_its_first_bytes_are(tmp_path, compression):
    path = compressed(tmp_path, compression, b"".join(row(f"{i} {hash_text(i)}") for i in range(100_000)))
    size = path.stat().st_size
    assert format_of(path).bytes_of_first(path, 1 << 40) == size
    assert size / 20 < format_of(path).bytes_of_first(path, 500_000) < size / 3


def test_json_alone_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(InputError, match=r"a.json: files of this kind are not read; .* JSON object, name it .jsonl"):
        format_of(tmp_path / "a.json")


def test_longest_suffix_decides(tmp_path):
    assert format_of(tmp_path / "a.txt.jsonl.gz") is FORMATS[".jsonl.gz"]
    assert format_of(tmp_path / "c4-train.00000-of-01024.json.gz") is FORMATS[".json.gz"]
    assert format_of(tmp_path / "a.gz.txt") is TXT


# --- .arrow ---


def arrow(folder, table, footer, rows=3, name="a.arrow"):
    path = folder / name
    with (pa.ipc.new_file if footer else pa.ipc.new_stream)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.fixture(params=[False, True], ids=["stream", "file"])
def footer(request):
    return request.param


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())],
    ids=["string", "large", "dictionary"],
)
def test_arrow_gives_the_same_texts_in_both_forms_and_for_every_string_type(tmp_path, footer, kind):
    words = ["a", "", "drei \u20ac", "a", "b", "a", "c"]
    table = pa.table({"id": range(7), "text": pa.array(words).cast(kind)})
    path = arrow(tmp_path, table, footer)
    assert texts(path) == words
    for skip in range(8):
        assert texts(path, skip) == words[skip:]
    assert texts(arrow(tmp_path, table.slice(0, 0), footer)) == []


def test_bytes_of_arrow_are_those_of_its_batches(tmp_path, footer):
    table = pa.table({"text": [f"{i}" * 1000 for i in range(10)]})
    path = arrow(tmp_path, table, footer)
    sizes = [size for _, size in format_of(path).stream(path, "text", 0)]
    assert [size > 3000 for size in sizes] == [False, False, True] * 3 + [False]
    assert sum(size for size in sizes if size <= 3000) == sizes[-1] > 1000
    assert path.stat().st_size - 2000 < sum(sizes) < path.stat().st_size
    assert [size for _, size in format_of(path).stream(path, "text", 4)] == sizes[4:]


def test_dotted_field_and_whole_rows_of_arrow(tmp_path, footer):
    rows = [{"meta": {"body": "a", "id": 1}, "metal": 1}, {"meta": {"body": "b", "id": 2}, "metal": 2}]
    path = arrow(tmp_path, pa.Table.from_pylist(rows), footer)
    assert texts(path, field="meta.body") == ["a", "b"]
    assert [record for record, _ in format_of(path).stream(path, None, 0)] == rows
    with pytest.raises(InputError, match="a.arrow: no column 'text'; its columns are 'meta', 'metal'; set text_field"):
        texts(path)


def test_bad_value_in_arrow_is_named_by_its_row(tmp_path, footer):
    path = arrow(tmp_path, pa.table({"text": ["a", "b", "c", "d", None, "f"]}), footer)
    with pytest.raises(InputError, match=r"a.arrow, row 5: column 'text' holds null, expected a text"):
        texts(path)
    column = pa.array([b"a", b"b", b"c", b"\xff"], pa.binary()).view(pa.string())
    path = arrow(tmp_path, pa.table({"text": column}), footer)
    with pytest.raises(InputError, match=r"a.arrow, row 4: byte 0 of a text is not UTF-8"):
        texts(path)


def test_arrow_that_is_cut_off_anywhere_is_refused(tmp_path, footer):
    path = arrow(tmp_path, pa.table({"text": [f"{i}" * 9 for i in range(9)]}), footer)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(InputError, match=r"a.arrow(: cut off|, row \d+ or soon after: cannot be read as Arrow)"):
            texts(path)


def test_what_is_no_arrow_is_refused_by_name(tmp_path):
    path = tmp_path / "a.arrow"
    for content in (b"", b"ARROW1", b"something else entirely", b"ARROW1\0\0more than that ARROW1"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="a.arrow"):
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


@pytest.mark.parametrize(
    "name", ["a.xyz", "a.jsonl.bz2", "a.gz", "a.zst", "jsonl", "a.JSONL", "a.jsonl.gz.txt.old", "jsonl.gz"]
)
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
