"""SIGTERM ends a run behind a whole step, with a checkpoint (``data.on_preempt = "checkpoint"``).

A scheduler that takes machines back sends SIGTERM, to any of a run's processes, and SIGKILL some time later. The signal
sets a flag. Behind each step the ranks agree, by one all-reduce of one number, whether one of them has it, so all
end behind the same step.

The all-reduce has a gloo group of its own: one of the accelerator would make the CPU wait for the step's kernels.
Nothing is logged from the signal's handler: it may run in the middle of a write to the log.

With several machines each has a torchrun, which decides by its own ranks what comes next. When a machine joins, every
torchrun sends SIGTERM to its ranks, but not in the same second; one whose ranks had already ended with 0 would take
the run for complete. So a rank that ends because another was asked to waits a little for a SIGTERM of its own. If none
comes, the other machine leaves and this one stays: where torchrun may start ranks anew, their status asks for it.
"""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from zephon_patches.errors import ConfigError

__all__ = ["STAYS", "Preemption"]

# The exit status of ranks whose machine stays; sysexits.h has it for what may go well at another try.
STAYS = 75

# Between the SIGTERMs of several torchruns; each looks for machines that wait once a second.
_APART_SECONDS, _POLL_SECONDS = 5.0, 0.1


class Preemption:
    """Watches for SIGTERM from now on, for as long as the process lives. All ranks make it together.

    Raises:
        ConfigError: This is not the main thread, where Python handles signals.
    """

    def __init__(self) -> None:
        self._asked = False
        try:
            signal.signal(signal.SIGTERM, self._ask)
        except ValueError:
            raise ConfigError(
                'data.on_preempt = "checkpoint" needs the trainer to be in the process\'s main thread, where Python '
                'handles signals; start it there, or set data.on_preempt = "stop"'
            ) from None
        # System calls of the step's libraries go on as if nothing had come.
        signal.siginterrupt(signal.SIGTERM, False)
        several = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"
        self._group = dist.new_group(backend="gloo") if several else None

    def _ask(self, signum: int, frame: Any) -> None:
        self._asked = True

    def asked_rank(self) -> int | None:
        """The highest rank that had a SIGTERM, the same answer on all ranks; None if none had. A collective."""
        if self._group is None:
            return 0 if self._asked else None
        asked = torch.tensor(dist.get_rank() + 1 if self._asked else 0)
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group)
        return int(asked) - 1 if asked else None

    def machine_stays(self) -> bool:
        """Whether this machine is to go on without another, which was asked to end. Waits for a SIGTERM of its own."""
        if int(os.environ.get("GROUP_WORLD_SIZE", 1)) == 1:  # torchrun's number of machines
            return False
        end = time.monotonic() + _APART_SECONDS
        while not self._asked and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return not self._asked and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
