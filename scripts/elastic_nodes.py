#!/usr/bin/env python3
"""Trains on machines that come and go, and proves that each sample was trained on once.

    scripts/elastic_nodes.sh [--config CONFIG] [--out FOLDER]

A "machine" is a torchrun of its own on this computer, with ranks on the CPU. Three of them, of 2, 2 and 1 ranks,
begin. The first is killed in mid-step, ranks and all: the others go on from the last checkpoint. A new one joins: they
save, and go on with it. The second is told to leave (SIGTERM): they save, and go on without it. Nobody starts anything
again by hand. At the end the traces of all ranks are audited. The exit status is 1 if anything is not as it should be.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from zephon_patches.cli.table import aligned
from zephon_patches.errors import StateError, ZephonError
from zephon_patches.trace.audit import Audit, audit_run
from zephon_patches.trace.records import Segment, read_run
from zephon_patches.trace.view import DataView
from zephon_patches.training_config import read_toml, read_training_config

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = REPOSITORY / "train_configs" / "llama3_elastic.toml"
MACHINES = "1:3"  # at least and at most
RESTARTS = 5  # of each machine's ranks, after another one's death or leave

# Where torchruns meet. A machine counts as dead 9 seconds after its last sign of life (15 by default), and who meets
# waits 5 seconds for more machines (30 by default). The store is this script's, so any machine may die.
MEETING = "is_host=false,last_call_timeout=5,keep_alive_interval=3,keep_alive_max_attempt=3"

STEPS_BETWEEN = 4  # of the machines together, before the next thing happens to them
LONGEST_WAIT = 400.0  # seconds for that, with a start


class UnexpectedError(Exception):
    """Raised when the run does not do what it should."""


class Machine:
    """One torchrun, with ranks of its own.

    Args:
        name: Of its log, ``NAME.log`` in ``folder``.
        ranks: Their number.
        port: Of the store where torchruns meet.
        config: Of the trainer.
        folder: For the log, and the run's dump folder.
    """

    def __init__(self, name: str, ranks: int, port: int, config: Path, folder: Path) -> None:
        self.name, self.ranks, self.log = name, ranks, folder / f"{name}.log"
        self.expected: int | None = 0
        """The exit status that it should have"""
        command = [sys.executable, "-m", "zephon_patches.launch"]
        command += ["--nnodes", MACHINES, "--nproc-per-node", str(ranks), "--max-restarts", str(RESTARTS)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "elastic"]
        command += ["--rdzv-conf", MEETING, "--role", f"{name}-", "--tee", "3"]
        command += ["-m", "torchtitan.train", "--job.config_file", str(config), "--job.dump_folder", str(folder)]
        path = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{path}" if path else str(REPOSITORY),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("w") as log:
            self.torchrun = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill(self) -> None:
        """SIGKILL to torchrun, its ranks and their workers, at once."""
        self.expected = -signal.SIGKILL
        for pid in [self.torchrun.pid, *descendants(self.torchrun.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.torchrun.wait()

    def tell_to_leave(self) -> None:
        self.torchrun.terminate()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = [pid]
    for parent in found:  # which grows
        found += children.get(parent, [])
    return found[1:]


class Cluster:
    """The machines, and what their run has done so far.

    Args:
        config: Of the trainer.
        folder: The run's dump folder, empty.
    """

    def __init__(self, config: Path, folder: Path) -> None:
        import torch.distributed as dist

        self._config, self._folder = config, folder
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._began = time.monotonic()
        self.machines: list[Machine] = []

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.0f} s  {text}", flush=True)

    def start(self, ranks: int) -> Machine:
        name = "abcdefgh"[len(self.machines)]
        machine = Machine(name, ranks, self._store.port, self._config, self._folder)
        self.machines.append(machine)
        return machine

    def kill_all(self) -> None:
        for machine in self.machines:
            if machine.torchrun.poll() is None:
                machine.kill()

    def until_trained(self, steps: int = STEPS_BETWEEN) -> Segment:
        """Waits until all machines that are there have completed so many steps together, and are in the next one.

        Raises:
            UnexpectedError: One of them ended, or it takes too long.
        """
        ranks = sum(machine.ranks for machine in self.machines if machine.torchrun.poll() is None)

        def trained() -> Segment | None:
            last = self._last_segment()
            whole = last and last.header["world_size"] == ranks and len(last.ranks) == ranks
            return last if last and whole and last.last_step >= last.header["step"] + steps else None

        begun = time.monotonic()
        segment = self._wait_for(trained, f"{steps} steps on {ranks} ranks")
        step_seconds = (time.monotonic() - begun) / steps
        self.say(f"{ranks} ranks have trained {steps} steps, up to step {segment.last_step}")
        time.sleep(min(0.4, step_seconds / 2))  # a line is written behind a step
        return segment

    def until_gone(self, machine: Machine) -> None:
        """Waits until a machine's torchrun has ended."""
        self._wait_for(lambda: machine.torchrun.poll() is not None or None, f"the end of {machine.name}", may_end=True)

    def _wait_for(self, found: Callable[[], Any], what: str, may_end: bool = False) -> Any:
        end = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < end:
            if result := found():
                return result
            for machine in self.machines:
                status = machine.torchrun.poll()
                if status is not None and not may_end and status != machine.expected:
                    raise UnexpectedError(
                        f"machine {machine.name} ended with status {status} before {what}: see {machine.log}"
                    )
            time.sleep(0.1)
        raise UnexpectedError(f"{what}: not within {LONGEST_WAIT:.0f} s; the machines' logs are {self._folder}/*.log")

    def _last_segment(self) -> Segment | None:
        try:
            return read_run(self._folder)[-1]
        except StateError:  # nothing is traced yet
            return None


def train(cluster: Cluster) -> None:
    """What happens to the machines.

    Raises:
        UnexpectedError: The run does not go on.
    """
    first, second, _ = (cluster.start(ranks) for ranks in (2, 2, 1))
    cluster.say("machines a, b and c begin, with 2, 2 and 1 ranks")
    # Between two checkpoints.
    cluster.until_trained(STEPS_BETWEEN * 2)
    first.kill()
    cluster.say("machine a is killed in mid-step")
    cluster.until_trained()
    cluster.start(2)
    cluster.say("machine d joins, with 2 ranks")
    cluster.until_trained()
    second.tell_to_leave()
    cluster.say("machine b is told to leave")
    cluster.until_gone(second)
    for machine in cluster.machines:
        cluster.until_gone(machine)
    cluster.say("all machines have ended")


def table(audit: Audit, steps: int) -> str:
    """The starts of the run, and how each ended."""
    rows = []
    for report, following in [*pairwise(audit.segments), (audit.segments[-1], None)]:
        first, last = report.steps
        if report.repeated:
            end = f"lost {report.repeated} steps, which were trained again"
        elif following:
            end = f"saved behind step {last}"
        else:
            end = "complete" if last == steps else f"stopped before step {steps}"
        samples = f"{report.cursors[0]}-{report.cursors[1] - 1}"
        rows.append([str(report.dp_size), f"{first}-{last}" if last >= first else "none", samples, end])
    return aligned(["ranks", "steps", "samples", "how it ended"], rows, left=("steps", "samples", "how it ended"))


def problems(audit: Audit, steps: int, batch: int, statuses: dict[str, tuple[int | None, int | None]]) -> list[str]:
    """What is not as it should be, one line each.

    Args:
        audit: Of the run.
        steps: That it should have.
        batch: Samples of a step.
        statuses: Of each machine, the exit status that it should have and the one that it has.
    """
    found = [f"audit: {fault}" for fault in audit.faults]
    if (audit.steps, audit.samples, audit.cursors) != (steps, steps * batch, (0, steps * batch)):
        found.append(
            f"{audit.steps} steps with {audit.samples} samples, from {audit.cursors[0]} to {audit.cursors[1]}; "
            f"expected {steps} with {steps * batch}, from 0"
        )
    if lost := [report.segment for report in audit.segments if report.repeated][1:]:
        found.append(f"steps were lost although nobody was killed, in {', '.join(lost)}")
    sizes = [report.dp_size for report in audit.segments]
    changes = [size for before, size in pairwise([0, *sizes]) if size != before]
    if changes[-4:] != [5, 3, 5, 3]:
        found.append(f"the ranks went {' -> '.join(map(str, changes))}; expected 5 -> 3 -> 5 -> 3")
    for name, (expected, status) in statuses.items():
        if status != expected:
            found.append(f"machine {name} ended with status {status}, expected {expected}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG, help="of the trainer (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "outputs" / "elastic_nodes", help="made anew (%(default)s)"
    )
    options = parser.parse_args(argv)
    config, folder = options.config.resolve(), options.out.resolve()
    steps = read_toml(config)["training"]["steps"]
    if folder.exists() and any(folder.iterdir()) and not (folder / "a.log").exists():
        print(f"elastic_nodes.py: {folder} has other files: remove them, or name another --out", file=sys.stderr)
        return 2
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what kills the machines
    cluster = Cluster(config, folder)
    try:
        train(cluster)
    except UnexpectedError as error:
        print(f"elastic_nodes.py: {error}", file=sys.stderr)
        return 1
    finally:
        cluster.kill_all()
    try:
        settings = read_training_config(config)
        os.chdir(REPOSITORY)  # as the ranks, for paths of the config
        audit = audit_run(folder, DataView(settings))
    except ZephonError as error:
        print(f"elastic_nodes.py: {error}", file=sys.stderr)
        return 1
    print("", table(audit, steps), "", sep="\n")
    for note in audit.notes:
        print(f"note: {note}")
    statuses = {machine.name: (machine.expected, machine.torchrun.returncode) for machine in cluster.machines}
    found = problems(audit, steps, settings.global_batch_size, statuses)
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(f"{audit.samples} samples in {audit.steps} steps, each trained on once, in order, on all these ranks")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
