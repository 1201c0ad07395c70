"""The units of a store on a Ray cluster: the same bytes, also without a machine. Without Ray: one clear message."""

import builtins
import re
import sys
import time
from pathlib import Path

import pytest

from tests.prepare.stores import command, contents, open_store, write_mixed
from zephon_patches.cli.__main__ import main

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def mixed(tmp_path):
    return write_mixed(tmp_path)


@pytest.fixture
def cluster(monkeypatch):
    """Two machines, as processes of this one; their tasks take their time."""
    pytest.importorskip("ray", reason="Ray is not installed; pip install 'torchtitan-zephon[ray]'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("SLOWLY", "0.15")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    cluster.second = cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    cluster.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


def units_done(folder: Path) -> int:
    return len(list((folder / "cache").glob("web/*/units/*.json")))


def locks_held(folder: Path) -> int:
    return len(list((folder / "cache").glob("web/*/units/*.builder")))


def finish_and_check(process, folder: Path) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert re.search(r"^web +training +60 ", out, re.M)
    whole = open_store(folder, cache="whole", processor="tests.prepare.slowly:text")
    (store,) = (folder / "cache" / "web").glob("*")
    assert contents(store) == contents(whole.folder)
    assert not (store / "units").exists()
    return err


def wait_until(condition, process) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_machines_of_which_one_is_lost_give_the_same_bytes(mixed, cluster):
    process = command(mixed, "--engine", "ray", seconds=0.15)
    wait_until(lambda: units_done(mixed) >= 1 and locks_held(mixed) == 4, process)  # the driver and three tasks
    done = units_done(mixed)
    cluster.remove_node(cluster.second, allow_graceful=False)
    assert done < 8
    finish_and_check(process, mixed)


def test_a_bad_record_reaches_the_user_as_one_message(mixed, cluster):
    path = mixed / "texts" / "d" / "e.jsonl"
    path.write_text("{bad\n" + path.read_text())
    process = command(mixed, "--engine", "ray")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert "Traceback" not in err
    assert re.search(r"^zephon-data prepare: \S+/d/e.jsonl, line 1: not a JSON record", err.splitlines()[-1])


def test_without_ray_one_message_says_how_to_install_it(mixed, monkeypatch, capsys):
    real = builtins.__import__

    def absent(name, *arguments, **keywords):
        if name == "ray":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", absent)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    arguments = ["--source", f"web={mixed / 'texts'}", "--tokenizer", mixed / "tokenizer", "--cache-dir", mixed / "c"]
    assert main(["prepare", *map(str, arguments), "--engine", "ray"]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message == (
        "zephon-data prepare: --engine ray: Ray is not installed; pip install 'torchtitan-zephon[ray]' (or pip install "
        "ray)"
    )
