"""torchrun for runs whose machines are taken back. It takes torchrun's arguments:

    python -m zephon_patches.launch --nproc_per_node 2 -m zephon_patches.train --job.config_file my.toml

Four things are other than torchrun's:

- torchrun that gets a SIGTERM hands it on to its ranks, waits for them (``--shutdown-timeout``, 30 seconds) and ends
  with status 1, whatever they ended with. Here it ends with 0 if all of them did, as they do after a checkpoint
  (``data.on_preempt = "checkpoint"``). It first waits for the other machines, whose ranks end with these; else their
  torchruns would wait 5 minutes for this one. With ``--max-restarts`` it does not, as the others go on without it.
- torchrun leaves ranks running if a signal comes while it starts them, or a third one while it waits for their end.
  Here a signal counts when all have started, or have ended, and a further SIGTERM changes nothing.
- ``--shutdown-timeout`` counts also where torchrun ends its ranks to start them anew, since a machine joins.
- The first machine of a meeting has the store that the ranks of all of them start with. torchrun keeps its address
  when machines meet again, so after the first machine's death the others would wait for a store that is gone. Here
  each meeting has a new one, rank 0's own.
"""

import inspect
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed.elastic.multiprocessing.api as multiprocessing
import torch.distributed.launcher.api as launcher
import torch.distributed.run as torchrun
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext

from zephon_patches.errors import UpstreamError

__all__ = ["main"]

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

# What came while signals wait; None while they do not.
_came: list[int] | None = None

_HANDLER = "_terminate_process_handler"
_raise = getattr(multiprocessing, _HANDLER, None)


class _EndedWell(SignalException):
    """Raised where torchrun's own is, when all ranks ended with status 0 after a SIGTERM."""


class _Agent(LocalElasticAgent):
    """torchrun's keeper of the ranks of one machine."""

    def run(self, role: str = "default") -> Any:
        try:
            return super().run(role)
        except SignalException as error:
            if error.sigval != signal.SIGTERM or not self._ranks_ended_well():
                raise
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process ends, and one more says nothing new
            # In another state it has been there, or the machines are about to meet.
            if self._worker_group.state == WorkerState.HEALTHY and not self._worker_group.spec.max_restarts:
                self._exit_barrier()  # type: ignore[no-untyped-call]
            # An exception, as torchrun's: with a result the meeting would be closed for the other machines.
            raise _EndedWell(str(error), error.sigval) from None

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        worker_group.state = WorkerState.STOPPED  # already while they end: no one waits for this machine any more
        # torchrun's own waits for 30 seconds here, whatever is set.
        self._shutdown(timeout=self._shutdown_timeout)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _signals_wait():  # until it knows of all that it has started
            return super()._start_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        with _signals_wait():
            super()._shutdown(death_sig, timeout)

    def _ranks_ended_well(self) -> bool:
        ranks = self._pcontext.subprocess_handlers.values() if isinstance(self._pcontext, SubprocessContext) else []
        return bool(ranks) and all(rank.proc.poll() == 0 for rank in ranks)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Lets signals that come in the block count behind it; of several the first."""
    global _came
    before, _came = _came, []
    try:
        yield
    finally:
        came, _came = _came, before
    if came:
        signal.raise_signal(came[0])


def _on_signal(number: int, frame: FrameType | None) -> None:
    """In place of torchrun's handler, which always raises."""
    if _came is not None:
        _came.append(number)
    elif _raise is not None:
        _raise(number, frame)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs torchrun.

    Args:
        argv: torchrun's arguments; those of the command line if None.

    Returns:
        The exit status, where torchrun raises nothing.

    Raises:
        UpstreamError: This torch's torchrun is built in another way.
    """
    has_timeout = "shutdown_timeout" in inspect.signature(LocalElasticAgent.__init__).parameters
    if not has_timeout or _raise is None:
        what = f"its signals' handler ({_HANDLER})" if has_timeout else "--shutdown-timeout"
        raise UpstreamError(
            f"torch {torch.__version__} has a torchrun without {what}, which zephon_patches.launch builds on; install "
            "the version in constraints.txt, or start with torchrun itself"
        )
    os.environ.setdefault(_OWN_STORE, "1")
    launcher.LocalElasticAgent = _Agent  # type: ignore[attr-defined]
    setattr(multiprocessing, _HANDLER, _on_signal)
    try:
        torchrun.main(argv)
    except _EndedWell as ended:
        print(f"launch: {ended}; all ranks ended with status 0", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
