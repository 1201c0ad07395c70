"""``zephon_patches.launch`` ends as its ranks do; torchrun runs in this process, its ranks are small scripts."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed.elastic.multiprocessing.api as multiprocessing
import torch.distributed.launcher.api as launcher
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from zephon_patches import launch
from zephon_patches.errors import UpstreamError

MEETING = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]

# What a rank does: notes that it is there, waits for a signal, and ends with the status given for it.
RANK = """
import os, signal, sys, time
folder, statuses = sys.argv[1], sys.argv[2].split(",")
rank = os.environ["RANK"]
asked = []
if statuses[int(rank)] != "dies":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.append(number))
open(f"{folder}/there-{rank}-{os.getpid()}", "w").close()
while not asked or statuses[int(rank)] == "stays":
    time.sleep(0.01)
if statuses[int(rank)] == "late":
    time.sleep(1)
    sys.exit(0)
sys.exit(int(statuses[int(rank)]))
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch) -> Iterator[None]:
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    environment = dict(os.environ)
    monkeypatch.setattr(launcher, "LocalElasticAgent", LocalElasticAgent)
    monkeypatch.setattr(multiprocessing, "_terminate_process_handler", multiprocessing._terminate_process_handler)
    yield
    os.environ.clear()
    os.environ.update(environment)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def start(folder: Path, statuses: str, *arguments: str, send: int = signal.SIGTERM, times: int = 1) -> int:
    """Two ranks; this process gets a signal when they are there, once or more often."""
    (folder / "rank.py").write_text(RANK)

    def send_when_there() -> None:
        end = time.monotonic() + 60
        while len(list(folder.glob("there-*"))) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), send)
        for _ in range(times - 1):
            time.sleep(0.2)
            os.kill(os.getpid(), send)

    thread = threading.Thread(target=send_when_there)
    thread.start()
    try:
        return launch.main(
            ["--nproc_per_node", "2", *MEETING, *arguments, str(folder / "rank.py"), str(folder), statuses]
        )
    finally:
        thread.join()


def left_running(folder: Path) -> list[str]:
    running = []
    for pid in (path.name.split("-")[2] for path in folder.glob("there-*")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 0)
            running.append(pid)
    return running


@pytest.fixture
def barriers(monkeypatch) -> list[str]:
    """Notes each wait for the other machines."""
    waited: list[str] = []
    monkeypatch.setattr(LocalElasticAgent, "_exit_barrier", lambda self: waited.append("waited"))
    return waited


def test_a_sigterm_ends_with_0_where_all_ranks_end_with_0(tmp_path, barriers, capsys):
    assert start(tmp_path, "0,0") == 0
    assert barriers == ["waited"], "for other machines, whose ranks end with these"
    assert "all ranks ended with status 0" in capsys.readouterr().err
    assert left_running(tmp_path) == []


def test_a_sigterm_while_ranks_are_started_ends_all_of_them(tmp_path, barriers, monkeypatch):
    """Between the first one's start and the second's, when torchrun itself has noted neither."""
    popen, begun = SubprocessHandler._popen, []

    def start_and_signal(self, args, env):
        begun.append(popen(self, args, env))
        if len(begun) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return begun[-1]

    monkeypatch.setattr(SubprocessHandler, "_popen", start_and_signal)
    (tmp_path / "rank.py").write_text("import time; time.sleep(100)")
    with pytest.raises(SignalException):  # they died of it
        launch.main(["--nproc_per_node", "2", *MEETING, str(tmp_path / "rank.py")])
    assert [process.poll() for process in begun] == [-signal.SIGTERM] * 2


def test_further_sigterms_change_nothing_and_leave_no_rank(tmp_path, barriers):
    """torchrun itself stops waiting at the third one, and the ranks go on without it."""
    assert start(tmp_path, "late,late", times=4) == 0
    assert barriers == ["waited"]
    assert left_running(tmp_path) == []


def test_further_interrupts_leave_no_rank(tmp_path, barriers):
    with pytest.raises(SignalException, match=str(int(signal.SIGINT))):
        start(tmp_path, "late,late", send=signal.SIGINT, times=4)
    assert left_running(tmp_path) == []


def test_a_sigterm_while_it_waits_for_other_machines_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalElasticAgent, "_exit_barrier", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    assert start(tmp_path, "0,0") == 0


def test_a_sigterm_while_ranks_end_to_be_started_anew_is_kept_and_waits_for_no_machine(monkeypatch, barriers):
    """A machine joins, so nobody comes to the exit; that the ranks end is not to be interrupted."""
    ended = []

    def end_ranks(self, death_sig, timeout):
        os.kill(os.getpid(), signal.SIGTERM)
        ended.append("all")

    def run(self, role):
        self._stop_workers(self._worker_group)
        pytest.fail("the signal is lost")

    signal.signal(signal.SIGTERM, launch._on_signal)  # as in main
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", end_ranks)
    monkeypatch.setattr(LocalElasticAgent, "run", run)
    monkeypatch.setattr(launch._Agent, "_ranks_ended_well", lambda self: True)
    agent = object.__new__(launch._Agent)
    agent._shutdown_timeout = 30
    agent._worker_group = SimpleNamespace(state=WorkerState.HEALTHY, spec=SimpleNamespace(max_restarts=0))
    with pytest.raises(launch._EndedWell):
        agent.run()
    assert (ended, barriers) == (["all"], [])


def test_it_does_not_wait_for_machines_that_go_on_without_it(tmp_path, barriers):
    assert start(tmp_path, "0,0", "--max-restarts", "2") == 0
    assert barriers == []
    assert len(list(tmp_path.glob("there-*"))) == 2, "the ranks are not started again"


@pytest.mark.parametrize(("state", "waits"), [("HEALTHY", True), ("STOPPED", False), ("SUCCEEDED", False)])
def test_it_waits_for_other_machines_only_while_all_train(monkeypatch, barriers, state, waits):
    """Not when they are about to meet, where nobody comes to the exit; and not when it has been there."""

    def run(self, role):
        raise SignalException("", signal.SIGTERM)

    monkeypatch.setattr(LocalElasticAgent, "run", run)
    monkeypatch.setattr(launch._Agent, "_ranks_ended_well", lambda self: True)
    agent = object.__new__(launch._Agent)
    agent._worker_group = SimpleNamespace(state=WorkerState[state], spec=SimpleNamespace(max_restarts=0))
    with pytest.raises(launch._EndedWell):
        agent.run()
    assert bool(barriers) == waits


@pytest.mark.parametrize("statuses", ["0,3", "dies,dies", "0,stays"])
def test_a_sigterm_is_a_failure_where_a_rank_fails_dies_or_has_to_be_killed(tmp_path, barriers, statuses):
    with pytest.raises(SignalException, match=str(int(signal.SIGTERM))):
        start(tmp_path, statuses, "--shutdown-timeout", "1")
    assert barriers == []
    assert left_running(tmp_path) == []


def test_an_interrupt_is_what_torchrun_makes_of_it(tmp_path, barriers):
    with pytest.raises(SignalException, match=str(int(signal.SIGINT))):
        start(tmp_path, "0,0", send=signal.SIGINT)
    assert barriers == []


def test_without_a_signal_it_ends_as_torchrun(tmp_path):
    (tmp_path / "rank.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    arguments = ["--nproc_per_node", "1", *MEETING]
    assert launch.main([*arguments, str(tmp_path / "rank.py"), "0"]) == 0
    with pytest.raises(ChildFailedError):
        launch.main([*arguments, str(tmp_path / "rank.py"), "4"])


def test_each_meeting_has_a_store_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "rank.py").write_text("import os, sys; sys.exit(os.environ['TORCHELASTIC_USE_AGENT_STORE'] != 'False')")
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    arguments = ["--nproc_per_node", "1", *MEETING]
    assert launch.main([*arguments, str(tmp_path / "rank.py")]) == 0


def test_ranks_that_are_started_anew_have_as_long_as_is_set(monkeypatch):
    waited = []
    agent = object.__new__(launch._Agent)
    agent._shutdown_timeout = 120
    monkeypatch.setattr(agent, "_shutdown", lambda *args, timeout: waited.append(timeout), raising=False)
    agent._stop_workers(SimpleNamespace())
    assert waited == [120]


def test_another_torchrun_is_refused_by_name(monkeypatch):
    class Other(LocalElasticAgent):
        def __init__(self, spec): ...

    monkeypatch.setattr(launch, "LocalElasticAgent", Other)
    with pytest.raises(UpstreamError, match=r"torch .* has a torchrun without --shutdown-timeout"):
        launch.main([])


def test_a_torchrun_with_another_handler_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(launch, "_raise", None)
    with pytest.raises(UpstreamError, match="without its signals' handler"):
        launch.main([])
