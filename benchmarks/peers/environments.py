"""Environments of the peers, and their workers."""

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.corpora import ROOT

# The requirements file of each peer; those that go together share one. None is the environment that the command runs
# in, with this repository on the path.
REQUIREMENTS: dict[str, str | None] = {
    "limit": None,
    "ours": None,
    "stock": "shared",
    "zephon": "shared",
    "streaming": "streaming",
    "litdata": "shared",
    "megatron": "shared",
    "grain": "shared",
}
_FILES = Path(__file__).parent / "requirements"


class InstallError(Exception):
    """An environment cannot be made; the message is pip's."""


class NoAnswer(Exception):
    """A worker ended, or took too long."""


def python_of(name: str, folder: Path) -> Path:
    """The interpreter of a peer's environment, which is made at the first call."""
    requirements = REQUIREMENTS[name]
    if requirements is None:
        return Path(sys.executable)
    listed = _FILES / f"{requirements}.txt"
    digest = hashlib.sha256(listed.read_bytes() + sys.version.encode()).hexdigest()
    environment = folder / "environments" / requirements
    finished = environment / "finished"
    if not finished.is_file() or finished.read_text() != digest:
        shutil.rmtree(environment, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(environment))
        _run(str(environment / "bin" / "python"), "-m", "pip", "install", "-q", "-r", str(listed))
        finished.write_text(digest)
    return environment / "bin" / "python"


def _run(*command: str) -> None:
    print(" ".join(command), file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if "ERROR" in line or "error" in line]
        raise InstallError((errors or done.stdout.splitlines() or ["no output"])[-1].strip())


class Worker:
    """The process that runs one adapter; started at the first question, and again after it failed to answer."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int:
        return self._started().pid

    def ask(self, do: str, timeout: float = 600.0, **arguments: Any) -> dict[str, Any]:
        """
        Raises:
            InstallError: Its environment cannot be made.
            NoAnswer: It ended, or took longer than ``timeout`` seconds.
        """
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], timeout)[0]:
                raise NoAnswer(f"no answer in {timeout:.0f} s")
            line = process.stdout.readline()
            if not line:
                raise NoAnswer(f"its process ended with status {process.wait(30)}")
        except (NoAnswer, OSError, subprocess.TimeoutExpired) as error:
            self.close()
            raise NoAnswer(str(error)) from error
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            _end_group(process)
            process.stdout.close()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            python = python_of(self._name, self._folder)
            # Not the repository itself, whose torchtitan/ would stand before the release.
            path = ROOT if REQUIREMENTS[self._name] is None else _only_benchmarks(self._folder)
            environment = {**os.environ, "PYTHONPATH": str(path), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
            log = self._folder / "logs" / f"{self._name}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as errors:
                self._process = subprocess.Popen(
                    [str(python), "-m", "benchmarks.peers.worker", self._name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                    cwd=self._folder,
                    start_new_session=True,
                )
        return self._process


def _only_benchmarks(folder: Path) -> Path:
    path = folder / "path"
    path.mkdir(parents=True, exist_ok=True)
    link = path / "benchmarks"
    if not link.is_symlink() or link.readlink() != ROOT / "benchmarks":  # of another copy of the repository
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT / "benchmarks")
    return path


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Ends what the worker left behind: it is the leader of its own group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
