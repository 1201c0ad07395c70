"""Several ranks, each a process, for tests that need a real process group.

A process that has done nothing else yet imports the test's module once and forks: a spawned rank would import torch
for seconds, and a fork of the tests' own process takes over the threads and locks of what ran there before.

The ranks meet in a store that the test's process holds, as torchrun's ranks meet in their agent's. So no port is looked
for that another process could take before it is used.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

REPOSITORY = Path(__file__).resolve().parents[1]


class Meeting:
    """A store in this process, for as long as this object is there, and the environment that leads ranks to it."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def environment(self, size: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(size),
        }


def run_ranks(function: Callable[..., None], size: int, *arguments: Any) -> None:
    """Calls ``function(rank, *arguments)`` in each rank; an exception in one of them is an AssertionError here.

    Args:
        function: Of a module's top level. ``init_process_group`` in it needs no more than the backend.
        arguments: Plain values, which pass through JSON.
    """
    meeting = Meeting()
    ended = subprocess.run(
        [sys.executable, "-m", "tests.ranks", function.__module__, function.__name__, json.dumps(arguments)],
        cwd=REPOSITORY,
        env={**os.environ, **meeting.environment(size)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _rank(rank: int, function: Callable[..., None], arguments: list[Any]) -> None:
    os.environ["RANK"] = str(rank)
    function(rank, *arguments)


if __name__ == "__main__":
    module, name, arguments = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    size = int(os.environ["WORLD_SIZE"])
    torch.multiprocessing.start_processes(_rank, (function, json.loads(arguments)), nprocs=size, start_method="fork")
