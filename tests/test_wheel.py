"""The wheel: what is in it, and that it trains from an empty folder beside an untouched TorchTitan."""

import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import corpora
from zephon_patches import train
from zephon_patches.errors import UpstreamError

REPOSITORY = Path(__file__).resolve().parents[1]
OVERLAY = "zephon_patches/overlay/torchtitan/"


def sources(folder: str) -> dict[str, bytes]:
    """Python files of a folder of the repository, by their path in it."""
    root = REPOSITORY / folder
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*.py")}


def run(*command: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=180
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    built = run("-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder), cwd=REPOSITORY)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-index", "--no-compile", "--quiet", "--target", str(folder)]
    result = run("-m", "pip", "install", *options, str(wheel), cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder


def test_the_wheel_has_the_package_with_the_overlay_inside_and_nothing_else(wheel):
    expected = {f"zephon_patches/{name}": text for name, text in sources("zephon_patches").items()}
    expected |= {f"{OVERLAY}{name}": text for name, text in sources("torchtitan").items()}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert {name: archive.read(name) for name in names if name.endswith(".py")} == expected
    assert len(names) == len(set(names))
    # A file under torchtitan/ would be written over the release's.
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"zephon_patches", "torchtitan_zephon"}
    assert not [name for name in names if "__pycache__" in name]


def test_the_record_lists_every_file_with_its_hash(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        rows = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(archive.read(record).decode()))}
        assert rows.pop(record) == ("", "")
        assert rows == {name: entry(archive.read(name)) for name in archive.namelist() if name != record}


def entry(content: bytes) -> tuple[str, str]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"sha256={digest}", str(len(content))


def test_an_editable_install_copies_nothing(tmp_path):
    # A copied part of zephon_patches would be found before the checkout, and be all there is of it.
    built = run("-m", "hatchling", "build", "--target", "wheel:editable", "--directory", str(tmp_path), cwd=REPOSITORY)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.startswith(("zephon_patches/", "torchtitan/"))]


PROBE = """
import importlib.util, multiprocessing, subprocess, sys

def origin():
    print(importlib.util.find_spec("torchtitan").origin, flush=True)

if __name__ == "__main__":
    from zephon_patches.train import use_overlay
    use_overlay()
    origin()
    child = multiprocessing.get_context("spawn").Process(target=origin)
    child.start()
    child.join()
    code = "import importlib.util; print(importlib.util.find_spec('torchtitan').origin)"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_the_overlay_comes_first_here_and_in_processes_started_here(installed, tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    result = run("probe.py", cwd=tmp_path, path=installed)
    assert result.stdout.splitlines() == [str(installed / OVERLAY / "__init__.py")] * 3, result.stderr


def test_an_earlier_import_of_torchtitan_is_refused_by_name(installed, tmp_path):
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "__init__.py").touch()
    result = run("-c", "import torchtitan, zephon_patches.train as t; t.use_overlay()", cwd=tmp_path, path=installed)
    assert result.returncode != 0
    assert f"UpstreamError: torchtitan is already imported, from {tmp_path}/torchtitan/__init__.py" in result.stderr
    assert "use_overlay()" in result.stderr


def test_a_checkout_uses_its_own_overlay_and_may_be_asked_twice(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/a", str(REPOSITORY), "/b"])
    monkeypatch.setenv("PYTHONPATH", f"/c{os.pathsep}{REPOSITORY}")
    for _ in range(2):
        train.use_overlay()
        assert sys.path == [str(REPOSITORY), "/a", "/b"]
        assert os.environ["PYTHONPATH"] == f"{REPOSITORY}{os.pathsep}/c"


def test_a_release_beside_the_package_is_not_taken_for_the_overlay(tmp_path, monkeypatch):
    for name in ("__init__.py", "train.py"):
        (tmp_path / "torchtitan" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "torchtitan" / name).touch()
    monkeypatch.setattr(train, "__file__", str(tmp_path / "zephon_patches" / "train.py"))
    with pytest.raises(UpstreamError, match="installation is incomplete"):
        train.use_overlay()


def test_the_wheel_trains_the_debug_config_from_any_folder(installed, tmp_path):
    corpora.write_jsonl(tmp_path / "corpus" / "a.jsonl", corpora.D60)
    corpora.write_tokenizer(tmp_path / "tokenizer", corpora.D60)
    result = run(
        "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d",
        "--rdzv_endpoint", "localhost:0", "--local-ranks-filter", "0", "--role", "rank", "--tee", "3",
        "-m", "zephon_patches.train", "--job.config_file", str(REPOSITORY / "train_configs" / "llama3_debug.toml"),
        "--data.sources.0.path", "corpus", "--model.hf_assets_path", "tokenizer",
        "--training.steps", "2", "--training.seq_len", "16", "--training.dataloader.num_workers", "1",
        cwd=tmp_path, path=installed,
    )  # fmt: skip
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "data: a step takes 12 samples" in output
    assert "step:  2" in output and "Training completed" in output
    # Modules leave a trace where they were found.
    assert list((installed / OVERLAY / "hf_datasets" / "__pycache__").glob("text_datasets.*"))
    assert not changed_files_of_the_release()


def changed_files_of_the_release() -> list[str]:
    """Files of the installed TorchTitan that are not what its own record says."""
    release = importlib.metadata.distribution("torchtitan")
    return [
        str(file)
        for file in release.files or []
        if file.hash is not None and entry(file.read_binary())[0] != f"{file.hash.mode}={file.hash.value}"
    ]
