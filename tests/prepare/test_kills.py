"""SIGKILL at random moments, some hundreds of them: ./scripts/test.sh -m slow -s tests/prepare/test_kills.py

Several commands build one store at once, each with several worker processes. At a random moment one of all their
processes is killed, or all of them, and the commands are started again, until the store is finished. Then it is
compared with one that was built in one go, and the next begins.
"""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.prepare.stores import command, contents, open_store, processes_of, workers_of, write_compressed, write_mixed

KILLS = 150  # for each of two corpora


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("write", [write_mixed, write_compressed])
def test_killed_at_random_moments_the_store_is_right_at_the_end(tmp_path, write):
    write(tmp_path)
    settings = {"processor": "tests.prepare.slowly:text"}
    expected = contents(open_store(tmp_path, cache="whole", **settings).folder)
    chance = random.Random(write.__name__)
    counts = dict.fromkeys(("parent", "worker", "all", "stores"), 0)
    finished: dict[str, tuple[int, int]] = {}
    commands: list = []
    while sum(counts[kind] for kind in ("parent", "worker", "all")) < KILLS or commands:
        ending = sum(counts[kind] for kind in ("parent", "worker", "all")) >= KILLS
        while len(commands) < 2 and not ending:
            commands.append(command(tmp_path, "--workers", chance.choice([1, 2, 3]), seconds=0.02))
        if not ending:
            time.sleep(chance.uniform(0.0, 1.5))
            kill_some(commands, chance, counts)
        for one in [one for one in commands if ending or one.poll() is not None]:
            _, err = one.communicate(timeout=120)
            assert one.returncode in (0, -signal.SIGKILL), err
            commands.remove(one)
            for pid in processes_of(one.pid):
                assert wait_until_gone(pid), "an orphan stays"
        folder = next(iter((tmp_path / "cache" / "web").glob("*")), None)
        if folder is None:
            continue
        now = marked(folder)
        assert finished.items() <= now.items() or (folder / "manifest.json").exists()
        finished = now
        if (folder / "manifest.json").exists():
            for one in commands:
                one.communicate(timeout=120)
            commands = []
            counts["stores"] += 1
            check(tmp_path, folder, expected, finished)
            finished = {}
    rerun = command(tmp_path, "--workers", 2)
    _, err = rerun.communicate(timeout=120)
    assert rerun.returncode == 0, err
    assert contents(next(iter((tmp_path / "cache" / "web").glob("*")))) == expected
    print(f"\n{write.__name__}: {counts}")
    assert counts["stores"] > 5 and counts["worker"] > 20 and counts["parent"] > 20


def kill_some(commands: list, chance: random.Random, counts: dict[str, int]) -> None:
    one = chance.choice(commands)
    kind = chance.choice(["parent", "worker", "all"])
    workers = workers_of(one.pid)
    victims = [one.pid] if kind == "parent" else processes_of(one.pid)
    if kind == "worker":
        victims = [chance.choice(workers)] if workers else []
    if one.poll() is not None or not victims:
        return
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    counts[kind] += 1


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    return not os.path.exists(f"/proc/{pid}")


def marked(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of the files of each shard that is marked as finished."""
    found = {}
    for marker in (folder / "units").glob("[0-9]*.json"):
        for kind in ("bin", "idx", "origin"):
            status = (folder / f"{marker.stem}.{kind}").stat()
            found[f"{marker.stem}.{kind}"] = (status.st_ino, status.st_mtime_ns)
    return found


def check(root: Path, folder: Path, expected: dict[str, bytes], finished: dict[str, tuple[int, int]]) -> None:
    """The rerun finds the right store, and leaves nothing beside it."""
    rerun = command(root, "--workers", 2)
    _, err = rerun.communicate(timeout=120)
    assert rerun.returncode == 0, err
    assert contents(folder) == expected
    assert sorted(path.name for path in folder.iterdir() if path.name not in expected) == ["plan.lock"]
    for name, mark in finished.items():
        assert ((folder / name).stat().st_ino, (folder / name).stat().st_mtime_ns) == mark
    shutil.rmtree(folder)
