"""torchrun for runs whose machines are taken back. It takes torchrun's arguments:

    python -m zephon_patches.launch --nproc_per_node 2 -m zephon_patches.train --job.config_file my.toml

Two things are other than torchrun's:

- torchrun that gets a SIGTERM hands it on to its ranks, waits for them (``--shutdown-timeout``, 30 seconds) and ends with
  status 1, whatever they ended with. Here it ends with 0 if all of them did, as they do after a checkpoint
  (``data.on_preempt = "checkpoint"``). It first waits for the other machines, whose ranks end with these; else their
  torchruns would wait 5 minutes for this one. Where lost machines are gone on without (``--max-restarts``) it does not.
- The first machine of a meeting has the store that the ranks of all of them start with. torchrun keeps its address
  when machines meet again, so after the first machine's death the others would wait for a store that is gone. Here
  each meeting has a new one, rank 0's own.
"""

import os
import signal
import sys
from collections.abc import Sequence

import torch.distributed.launcher.api as launcher
import torch.distributed.run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException

__all__ = ["main"]

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class _EndedWell(SignalException):
    """Raised where torchrun's own is, when all ranks ended with status 0 after a SIGTERM."""


class _Agent(LocalElasticAgent):
    """torchrun's keeper of the ranks of one machine."""

    def run(self, role: str = "default") -> object:
        try:
            return super().run(role)
        except SignalException as error:
            if error.sigval != signal.SIGTERM or not self._ranks_ended_well():
                raise
            if not self._worker_group.spec.max_restarts:
                self._exit_barrier()
            # An exception, as torchrun's: with a result the meeting would be closed for the other machines.
            raise _EndedWell(str(error), error.sigval) from None

    def _ranks_ended_well(self) -> bool:
        started = self._pcontext.subprocess_handlers.values() if self._pcontext else []
        return bool(started) and all(handler.proc.poll() == 0 for handler in started)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs torchrun.

    Args:
        argv: torchrun's arguments; those of the command line if None.

    Returns:
        The exit status, where torchrun raises nothing.
    """
    os.environ.setdefault(_OWN_STORE, "1")
    launcher.LocalElasticAgent = _Agent
    try:
        torchrun.main(argv)
    except _EndedWell as ended:
        print(f"launch: {ended}; all ranks ended with status 0", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
