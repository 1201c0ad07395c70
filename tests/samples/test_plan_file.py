"""The file of a plan: what comes back, what is refused, and that a good one is left alone."""

import os
import resource
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.store.test_reader import make_store
from zephon_patches.errors import StoreError
from zephon_patches.samples.packed import fill_rows, packed_shard
from zephon_patches.samples.pieces import Plan
from zephon_patches.samples.plan_file import PLANNERS, ensure_plan, open_plan, plan_path, write_plan
from zephon_patches.store.manifest import Manifest
from zephon_patches.store.reader import TokenStore
from zephon_patches.store.writer import ShardWriter

LENGTHS = [7, 6, 5, 0, 5, 4, 1, 3, 3, 25, 3]
SEQ_LEN = 10


@pytest.fixture
def store(tmp_path):
    """The folder of a store with one shard, and the shard."""
    with ShardWriter(tmp_path, "000000-000", np.dtype("<u2")) as writer:
        writer.add(np.arange(sum(LENGTHS)), LENGTHS, [(0, i) for i in range(len(LENGTHS))])
        record = writer.finish([])
    (tmp_path / "manifest.json").write_bytes(Manifest({}, "<u2", [], [record]).to_json())
    return tmp_path, record


def same(one: Plan, other: Plan) -> bool:
    arrays = np.array_equal(one.starts, other.starts) and np.array_equal(one.pieces, other.pieces)
    return arrays and one.left_out == other.left_out


@pytest.mark.parametrize("packing", list(PLANNERS))
def test_a_plan_comes_back_as_it_was_made(store, packing):
    folder, shard = store
    made = ensure_plan(folder, shard, packing, SEQ_LEN)
    assert same(made, PLANNERS[packing](np.array(LENGTHS), SEQ_LEN))
    assert same(open_plan(folder, shard, packing, SEQ_LEN), made)
    assert made.left_out == 2
    path = folder / f"000000-000.{packing}-10"
    assert path == plan_path(folder, shard, packing, SEQ_LEN)
    assert path.stat().st_size == 88 + 8 * (made.num_samples + 1) + 16 * len(made.pieces)
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
    open_plan(folder, shard, packing, SEQ_LEN)


def test_its_bytes_are_those_of_the_description(store):
    folder, shard = store
    ensure_plan(folder, shard, "best_fit", SEQ_LEN)
    data = plan_path(folder, shard, "best_fit", SEQ_LEN).read_bytes()
    assert data[:32] == b"ZPHNPLAN" + (1).to_bytes(8, "little") + b"best_fit" + bytes(8)
    assert data[32:48] == shard.idx.encode()
    seq_len, samples, pieces, left_out, checksum = struct.unpack("<5Q", data[48:88])
    assert (seq_len, left_out) == (SEQ_LEN, 2)
    assert checksum == xxhash.xxh3_64_intdigest(data[:80] + data[88:])
    starts = struct.unpack(f"<{samples + 1}q", data[88 : 96 + 8 * samples])
    assert (starts[0], starts[-1]) == (0, pieces)
    found = list(struct.iter_unpack("<qq", data[96 + 8 * samples :]))
    assert len(found) == pieces
    assert sorted(found)[:5] == [(0, 7), (7, 6), (13, 5), (18, 5), (23, 4)]


def test_it_is_mapped_and_its_rows_are_those_of_the_shard(store):
    folder, shard = store
    plan = ensure_plan(folder, shard, "best_fit", SEQ_LEN)
    assert not plan.starts.flags.owndata and not plan.pieces.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        plan.pieces[0] = 3
    shard_of_rows = packed_shard(TokenStore(folder).tokens(0), plan)
    inputs, labels = (np.empty((plan.num_samples, SEQ_LEN), dtype=np.int64) for _ in range(2))
    counts = fill_rows(inputs, labels, [(shard_of_rows, number) for number in range(plan.num_samples)])
    seen = [label for row, count in zip(labels.tolist(), counts, strict=True) for label in row[:count]]
    firsts = set((np.cumsum(LENGTHS) - LENGTHS).tolist())
    assert sorted(seen) == [token for token in range(sum(LENGTHS)) if token not in firsts]


def test_a_good_plan_is_left_alone_and_a_lost_or_damaged_one_is_made_again(store):
    folder, shard = store
    ensure_plan(folder, shard, "best_fit", SEQ_LEN)
    path = plan_path(folder, shard, "best_fit", SEQ_LEN)
    before, inode = path.read_bytes(), path.stat().st_ino
    ensure_plan(folder, shard, "best_fit", SEQ_LEN)
    assert path.stat().st_ino == inode
    for damage in (b"", before[:50], before[:-1], before + b"\0", b"X" + before[1:]):
        path.write_bytes(damage)
        ensure_plan(folder, shard, "best_fit", SEQ_LEN)
        assert path.read_bytes() == before


def test_several_may_make_one_plan_at_once(store):
    folder, shard = store
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: ensure_plan(folder, shard, "best_fit", SEQ_LEN), range(32)))
    assert all(same(plan, made[0]) for plan in made)
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]


def test_plans_of_several_packings_and_lengths_lie_side_by_side(store):
    folder, shard = store
    for packing in PLANNERS:
        for seq_len in (4, 10):
            ensure_plan(folder, shard, packing, seq_len)
    names = sorted(path.name for path in folder.glob("*.*-*") if path.suffix not in (".bin", ".idx", ".origin"))
    assert names == [f"000000-000.{packing}-{n}" for packing in ("best_fit", "document") for n in (10, 4)]


def test_a_plan_of_something_else_is_refused_by_what_it_is_of(store):
    folder, shard = store
    plan = ensure_plan(folder, shard, "best_fit", SEQ_LEN)
    path = plan_path(folder, shard, "best_fit", SEQ_LEN)
    for packing, seq_len, idx in (("document", 10, shard.idx), ("best_fit", 11, shard.idx), ("best_fit", 10, "0" * 16)):
        write_plan(path, plan, packing, seq_len, idx)
        with pytest.raises(StoreError, match=r"is a plan of \(packing, seq_len, index\) .*expected"):
            open_plan(folder, shard, "best_fit", SEQ_LEN)


def test_missing_plan_and_a_folder_in_its_place_are_store_errors(store):
    folder, shard = store
    with pytest.raises(StoreError, match="cannot be opened .No such file"):
        open_plan(folder, shard, "best_fit", SEQ_LEN)
    plan_path(folder, shard, "best_fit", SEQ_LEN).mkdir()
    with pytest.raises(StoreError):
        open_plan(folder, shard, "best_fit", SEQ_LEN)


@pytest.mark.parametrize("damage", ["missing", "cut", "negative", "other sum"])
def test_an_index_that_does_not_fit_the_manifest_makes_no_plan(store, damage):
    folder, shard = store
    path = folder / "000000-000.idx"
    data = path.read_bytes()
    lengths = np.array(LENGTHS, dtype="<i4")
    if damage == "negative":
        lengths[:2] = -3, 16
    if damage == "other sum":
        lengths[0] += 1
    path.write_bytes(data[:34] + lengths.tobytes() + data[34 + lengths.nbytes :])
    if damage == "cut":
        path.write_bytes(data[:-1])
    if damage == "missing":
        path.unlink()
    with pytest.raises(StoreError, match=r"000000-000.idx: (cannot be read|.*zephon-data verify)"):
        ensure_plan(folder, shard, "best_fit", SEQ_LEN)
    assert not plan_path(folder, shard, "best_fit", SEQ_LEN).exists()


@pytest.mark.parametrize("place", [56, 64])
@pytest.mark.parametrize("count", [0, 2**31, 2**40, 2**60, 2**61, 2**63, 2**64 - 1])
def test_absurd_counts_are_an_error_and_no_allocation(store, place, count):
    folder, shard = store
    ensure_plan(folder, shard, "best_fit", SEQ_LEN)
    path = plan_path(folder, shard, "best_fit", SEQ_LEN)
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, place, count)
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError, match="bytes, but its .* samples of .* pieces take"):
        open_plan(folder, shard, "best_fit", SEQ_LEN)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


@given(st.data())
def test_any_damage_is_found(tmp_path_factory, data):
    folder = make_store(tmp_path_factory.mktemp("plan") / "s", [list(range(30)), list(range(9))])
    shard = Manifest.read(folder).shards[0]
    ensure_plan(folder, shard, "best_fit", 8)
    path = plan_path(folder, shard, "best_fit", 8)
    good = path.read_bytes()
    bad = bytearray(good)
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=6)):
        bad[place] = value
    bad = bytes(bad[: data.draw(st.just(len(bad)) | st.integers(0, len(bad)))]) + data.draw(st.binary(max_size=9))
    path.unlink()
    path.write_bytes(bad)
    if bad == good:
        open_plan(folder, shard, "best_fit", 8)
        return
    with pytest.raises(StoreError):
        open_plan(folder, shard, "best_fit", 8)


def test_a_plan_with_a_right_checksum_but_outside_its_shard_is_found(store):
    folder, shard = store
    plan = ensure_plan(folder, shard, "best_fit", SEQ_LEN)
    path = plan_path(folder, shard, "best_fit", SEQ_LEN)
    starts, pieces = np.array(plan.starts), np.array(plan.pieces)
    wrong = []
    for column, value in ((0, -1), (0, sum(LENGTHS)), (0, 2**63 - 1), (1, 1), (1, 12), (1, 2**63 - 1), (1, -(2**63))):
        changed = pieces.copy()
        changed[2, column] = value
        wrong.append((starts, changed))
    for number, value in ((0, 1), (1, 0), (1, -5), (1, 2**60), (len(starts) - 1, len(pieces) - 1)):
        moved = starts.copy()
        moved[number] = value
        wrong.append((moved, pieces))
    for changed_starts, changed_pieces in wrong:
        write_plan(path, Plan(changed_starts, changed_pieces, 2), "best_fit", SEQ_LEN, shard.idx)
        with pytest.raises(StoreError, match="its samples do not lie in the shard, or not in 10 places each"):
            open_plan(folder, shard, "best_fit", SEQ_LEN)


def test_a_shard_without_a_label_has_a_plan_without_a_sample(tmp_path):
    folder = make_store(tmp_path / "s", [[], [5]])
    for shard in Manifest.read(folder).shards:
        plan = ensure_plan(folder, shard, "best_fit", 8)
        assert (plan.num_samples, plan.pieces.shape) == (0, (0, 2))
        open_plan(folder, shard, "best_fit", 8)
