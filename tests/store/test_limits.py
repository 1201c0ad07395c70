"""Stores as large as they come: by tokens, by shards, by documents."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from zephon_patches.loader.collate import MicroBatchReader
from zephon_patches.order.global_order import GlobalOrder
from zephon_patches.order.shuffle import SourceOrder
from zephon_patches.samples.chunking import num_samples
from zephon_patches.store.indexed import encode_index
from zephon_patches.store.manifest import FileRecord, InputRange, Manifest, ShardRecord
from zephon_patches.store.reader import TokenStore
from zephon_patches.store.verify import verify_store


def write_sparse(folder: Path, lengths: np.ndarray, dtype: np.dtype, ends: dict[int, list[int]]) -> Path:
    """A store of one shard that takes no room on the disk: ids are 0 except those that end before some tokens."""
    tokens = int(lengths.sum(dtype=np.int64))
    with open(folder / "000000-000.bin", "wb") as file:
        file.truncate(tokens * dtype.itemsize)
        for stop, ids in ends.items():
            file.seek((stop - len(ids)) * dtype.itemsize)
            file.write(np.array(ids, dtype).tobytes())
    if (folder / "000000-000.bin").stat().st_blocks * 512 > 2**28:
        pytest.skip("this file system has no sparse files")
    (folder / "000000-000.idx").write_bytes(encode_index(lengths, dtype))
    (folder / "000000-000.origin").write_bytes(bytes(16 * len(lengths)))
    record = ShardRecord("000000-000", len(lengths), tokens, "a" * 16, "b" * 16, "c" * 16)
    (folder / "manifest.json").write_bytes(Manifest({}, dtype.str, [], [record]).to_json())
    return folder


@pytest.mark.parametrize(("dtype", "largest"), [("<u2", 65_535), ("<i4", 2**31 - 1)])
def test_samples_at_the_end_of_a_store_above_2_32_tokens_hold_the_right_ids(tmp_path, monkeypatch, dtype, largest):
    """E15: by the way that the loader takes, from the number of a sample to its row."""
    lengths = np.array([2**31 - 1, 70_000, 2**31 - 1, 2**20 + 9], dtype=np.int32)
    tokens, seq_len = int(lengths.sum(dtype=np.int64)), 2048
    assert tokens > 2**32
    ids = [largest, *range(1, seq_len + 9)]
    store = TokenStore(write_sparse(tmp_path, lengths, np.dtype(dtype), {tokens: ids, 2**32 + 5: [7, 8, 9]}))
    samples = num_samples(store.tokens_per_shard, seq_len)
    order = GlobalOrder([SourceOrder("web", samples, seed=0, shuffle_shards=0)])
    count = int(samples.sum())
    wanted = [count - 1, count - 2, (2**32 + 4) // seq_len]
    place = order.locate(np.array(wanted))
    rows = [(0, int(shard), int(k), False) for shard, k in zip(place.shard, place.sample, strict=True)]
    inputs, labels = MicroBatchReader([store], seq_len).read(rows)
    whole = dict(zip(range(tokens - len(ids), tokens), ids, strict=True)) | {2**32 + 2 + i: 7 + i for i in range(3)}
    for row, sample in enumerate(wanted):
        start = sample * seq_len
        shown = [whole.get(start + i, 0) for i in range(seq_len + 1)]
        valid = min(seq_len, tokens - start - 1)
        assert inputs["input"][row, :valid].tolist() == shown[:valid]
        assert labels[row].tolist() == shown[1 : valid + 1] + [-100] * (seq_len - valid)
    # Its index is sound too; only the checksums, which would take reading 8 GiB and more, are not looked at.
    monkeypatch.setattr("zephon_patches.store.verify._checksum_problem", lambda *arguments: None)
    assert verify_store(tmp_path) == []


def test_a_store_of_10000_shards_is_opened_in_little_memory(tmp_path):
    files = [FileRecord(f"part-{number:05d}.jsonl", 2**24, 1_700_000_000_000_000_000) for number in range(10_000)]
    records = [
        ShardRecord(
            f"{number:06d}-000", 4000, 4_000_000, *(digit * 16 for digit in "abc"), [InputRange(number, 0, 2**24, 4000)]
        )
        for number in range(10_000)
    ]
    (tmp_path / "manifest.json").write_bytes(Manifest({}, "<u2", files, records).to_json())
    code = """
        import resource, sys
        from pathlib import Path
        from zephon_patches.store.reader import TokenStore
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        store = TokenStore(Path(sys.argv[1]))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(len(store.tokens_per_shard), store.num_tokens, grown)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path], capture_output=True, text=True, timeout=60
    )
    assert ended.stderr == ""
    shards, tokens, kib = map(int, ended.stdout.split())
    assert (shards, tokens) == (10_000, 40_000_000_000)
    assert kib < 200 * 1024
