"""Stores whose files are lost, cut off, mixed up or damaged, before a run and under one: the right data or one error.

What is not found is tested too, so that ``docs/store.md`` says of it what is true.
"""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.corpora import D240, Corpus, make_corpus, write_tokenizer
from tests.prepare.test_megatron import write_pair
from tests.resume import Place, Run, builder, check_steps, expected_stream
from tests.store.test_reader import make_store
from zephon_patches import DataConfig, SourceConfig, build_loader
from zephon_patches.cli.__main__ import main
from zephon_patches.config import Verify
from zephon_patches.errors import StoreError
from zephon_patches.samples.plan_file import ensure_plan
from zephon_patches.store.manifest import Manifest
from zephon_patches.store.reader import TokenStore
from zephon_patches.store.verify import verify_store
from zephon_patches.store.writer import ShardWriter

REPOSITORY = Path(__file__).parents[2]
SHARD_BYTES = 2000  # 8 shards of D240
PLACE = Place(2, 3)
BOTH: list[Verify] = ["size", "checksum"]


@pytest.fixture(scope="module")
def prototype(tmp_path_factory):
    corpus = make_corpus(tmp_path_factory.mktemp("prototype"), D240)
    builder(corpus, shard_bytes=SHARD_BYTES)(PLACE, 0)
    return corpus


@pytest.fixture
def corpus(prototype, tmp_path):
    return Corpus(Path(shutil.copytree(prototype.folder, tmp_path / "copy")), D240, True)


@pytest.fixture(scope="module")
def expected(prototype):
    return expected_stream(prototype, shard_bytes=SHARD_BYTES)


def store_of(corpus: Corpus) -> Path:
    (manifest,) = corpus.folder.glob("cache/web/*/manifest.json")
    return manifest.parent


def start(corpus: Corpus, **settings) -> Run:
    return Run(builder(corpus, shard_bytes=SHARD_BYTES, **settings), PLACE)


def noise(tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 60_000, tokens).tolist()


# --- before a file is mapped ---


def missing(path: Path) -> None:
    path.unlink()


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(4096))


def first_byte(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("verify", BOTH)
@pytest.mark.parametrize("damage", [missing, cut_off, grown, first_byte, a_pipe, a_folder])
def test_a_damaged_shard_is_one_error_before_any_of_its_tokens_comes(corpus, expected, damage, verify):
    store = store_of(corpus)
    damage(store / "000005-000.bin")
    run = start(corpus, verify=verify)
    with pytest.raises(
        StoreError, match=rf"000005-000\.bin: .*zephon-data verify --repair {store} lets the next start"
    ):
        check_steps(run, expected, 30)  # what comes before the shard is right


@pytest.mark.parametrize("verify", BOTH)
@pytest.mark.parametrize("from_another_store", [False, True])
def test_a_file_of_another_shard_of_the_same_size_is_found(tmp_path, verify, from_another_store):
    shards = [noise(50_000, seed) for seed in range(2)]
    folder = make_store(tmp_path / "s", shards)
    files = [folder / f"{number:06d}-000.bin" for number in (0, 1)]
    if from_another_store:
        other = make_store(tmp_path / "other", [noise(50_000, seed) for seed in (2, 3)])
        shutil.copy(other / files[1].name, files[1])
    else:
        files[0].rename(tmp_path / "aside")
        files[1].rename(files[0])
        (tmp_path / "aside").rename(files[1])
    store = TokenStore(folder)
    store.verify = verify
    with pytest.raises(
        StoreError, match=r"000001-000\.bin: damaged, or another file in its place: its (spots' )?checks"
    ):
        store.tokens(1)
    if from_another_store:
        assert store.tokens(0).tolist() == shards[0]


def flip_between_spots(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("kind", ["bin", "idx", "mask"])
def test_a_flipped_bit_anywhere_is_found_by_the_checksum(tmp_path, kind):
    """And not by size and spots, if it lies between them."""
    documents = 5000
    with ShardWriter(tmp_path, "000000-000", np.dtype("<u2")) as shard:
        lengths = [10] * documents
        shard.add(np.arange(10 * documents), lengths, [(0, i) for i in range(documents)], np.ones(10 * documents))
        record = shard.finish([])
    (tmp_path / "manifest.json").write_bytes(Manifest({}, "<u2", [], [record]).to_json())
    before = (tmp_path / f"000000-000.{kind}").read_bytes()
    flip_between_spots(tmp_path / f"000000-000.{kind}")

    def read(verify: Verify) -> np.ndarray | None:
        store = TokenStore(tmp_path)
        store.verify = verify
        return {"bin": store.tokens, "idx": store.pointers, "mask": store.mask}[kind](0)

    assert read("size") is not None
    with pytest.raises(
        StoreError, match=rf"000000-000\.{kind}: damaged, .* its checksum is .*, but the manifest says "
    ):
        read("checksum")
    (tmp_path / f"000000-000.{kind}").write_bytes(before)
    assert read("checksum") is not None


def test_of_a_hundred_random_faults_each_is_found(tmp_path):
    """A bit flipped with the checksum; cut off at any place, and two shards swapped, with either."""
    sizes = [60_000, 60_000, 60_000, 41_000]
    shards = [noise(size, seed) for seed, size in enumerate(sizes)]
    folder, chance = make_store(tmp_path / "s", shards), np.random.default_rng(1)
    paths = [folder / f"{number:06d}-000.bin" for number in range(4)]
    whole = [path.read_bytes() for path in paths]

    def is_found(shard: int, verify: Verify) -> bool:
        store = TokenStore(folder)
        store.verify = verify
        try:
            store.tokens(shard)
        except StoreError as error:
            assert str(error).startswith(str(paths[shard]))
            return True
        return False

    found = {"flipped": 0, "cut off": 0, "swapped": 0}
    for number in range(100):
        shard, verify = number % 4, BOTH[number // 4 % 2]
        data = bytearray(whole[shard])
        data[chance.integers(len(data))] ^= 1 << int(chance.integers(8))
        paths[shard].write_bytes(data)
        found["flipped"] += is_found(shard, "checksum")
        paths[shard].write_bytes(whole[shard][: chance.integers(len(whole[shard]))])
        found["cut off"] += is_found(shard, verify)
        one, other = number % 3, (number + 1) % 3  # of equal size
        paths[shard].write_bytes(whole[shard])
        paths[one].write_bytes(whole[other])
        found["swapped"] += is_found(one, verify)
        paths[one].write_bytes(whole[one])
        assert not is_found(shard, verify)
    assert found == {"flipped": 100, "cut off": 100, "swapped": 100}


def test_bits_flipped_anywhere_never_reach_the_trainer_with_the_checksum(corpus, expected):
    """Also in worker processes; other shards' samples come until then."""
    path = store_of(corpus) / "000003-000.bin"
    whole, chance = path.read_bytes(), np.random.default_rng(0)
    for workers in (0, 0, 0, 0, 0, 1):
        damaged = bytearray(whole)
        damaged[chance.integers(len(whole))] ^= 1 << int(chance.integers(8))
        path.write_bytes(damaged)
        run = Run(builder(corpus, shard_bytes=SHARD_BYTES, verify="checksum"), Place(1, 6, workers=workers))
        with pytest.raises(StoreError, match=r"000003-000\.bin: damaged"):
            check_steps(run, expected, 30)
        del run


@pytest.mark.parametrize("kind", ["bin", "idx"])
def test_what_a_flipped_bit_costs_is_one_shard(corpus, expected, capsys, kind):
    """The command that the error names makes the store whole, and the run goes on where it stopped."""
    run = start(corpus)
    check_steps(run, expected, 3)
    state, folder = run.state(), store_of(corpus)
    data = bytearray((folder / f"000002-000.{kind}").read_bytes())
    data[-1] ^= 1
    (folder / f"000002-000.{kind}").write_bytes(data)
    with pytest.raises(StoreError) as found:
        check_steps(
            start(corpus, mask_boundaries=True),
            expected_stream(corpus, shard_bytes=SHARD_BYTES, mask_boundaries=True),
            30,
        )
    command = re.search(r"zephon-data (verify --repair \S+) lets", str(found.value))[1]
    assert main(command.split()) == 0
    assert "1 damaged shards removed" in capsys.readouterr().out
    resumed = start(corpus)
    resumed.load(state)
    check_steps(resumed, expected, 30)


def test_tokens_in_place_are_compared_too(tmp_path):
    write_pair(tmp_path / "ids" / "a", [[[token % 20 for token in range(n, n + 40)]] for n in range(300)])
    write_tokenizer(tmp_path / "tokenizer", [18])

    def samples(verify: Verify) -> int:
        source = SourceConfig("ids", str(tmp_path / "ids"))
        config = DataConfig(sources=[source], cache_dir=str(tmp_path / "cache"), shard_bytes=6000, verify=verify)
        shape = {"seq_len": 8, "global_batch_size": 10, "local_batch_size": 10, "infinite": False}
        return sum(1 for _ in build_loader(config, tmp_path / "tokenizer", **shape))

    path = tmp_path / "ids" / "a.bin"
    whole = samples("checksum")
    assert whole == samples("size") > 100
    times, data = path.stat(), bytearray(path.read_bytes())
    data[7000] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert samples("size") == whole
    with pytest.raises(
        StoreError, match=r"a\.bin: damaged, .* its checksum from byte \d[\d,]* to .* bring back the file"
    ):
        samples("checksum")


def test_order_and_state_are_the_same_however_much_is_compared(corpus):
    first = start(corpus)
    assert start(corpus, verify="checksum").state() == first.state()
    path = store_of(corpus) / "manifest.json"
    old = Manifest.read(path.parent)
    path.write_bytes(replace(old, shards=[replace(shard, spots={}) for shard in old.shards]).to_json())
    assert b"spots" not in path.read_bytes()
    assert start(corpus).state() == first.state()  # a store from before there were spots


def test_an_old_store_is_read_by_its_sizes(tmp_path):
    folder = make_store(tmp_path / "s", [[1, 2, 3]])
    manifest = Manifest.read(folder)
    (folder / "manifest.json").write_bytes(
        replace(manifest, shards=[replace(shard, spots={}) for shard in manifest.shards]).to_json()
    )
    first_byte(folder / "000000-000.bin")
    assert TokenStore(folder).tokens(0).tolist() == [0, 2, 3]
    store = TokenStore(folder)
    store.verify = "checksum"
    with pytest.raises(StoreError, match="damaged"):
        store.tokens(0)


def test_spots_that_are_not_those_of_a_sound_file_are_damage(tmp_path):
    """What training refuses, verify must find, or its advice would be of no use."""
    folder = make_store(tmp_path / "s", [[1, 2, 3]])
    manifest = Manifest.read(folder)
    wrong = replace(manifest.shards[0], spots={"bin": "0" * 16})
    (folder / "manifest.json").write_bytes(replace(manifest, shards=[wrong]).to_json())
    with pytest.raises(StoreError, match="its spots' checksum is"):
        TokenStore(folder).tokens(0)
    [damage] = verify_store(folder)
    assert damage.path.name == "000000-000.bin" and "its spots is" in damage.problem


@pytest.mark.parametrize("spots", [{"origin": "00"}, {"bin": 3}, {"bin": None}, ["bin"], "bin", 3])
def test_spots_of_another_kind_are_no_manifest_of_ours(tmp_path, spots):
    folder = make_store(tmp_path / "s", [[1]])
    manifest = Manifest.read(folder)
    (folder / "manifest.json").write_bytes(
        replace(manifest, shards=[replace(manifest.shards[0], spots=spots)]).to_json()
    )
    with pytest.raises(StoreError, match="not what this version writes"):
        TokenStore(folder)


def test_no_plan_is_made_from_another_shard_s_index(tmp_path):
    """Of the same size and as many tokens: the plan would stand for this shard's from then on."""
    folder = make_store(tmp_path / "s", [[1]])
    for number, lengths in enumerate(([3, 5, 4], [5, 3, 4])):
        with ShardWriter(folder, f"{number:06d}-001", np.dtype("<u2")) as shard:
            shard.add(np.arange(12), lengths, [(0, i) for i in range(3)])
            record = shard.finish([])
    shutil.copy(folder / "000000-001.idx", folder / "000001-001.idx")
    with pytest.raises(StoreError, match=r"000001-001\.idx: damaged, or another file in its place"):
        ensure_plan(folder, record, "best_fit", 8)
    assert not list(folder.glob("*.best_fit-8"))


def test_stores_whose_folders_were_mixed_up_are_refused(corpus):
    """H05: of the same texts, by another tokenizer: sizes and times of the texts do not tell them apart."""
    one = store_of(corpus)
    tokenizer = corpus.tokenizer / "tokenizer.json"
    before = tokenizer.read_text()
    tokenizer.write_text(before.replace('"0_0"', '"x"').replace('"0_1"', '"0_0"').replace('"x"', '"0_1"'))
    start(corpus)
    (other,) = (path.parent for path in corpus.folder.glob("cache/web/*/manifest.json") if path.parent != one)
    shutil.rmtree(one)
    shutil.move(other, one)
    tokenizer.write_text(before)
    with pytest.raises(StoreError, match=rf"{one}: its manifest\.json is that of another store, {other.name}"):
        start(corpus)


def test_a_disk_that_fails_while_a_file_is_compared_is_an_error(tmp_path, monkeypatch):
    store = TokenStore(make_store(tmp_path / "s", [[1, 2, 3]]))

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(StoreError, match=r"000000-000\.bin: cannot be read \(Input/output error\); zephon-data verify"):
        store.tokens(0)


def test_a_path_with_spaces_stands_in_the_command_as_one(tmp_path):
    folder = make_store(tmp_path / "my store", [[1, 2]])
    first_byte(folder / "000000-000.bin")
    with pytest.raises(StoreError, match=rf"verify --repair '{folder}' lets"):
        TokenStore(folder).tokens(0)


# --- under a running loader ---


def replaced(store: Path) -> None:
    """As rsync, cp -f onto another file system's copy, or a rebuild do: by rename."""
    for path in store.glob("*.bin"):
        other = path.with_suffix(".new")
        other.write_bytes(bytes(path.stat().st_size))
        other.rename(path)


def unlinked(store: Path) -> None:
    for path in store.glob("0*"):
        path.unlink()


def gone(store: Path) -> None:
    shutil.rmtree(store.parent)


def without_manifest(store: Path) -> None:
    (store / "manifest.json").unlink()


def with_another_manifest(store: Path) -> None:
    (store / "manifest.json").write_bytes(Manifest({}, "<i4", [], []).to_json())


def broken_manifest(store: Path) -> None:
    (store / "manifest.json").write_bytes(b"{")


@pytest.mark.parametrize(
    ("change", "workers"),
    [
        (replaced, 0),
        (replaced, 1),
        (unlinked, 0),
        (gone, 0),
        (gone, 1),
        (without_manifest, 0),
        (with_another_manifest, 0),
        (broken_manifest, 0),
    ],
)
def test_a_run_that_has_mapped_its_shards_goes_on_with_the_right_data(corpus, expected, change, workers):
    place = Place(1, 6, workers=workers)
    run = Run(builder(corpus, shard_bytes=SHARD_BYTES), place)
    check_steps(run, expected, 20)  # 240 of 330 samples, in full shuffle: each of the 8 shards
    change(store_of(corpus))
    check_steps(run, expected, 30)


def test_shards_that_were_not_mapped_before_their_disk_went_away_are_an_error(corpus, prototype):
    run = start(corpus, shuffle_shards=1)  # one shard after the other
    order = expected_stream(prototype, shard_bytes=SHARD_BYTES, shuffle_shards=1)
    check_steps(run, order, 1)
    folder = store_of(corpus)
    folder.rename(folder.with_name("away"))
    with pytest.raises(StoreError, match=rf"{folder}/\d{{6}}-000\.bin: cannot be opened \(No such file or directory\)"):
        check_steps(run, order, 29)
    folder.with_name("away").rename(folder)
    resumed = start(corpus, shuffle_shards=1)
    resumed.load(run.state())
    check_steps(resumed, order, 29)


def test_a_repair_beside_a_running_loader_gives_it_right_data_or_an_error(corpus, prototype, capsys):
    run = start(corpus, shuffle_shards=1)
    order = expected_stream(prototype, shard_bytes=SHARD_BYTES, shuffle_shards=1)
    check_steps(run, order, 1)
    folder = store_of(corpus)
    first_byte(folder / "000001-000.bin")
    assert main(["verify", "--repair", str(folder)]) == 0
    started_again = start(corpus, shuffle_shards=1)  # makes the shard
    check_steps(run, order, 15)
    check_steps(started_again, order, 16)
    assert verify_store(folder) == []


def in_process(folder: Path, change: str) -> subprocess.CompletedProcess:
    code = f"""
        import faulthandler, os, sys
        from pathlib import Path
        from zephon_patches.store.reader import TokenStore
        faulthandler.enable()  # as torchrun's processes have it
        store = TokenStore(Path(sys.argv[1]))
        path = Path(sys.argv[1]) / "000000-000.bin"
        tokens = store.tokens(0)
        print(int(tokens[40_000]), flush=True)
        {change}
        print(int(tokens[40_000]), flush=True)
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_shard_that_is_cut_off_under_a_run_ends_the_process_and_never_gives_other_tokens(tmp_path):
    """Nothing that maps files can prevent it; the next start names the file."""
    shard = noise(50_000, 0)
    folder = make_store(tmp_path / "s", [shard])
    ended = in_process(folder, "os.truncate(path, 4096)")
    assert ended.returncode == -signal.SIGBUS
    assert ended.stdout.split() == [str(shard[40_000])]
    assert "Bus error" in ended.stderr
    with pytest.raises(StoreError, match=r"000000-000\.bin: 4,096 bytes, but the manifest says 100,000"):
        TokenStore(folder).tokens(0)


def test_a_shard_that_is_written_over_in_place_shows_through_until_it_is_mapped_anew(tmp_path):
    """The one way to other tokens: found at the next start, and by an audit of the run's traces."""
    shard = noise(50_000, 0)
    folder = make_store(tmp_path / "s", [shard])
    ended = in_process(folder, "path.write_bytes(bytes(100_000))")
    assert (ended.returncode, ended.stdout.split()) == (0, [str(shard[40_000]), "0"])
    with pytest.raises(StoreError, match="damaged, or another file in its place"):
        TokenStore(folder).tokens(0)
