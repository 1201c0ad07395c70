"""Opening a finished store: views, descriptors, damage, processes."""

import gc
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from zephon_patches.errors import StoreError
from zephon_patches.store.manifest import Manifest
from zephon_patches.store.reader import TokenStore
from zephon_patches.store.writer import ShardWriter


def make_store(folder, shards, dtype="<u2"):
    """A store whose shard i holds the given ids, one document each."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for number, ids in enumerate(shards):
        with ShardWriter(folder, f"{number:06d}-000", np.dtype(dtype)) as shard:
            shard.add(np.array(ids, dtype=np.int64), [len(ids)], [(0, 0)])
            records.append(shard.finish([]))
    (folder / "manifest.json").write_bytes(Manifest({}, np.dtype(dtype).str, [], records).to_json())
    return folder


@pytest.mark.parametrize(("dtype", "largest"), [("<u2", 65_535), ("<i4", 131_071)])
def test_tokens_come_back_in_the_stores_dtype(tmp_path, dtype, largest):
    store = TokenStore(make_store(tmp_path / "s", [[1, 2, largest], [4]], dtype))
    assert store.tokens(0).tolist() == [1, 2, largest]
    assert store.tokens(1).tolist() == [4]
    assert store.tokens(0).dtype == np.dtype(dtype)
    assert store.tokens_per_shard.tolist() == [3, 1]


def test_views_are_read_only(tmp_path):
    tokens = TokenStore(make_store(tmp_path / "s", [[1, 2, 3]])).tokens(0)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 9
    with pytest.raises(ValueError):
        tokens.setflags(write=True)


def test_views_outlive_their_store(tmp_path):
    tokens = TokenStore(make_store(tmp_path / "s", [list(range(1000))])).tokens(0)[990:]
    assert tokens.tolist() == list(range(990, 1000))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts the maps of the process")
def test_map_goes_with_the_last_view_of_it(tmp_path):
    store = TokenStore(make_store(tmp_path / "s", [list(range(1000))]))
    name = str(tmp_path / "s" / "000000-000.bin")
    part = store.tokens(0)[5:7]
    del store
    gc.collect()
    assert name in Path("/proc/self/maps").read_text()
    assert part.tolist() == [5, 6]
    del part
    gc.collect()
    assert name not in Path("/proc/self/maps").read_text()


def test_shard_is_mapped_once_and_opening_maps_none(tmp_path):
    folder = make_store(tmp_path / "s", [[1, 2], [3]])
    (folder / "000001-000.bin").unlink()
    store = TokenStore(folder)  # does not look at shards
    assert store.tokens(0) is store.tokens(0)


def test_empty_shard_gives_an_empty_array(tmp_path):
    store = TokenStore(make_store(tmp_path / "s", [[], [1]]))
    assert store.tokens(0).shape == (0,)
    assert store.tokens(0).dtype == np.dtype("<u2")


def test_3000_shards_need_no_descriptors(tmp_path):
    # The shards are links to one file, which is quicker to make.
    folder = make_store(tmp_path / "s", [[1, 2, 3]])
    manifest = Manifest.read(folder)
    records = [manifest.shards[0].__class__(**{**vars(manifest.shards[0]), "name": f"{i:06d}"}) for i in range(3000)]
    for record in records:
        (folder / f"{record.name}.bin").hardlink_to(folder / "000000-000.bin")
    (folder / "manifest.json").write_bytes(Manifest({}, "<u2", [], records).to_json())
    code = """
        import resource, sys
        from pathlib import Path
        from zephon_patches.store.reader import TokenStore
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        store = TokenStore(Path(sys.argv[1]))
        print(sum(int(store.tokens(shard).sum()) for shard in range(3000)))
        print(sum(int(store.tokens(shard)[2]) for shard in range(3000)))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)], capture_output=True, text=True, timeout=60
    )
    assert ended.stderr == ""
    assert ended.stdout.split() == ["18000", "9000"]


def test_missing_shard_is_one_clear_error(tmp_path):
    folder = make_store(tmp_path / "s", [[1, 2]])
    store = TokenStore(folder)
    (folder / "000000-000.bin").unlink()
    with pytest.raises(
        StoreError, match=r"000000-000.bin: cannot be opened \(No such file .* verify --repair .*/s lets"
    ):
        store.tokens(0)


@pytest.mark.parametrize(("size", "shown"), [(3, "3 bytes"), (0, "0 bytes"), (5000, "5,000 bytes")])
def test_cut_or_grown_shard_is_one_clear_error(tmp_path, size, shown):
    folder = make_store(tmp_path / "s", [[1, 2]])
    store = TokenStore(folder)
    data = (folder / "000000-000.bin").read_bytes()
    (folder / "000000-000.bin").write_bytes((data + bytes(5000))[:size])
    with pytest.raises(
        StoreError, match=rf"000000-000.bin: {shown}, but the manifest says 4; zephon-data verify --repair"
    ):
        store.tokens(0)


def test_unfinished_store_does_not_open(tmp_path):
    folder = make_store(tmp_path / "s", [[1, 2]])
    (folder / "manifest.json").unlink()
    with pytest.raises(StoreError, match="no finished token store"):
        TokenStore(folder)


def test_pickle_holds_the_path_and_no_tokens(tmp_path):
    store = TokenStore(make_store(tmp_path / "s", [list(range(5000))]))
    store.tokens(0)
    data = pickle.dumps(store)
    assert len(data) < 2000  # tokens would be 10,000
    assert pickle.loads(data).tokens(0).tolist() == list(range(5000))


def test_a_shard_takes_few_bytes_of_each_process(tmp_path):
    """Names, counts and hashes of many shards lie in arrays, which forked workers share and spawned ones get once."""
    record = Manifest.read(make_store(tmp_path / "s", [[1, 2, 3]])).shards[0]
    sizes = []
    for shards in (1000, 3000):
        records = [record.__class__(**{**vars(record), "name": f"{number:06d}-000"}) for number in range(shards)]
        (tmp_path / "s" / "manifest.json").write_bytes(Manifest({}, "<u2", [], records).to_json())
        store = TokenStore(tmp_path / "s")
        assert not any(isinstance(value, list) for value in vars(store).values())
        sizes.append(len(pickle.dumps(store)))
    assert (sizes[1] - sizes[0]) / 2000 < 100


def test_offsets_go_past_4_gib(tmp_path):
    """E15: a sparse file of more than 2**32 bytes; the last token is where it belongs."""
    folder = make_store(tmp_path / "s", [[1]])
    tokens = 2**31 + 2**30 + 5
    path = folder / "000000-000.bin"
    with open(path, "r+b") as file:
        file.truncate(tokens * 2)
        file.seek((tokens - 1) * 2)
        file.write(b"\x2a\x00")
    if path.stat().st_blocks * 512 > 2**28:
        pytest.skip("this file system has no sparse files")
    record = Manifest.read(folder).shards[0]
    record = record.__class__(**{**vars(record), "tokens": tokens, "spots": {}})
    (folder / "manifest.json").write_bytes(Manifest({}, "<u2", [], [record]).to_json())
    view = TokenStore(folder).tokens(0)
    assert len(view) == tokens
    assert (int(view[0]), int(view[tokens - 2]), int(view[tokens - 1])) == (1, 0, 42)


def test_a_store_pickles_without_its_manifest_and_reads_the_same(tmp_path, monkeypatch):
    store = TokenStore(make_store(tmp_path / "s", [[1, 2, 3], [4]]))
    data = pickle.dumps(store)
    monkeypatch.setattr(Manifest, "read", lambda folder: pytest.fail("a worker read the manifest"))
    again = pickle.loads(data)
    assert [again.tokens(shard).tolist() for shard in (0, 1)] == [[1, 2, 3], [4]]


def test_only_so_many_shards_stay_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr("zephon_patches.store.reader._MAX_MAPS", 2)
    store = TokenStore(make_store(tmp_path / "s", [[1], [2], [3]]))
    for _ in range(2):
        assert [store.tokens(shard).tolist() for shard in (0, 1, 2)] == [[1], [2], [3]]
        assert len(store._maps) == 2


def test_so_many_are_mapped_of_all_stores_and_of_all_kinds_of_files(tmp_path, monkeypatch):
    """The system counts those of a process, which may have hundreds of sources with a thousand shards each."""
    monkeypatch.setattr("zephon_patches.store.reader._MAX_MAPS", 3)
    stores = [TokenStore(make_store(tmp_path / str(i), [[10 * i + 1], [10 * i + 2]])) for i in range(4)]

    def maps() -> int:
        return sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    for _ in range(2):
        for i, store in enumerate(stores):
            for shard in (0, 1):
                assert store.tokens(shard).tolist() == [10 * i + 1 + shard]
                assert store.pointers(shard).tolist() == [0]
                assert maps() <= 3
    del store
    stores.clear()
    assert maps() == 0, "what is counted keeps no store"
