"""One shard on disk: its three files, the width of its ids, and what does not fit."""

import re

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.store.test_indexed import read_index
from zephon_patches.errors import StoreError
from zephon_patches.store import writer as writer_module
from zephon_patches.store.indexed import dtype_for
from zephon_patches.store.manifest import InputRange
from zephon_patches.store.writer import ShardWriter


def write(folder, documents, dtype="<u2", name="000000-000"):
    """Writes documents (lists of ids), one batch for each."""
    with ShardWriter(folder, name, np.dtype(dtype)) as shard:
        for i, ids in enumerate(documents):
            shard.add(np.array(ids, dtype=np.uint32), [len(ids)], [(0, i)])
        return shard.finish([InputRange(0, 0, 100, len(documents), "ab")])


@pytest.mark.parametrize("vocab", [65_535, 65_536, 65_537, 131_072])
def test_ids_round_trip_at_every_vocabulary_size(tmp_path, vocab):
    """E12: the width follows the vocabulary, and no id wraps."""
    dtype = dtype_for(vocab - 1)
    assert dtype.name == ("uint16" if vocab <= 65_536 else "int32")
    documents = [[0, 1, vocab - 1], [vocab - 1], [min(65_535, vocab - 1), min(65_536, vocab - 1), 32_768]]
    record = write(tmp_path, documents, dtype)
    found = np.fromfile(tmp_path / "000000-000.bin", dtype)
    assert found.tolist() == [token for ids in documents for token in ids]
    index = read_index((tmp_path / "000000-000.idx").read_bytes())
    assert index["code"] == (8 if vocab <= 65_536 else 4)
    assert index["lengths"] == [3, 1, 3]
    assert (record.documents, record.tokens) == (3, 7)


@pytest.mark.parametrize(("dtype", "bad"), [("<u2", 65_536), ("<u2", -1), ("<i4", 2**31), ("<i4", -1)])
def test_id_that_does_not_fit_is_refused_and_leaves_no_file(tmp_path, dtype, bad):
    with (
        pytest.raises(StoreError, match=rf"shard s: token ids from .*{bad}.* do not fit {np.dtype(dtype)}"),
        ShardWriter(tmp_path, "s", np.dtype(dtype)) as shard,
    ):
        shard.add(np.array([5, bad], dtype=np.int64), [2], [(0, 0)])
    assert list(tmp_path.iterdir()) == []


def test_document_longer_than_an_int32_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_DOCUMENT_TOKENS", 3)
    with (
        pytest.raises(StoreError, match="a document of 4 tokens"),
        ShardWriter(tmp_path, "s", np.dtype("<u2")) as shard,
    ):
        shard.add(np.arange(7), [3, 4], [(0, 0), (0, 1)])


@given(documents=st.lists(st.lists(st.integers(0, 65_535), max_size=6), max_size=8), cut=st.integers(1, 8))
def test_batches_leave_no_trace(tmp_path, documents, cut):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(exist_ok=True)
    other.mkdir(exist_ok=True)
    record = write(one, documents)
    with ShardWriter(other, "000000-000", np.dtype("<u2")) as shard:
        for start in range(0, len(documents), cut):
            batch = documents[start : start + cut]
            tokens = np.array([t for ids in batch for t in ids], dtype=np.uint32)
            shard.add(tokens, [len(ids) for ids in batch], [(0, start + i) for i in range(len(batch))])
        assert shard.finish(record.ranges) == record
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes()


def test_empty_documents_and_empty_shards_are_kept(tmp_path):
    """E01: an empty document is a document, wherever it stands."""
    record = write(tmp_path, [[], [7, 8], [], [], [9], []])
    assert (record.documents, record.tokens) == (6, 3)
    assert read_index((tmp_path / "000000-000.idx").read_bytes())["lengths"] == [0, 2, 0, 0, 1, 0]
    empty = write(tmp_path, [], name="000001-000")
    assert (empty.documents, empty.tokens) == (0, 0)
    assert (tmp_path / "000001-000.bin").read_bytes() == b""
    assert (tmp_path / "000001-000.origin").read_bytes() == b""
    assert read_index((tmp_path / "000001-000.idx").read_bytes())["documents"] == [0]


def test_origin_holds_file_and_record_of_each_document(tmp_path):
    with ShardWriter(tmp_path, "s", np.dtype("<u2")) as shard:
        shard.add(np.arange(3), [1, 2], [(4, 0), (4, 2)])
        shard.add(np.arange(1), [1], [(5, 2**40)])
        shard.finish([])
    origin = np.fromfile(tmp_path / "s.origin", "<i8").reshape(-1, 2)  # shape: (documents, file and record)
    assert origin.tolist() == [[4, 0], [4, 2], [5, 2**40]]


def test_record_has_the_hashes_of_the_three_files(tmp_path):
    record = write(tmp_path, [[1, 2], [3]])
    for kind in ("bin", "idx", "origin"):
        content = (tmp_path / f"000000-000.{kind}").read_bytes()
        assert getattr(record, kind) == xxhash.xxh3_64_hexdigest(content)
        assert re.fullmatch("[0-9a-f]{16}", getattr(record, kind))


def test_shard_given_up_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError), ShardWriter(tmp_path, "s", np.dtype("<u2")) as shard:
        shard.add(np.arange(3), [3], [(0, 0)])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
