"""Builders beside each other: parts, interleavings, plans that are replaced, texts that change."""

import itertools
import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prepare.stores import (
    SHARD_BYTES,
    begin_together,
    contents,
    file_input,
    open_store,
    process,
    until_one_builds,
    write_compressed,
    write_mixed,
)
from tests.prepare.test_build import Counted, read_until, store_folder, unit_inodes
from zephon_patches.errors import ConfigError, InputError, StoreError
from zephon_patches.prepare import builder, finding
from zephon_patches.prepare.build import Building, build_part, look_at, open_or_build
from zephon_patches.prepare.builder import Builder, Part
from zephon_patches.prepare.progress import Standing
from zephon_patches.prepare.repair import reopen_store
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.prepare.unfinished import Unfinished, file_lock, held
from zephon_patches.store.reader import TokenStore

UNITS = 8


@pytest.fixture
def mixed(tmp_path):
    return write_mixed(tmp_path)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(builder, "_POLL_SECONDS", 0.01)


def builder_of(folder: Path, cache: str = "cache", part: Part | None = None, tokenizer=None) -> Builder:
    source, tokenizer = file_input(folder), tokenizer or TextTokenizer(folder / "tokenizer")
    where, recipe = finding.locate(source, tokenizer, folder / cache, SHARD_BYTES)
    where.mkdir(parents=True, exist_ok=True)
    return Builder(source, tokenizer, where, recipe, part=part or Part(0, 1))


def left_in(folder: Path) -> list[str]:
    """What is in a store's folder besides its content."""
    kept = (".bin", ".idx", ".origin", ".json", ".jsonl")
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix not in kept or path.name.startswith(".")
    )


# --- parts ---


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_parts_in_any_order_give_the_store_and_the_last_one_closes_it(mixed, order):
    expected = contents(open_store(mixed, cache="whole").folder)
    tokenizer = TextTokenizer(mixed / "tokenizer")
    arguments = file_input(mixed), tokenizer, mixed / "cache", SHARD_BYTES
    for number, index in enumerate(order, start=1):
        done = build_part(*arguments, Part(index, 3))
        assert isinstance(done, TokenStore) == (number == 3)
        if number < 3:
            assert isinstance(done, Standing)
            marks = {path.name[:6] for path in (store_folder(mixed) / "units").glob("[0-9]*.json")}
            assert marks == {f"{unit:06d}" for i in order[:number] for unit in range(i, UNITS, 3)}
            assert str(done).startswith(f"{len(marks)} of 8 units done, ")
    assert contents(store_folder(mixed)) == expected
    assert left_in(store_folder(mixed)) == ["plan.lock"]


def test_a_part_without_units_and_a_part_of_a_finished_store(mixed):
    arguments = file_input(mixed), TextTokenizer(mixed / "tokenizer"), mixed / "cache", SHARD_BYTES
    assert str(build_part(*arguments, Part(9, 20))).startswith("0 of 8 units done, 0 documents")
    open_store(mixed)
    counted = Counted(mixed / "tokenizer")
    assert isinstance(build_part(file_input(mixed), counted, mixed / "cache", SHARD_BYTES, Part(1, 2)), TokenStore)
    assert counted.texts == 0


def test_the_whole_builds_what_parts_have_left(mixed):
    expected = contents(open_store(mixed, cache="whole").folder)
    counted = Counted(mixed / "tokenizer")
    build_part(file_input(mixed), counted, mixed / "cache", SHARD_BYTES, Part(0, 2))
    before = unit_inodes(store_folder(mixed))
    open_or_build(file_input(mixed), counted, mixed / "cache", SHARD_BYTES)
    assert counted.texts == 60
    assert contents(store_folder(mixed)) == expected
    for name, mark in before.items():
        status = (store_folder(mixed) / name).stat()
        assert (status.st_ino, status.st_mtime_ns) == mark


# --- what would be built ---


def test_a_look_writes_nothing_and_says_what_is_there(mixed):
    tokenizer = TextTokenizer(mixed / "tokenizer")
    arguments = file_input(mixed), tokenizer, mixed / "cache", SHARD_BYTES
    total = sum(file.bytes for file in file_input(mixed).files)
    outlook = look_at(*arguments)
    assert not (mixed / "cache").exists()
    assert (outlook.finished, outlook.started, outlook.units, outlook.finished_units) == (False, False, UNITS, 0)
    assert outlook.bytes == outlook.missing_bytes
    assert 0.7 * total < outlook.bytes <= total  # the parquet file's footer is read by nobody
    build_part(*arguments, Part(0, 2))
    before = contents(mixed / "cache")
    partly = look_at(*arguments)
    assert (partly.finished, partly.started, partly.units, partly.finished_units) == (False, True, UNITS, 4)
    assert 0 < partly.missing_bytes < outlook.bytes
    assert contents(mixed / "cache") == before
    store = open_or_build(*arguments)
    outlook = look_at(*arguments)
    assert (outlook.finished, outlook.missing_bytes, outlook.folder) == (True, 0, store.folder)


# --- interleavings ---


class Killed(BaseException):
    """Ends a builder at once."""


@settings(max_examples=40)
@given(st.lists(st.integers(0, 9), max_size=60), st.booleans())
def test_builders_that_pass_and_stop_each_other_at_any_moment_give_the_same_bytes(mixed_pair, actions, compressed):
    """While one writes, another builds all it can take, or a part, or the one that writes is stopped."""
    folder, expected = mixed_pair[compressed]
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        script, depth = iter(actions), 0
        finished: dict[str, tuple[int, int]] = {}

        def others_act(*arguments) -> None:
            nonlocal depth
            action = next(script, 9)
            if depth < 3 and action < 4:
                depth += 1
                try:
                    start(Part(action % 3, 2) if action in (0, 1) else Part(0, 1))
                finally:
                    depth -= 1
            elif action == 4:
                raise Killed
            elif action == 5 and arguments:
                # As a SIGKILL leaves it: a temporary file of the unit that is written.
                (arguments[0].folder / f".{arguments[1]:06d}-000.bin.gone.1.tmp").write_bytes(b"x")

        def start(part: Part) -> None:
            one = builder_of(folder, cache, part)
            one.on_progress = lambda live: others_act()
            try:
                with one.at_work() as units:
                    if units is not None:
                        one.build(units, Standing(one.store), wait=False)
                        if depth == 0 or not next(script, 1):
                            one._close(len(units), Standing(one.store))
            except Killed:
                pass

        temporary, mark, unit_lock = Unfinished.temporary, Unfinished.mark, Unfinished.unit_lock

        def looked(store):
            others_act(store, 7)
            return temporary(store)

        def marked(store, record, *rest):
            path = store.folder / f"{record.name}.bin"
            assert record.name not in finished, "a finished shard was written again"
            mark(store, record, *rest)
            finished[record.name] = (path.stat().st_ino, path.stat().st_mtime_ns)
            others_act()

        def lock_of(store, number):  # is asked for between the two looks at a unit
            others_act()
            return unit_lock(store, number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Unfinished, "unit_lock", lock_of)
            patch.setattr(Unfinished, "temporary", looked)
            patch.setattr(Unfinished, "mark", marked)
            start(Part(0, 1))
            start(Part(1, 3))
        store = open_store(folder, cache=cache)
        assert contents(store.folder) == expected
        assert left_in(store.folder) == ["plan.lock"]
        for name, inode in finished.items():
            status = (store.folder / f"{name}.bin").stat()
            assert (status.st_ino, status.st_mtime_ns) == inode


@pytest.fixture(scope="module")
def mixed_pair(tmp_path_factory):
    folders = [write_mixed(tmp_path_factory.mktemp("mixed")), write_compressed(tmp_path_factory.mktemp("compressed"))]
    return [(folder, contents(open_store(folder).folder)) for folder in folders]


def test_of_a_unit_whose_middle_shard_was_lost_only_that_one_is_made_again(tmp_path):
    expected = contents(open_store(write_compressed(tmp_path), cache="whole").folder)
    one = builder_of(tmp_path)
    with one.at_work() as units:
        one.build(units, Standing(one.store), wait=False)
        before = unit_inodes(one.folder)
        assert one.store.shards(1)[1]
        for name in ("000001-001.bin", "000001-003.bin"):
            (one.folder / name).write_bytes(b"")
        assert one.build(units, Standing(one.store))
        after = unit_inodes(one.folder)
    assert {name[:10] for name in before if before[name] != after[name]} == {"000001-001", "000001-003"}
    assert contents(one.folder) == expected


# --- who comes late, and who keeps whom out ---


def test_a_builder_that_comes_when_the_store_is_closed_finds_it_and_makes_nothing(mixed):
    late = builder_of(mixed)
    with late.at_work() as units:
        open_store(mixed)
        folder = store_folder(mixed)
        assert (folder / "units").exists()  # it is still at work: its locks stay
        with held(late.store.unit_lock(3)) as locked:
            assert locked
        before = contents(folder)
        counted = Counted(mixed / "tokenizer")
        late.tokenizer = counted
        assert late.build(units, Standing(late.store))
        assert counted.texts == 0
        assert contents(folder) == before
    assert left_in(folder) == ["plan.lock"]
    with late.at_work() as units:
        assert units is None
    assert left_in(folder) == ["plan.lock"]


def test_what_a_builder_that_was_killed_at_its_very_end_left_is_removed_at_the_next_start(mixed):
    folder = open_store(mixed).folder
    expected = contents(folder)
    (folder / "units").mkdir()
    for name in ("000000-000.json", "000001.lock", "host-1-0.builder", ".000000-000.json.host.1.0.tmp"):
        (folder / "units" / name).write_bytes(b"{}")
    (folder / ".manifest.json.host.1.0.tmp").write_bytes(b"")
    assert contents(open_store(mixed).folder) == expected
    assert left_in(folder) == ["plan.lock"]


def test_repair_waits_for_no_builder_and_a_builder_keeps_it_out(mixed):
    folder = open_store(mixed).folder
    (folder / "000001-000.bin").write_bytes(b"")
    with held(file_lock(folder / "plan.lock")), pytest.raises(StoreError, match="another process builds this store"):
        reopen_store(folder)
    reopen_store(folder)
    late = builder_of(mixed)
    with late.at_work():
        open_store(mixed)
        (folder / "000001-000.bin").write_bytes(b"")
        with pytest.raises(StoreError, match="another process builds this store"):
            reopen_store(folder)
    assert len(reopen_store(folder)) == 1


# --- plans ---


def test_a_plan_is_replaced_only_when_nobody_works_by_it(mixed):
    first = builder_of(mixed)
    with first.at_work() as units:
        plan = (first.folder / "plan.json").read_bytes()
        first.build_unit(units, 0, 0.0)
        os.utime(mixed / "texts" / "c.txt", ns=(1, 1))
        waits = []

        class Waited(Exception):
            pass

        def wait(what, standing):
            waits.append(what)
            raise Waited

        second = builder_of(mixed)
        second.wait = wait
        with pytest.raises(Waited), second.at_work():
            pass
        assert waits == ["the builders at work on it, who read its files with other times"]
        assert (first.folder / "plan.json").read_bytes() == plan
        assert first.store.shards(0)[1]
        with pytest.raises(InputError, match="c.txt: changed while its source was tokenized"):
            first.build(units, Standing(first.store))
    store = open_store(mixed)
    assert contents(store.folder) == contents(open_store(mixed, cache="other").folder)


def test_texts_edited_in_mid_build_end_the_builders_and_the_next_start_is_right(mixed):
    """A builder of the new times waits for those of the old ones, who find out; then it begins anew."""
    old = [process(mixed, seconds=0.4, begin=False) for _ in range(2)]
    begin_together(old)
    for one in old:
        read_until(one, "tokenizing, [1-9] of 8")
    path = mixed / "texts" / "d" / "e.jsonl"
    path.write_bytes(path.read_bytes().replace(b"41_0", b"42_0"))
    os.utime(path, ns=(7, 7))
    new = process(mixed, seconds=0.0)
    outputs = [one.communicate(timeout=60)[0] for one in old]
    assert all("e.jsonl: changed while its source was tokenized" in output for output in outputs), outputs
    output = new.communicate(timeout=60)[0]
    assert new.returncode == 0, output
    assert "waiting for the builders at work on it, who read its files with other times" in output
    assert "its files changed since the build began; the build starts anew" in output
    folder = store_folder(mixed)
    assert contents(folder) == contents(open_store(mixed, cache="whole").folder)
    assert left_in(folder) == ["plan.lock"]


@pytest.mark.parametrize("damage", [None, b"{"])
def test_a_plan_that_is_lost_under_builders_is_an_error_and_no_wait_for_ever(mixed, damage):
    first = builder_of(mixed)
    with first.at_work():
        (first.folder / "plan.json").unlink()
        if damage is not None:
            (first.folder / "plan.json").write_bytes(damage)
        with pytest.raises(StoreError, match="the plan was damaged or removed under the builders at work; stop them"):
            open_store(mixed)
    assert open_store(mixed).num_documents == 60


def test_a_dead_builder_does_not_keep_its_plan(mixed):
    dead = process(mixed, 0, moment=2 * 21)
    dead.wait()
    folder = store_folder(mixed)
    assert len(list((folder / "units").glob("*.builder"))) == 1
    os.utime(mixed / "texts" / "c.txt", ns=(1, 1))
    assert contents(open_store(mixed).folder) == contents(open_store(mixed, cache="other").folder)
    assert left_in(folder) == ["plan.lock"]


# --- one builder on a machine, as in a training start ---


def test_of_the_ranks_of_a_machine_one_builds_and_the_others_wait(mixed):
    one = builder_of(mixed)
    with one.at_work() as units, held(one.store.seat()):
        with pytest.raises(ConfigError, match=r"not finished after waiting for .* = -1 \(0 of 8 units done"):
            wait_in_vain(mixed)
        one.build(units, Standing(one.store))
        counted = Counted(mixed / "tokenizer")
        building = Building(one_per_machine=True)
        open_or_build(file_input(mixed), counted, mixed / "cache", SHARD_BYTES, building=building)
        assert counted.texts == 0
    assert left_in(one.folder) == ["plan.lock"]


def wait_in_vain(folder: Path) -> None:
    building = Building(one_per_machine=True, max_minutes=-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "_PATIENCE_SECONDS", 0.0)
        tokenizer = TextTokenizer(folder / "tokenizer")
        open_or_build(file_input(folder), tokenizer, folder / "cache", SHARD_BYTES, building=building)


def test_another_rank_of_the_machine_takes_over_when_the_builder_dies(mixed):
    first = process(mixed, seconds=float("inf"), one_per_machine=True)
    until_one_builds(mixed)
    others = [process(mixed, seconds=0.0, one_per_machine=True) for _ in range(2)]
    for other in others:
        read_until(other, "waiting for the process that builds it on this machine; 0 of 8 units done")
    first.kill()
    first.wait()
    outputs = [other.communicate(timeout=60)[0] for other in others]
    built = [int(re.search(r"built (\d+)", output).group(1)) for output in outputs]
    assert sorted(map(bool, built)) == [False, True]
    assert contents(store_folder(mixed)) == contents(open_store(mixed, cache="whole").folder)
    assert left_in(store_folder(mixed)) == ["plan.lock"]


def test_a_file_that_goes_away_under_its_builder_is_told_with_what_may_have_done_it(mixed, monkeypatch):
    """As where locks hold on one machine only, and a builder on another takes this one for dead."""
    mark = Unfinished.mark

    def lose(store, record, *arguments):
        mark(store, record, *arguments)
        (store.folder / f"{record.name}.origin").rename(store.folder / "gone" / "x")

    monkeypatch.setattr(Unfinished, "mark", lose)
    with pytest.raises(StoreError, match=r"a file went away under its builder \(.*\.origin.*not localflock"):
        open_store(mixed)
    monkeypatch.undo()
    assert open_store(mixed).num_documents == 60
