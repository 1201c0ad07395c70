#!/usr/bin/env python3
"""Trains on machines that come and go, and proves that no sample was missed or trained on twice.

    scripts/elastic_nodes.sh [TRAINER ARGUMENTS]

Each "machine" is a torchrun of its own on this computer. Three of them, of 2, 2 and 1 ranks, train together on the CPU.
The first one is killed in mid-step, ranks and all; the others go on by themselves from the last checkpoint. Then a new
machine joins; they save, and go on together. At the end the traces of all ranks are audited. The exit status is 1 if
anything is not as it should be.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from zephon_patches.cli.table import aligned
from zephon_patches.errors import StateError
from zephon_patches.trace.audit import Audit, SegmentReport, audit_run
from zephon_patches.trace.records import Segment, read_run
from zephon_patches.trace.view import DataView
from zephon_patches.training_config import read_toml, read_training_config

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = REPOSITORY / "train_configs" / "llama3_elastic.toml"

RANKS = (2, 2, 1)  # of the machines at the start
MIN_NODES, MAX_NODES, MAX_RESTARTS = 1, 3, 3

# Of torchrun's meetings, in seconds. A machine counts as dead 9 seconds after its last sign of life (15 by default),
# and a meeting waits 5 seconds for others when it has enough of them (30 by default).
MEETING = "is_host=false,last_call_timeout=5,keep_alive_interval=3,keep_alive_max_attempt=3"


class Machine:
    """One torchrun, with ranks of its own.

    Args:
        name: Of its log, ``NAME.log`` in ``folder``.
        ranks: Their number.
        port: Where torchruns meet.
        arguments: Of the trainer.
        folder: For the logs.
    """

    def __init__(self, name: str, ranks: int, port: int, arguments: Sequence[str], folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        command = [sys.executable, "-m", "zephon_patches.launch"]
        command += ["--nnodes", f"{MIN_NODES}:{MAX_NODES}", "--nproc-per-node", str(ranks)]
        command += ["--max-restarts", str(MAX_RESTARTS), "--rdzv-id", "elastic_nodes", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", MEETING, "--role", name, "--tee", "3"]
        command += ["-m", "torchtitan.train", "--job.config_file", str(CONFIG), *arguments]
        with self.log.open("w") as log:
            self.torchrun = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill(self) -> None:
        """SIGKILL to torchrun, its ranks and their workers, at once."""
        for pid in [self.torchrun.pid, *descendants(self.torchrun.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.torchrun.wait()


def environment() -> dict[str, str]:
    """Of every torchrun and its ranks."""
    others = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{others}" if others else str(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = [pid]
    for parent in found:  # grows while it is walked
        found += children.get(parent, [])
    return found[1:]
