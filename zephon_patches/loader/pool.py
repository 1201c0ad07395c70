"""Worker processes that read micro-batches ahead.

Of W workers, worker k reads the micro-batches k, k + W, k + 2 W, ... of a plan; the parent takes them in turn, so the
order is the plan's. Each worker has a socket of its own to the parent, over which the rows of a micro-batch go one way
and the bytes of its tensors the other, straight into the memory of the tensors that the parent hands out. Nothing is
shared: there is no lock that a killed worker could hold, and no shared memory or temporary file that it could leave.
That one is dead is seen at once, and that one hangs after ``timeout`` seconds without a byte from it.

Only their parent ends workers. Signals to the process group (torchrun, schedulers and Ctrl-C send those) are the
trainer's to deal with, which may want to finish its step; workers have them blocked from before they start, since a
spawned one imports for seconds. A worker ends when its socket does, whatever its main thread hangs in, and when
its parent is gone.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from zephon_patches.errors import LoaderError, ReadError
from zephon_patches.loader.collate import Item, MicroBatchReader, Row
from zephon_patches.loader.failure import ReadFailure
from zephon_patches.loader.serve import LABELS, SIGNALS, SIZES, Failed, frame, serve

__all__ = ["WorkerPool"]

# Seconds that a worker may take to start, where the timeout is shorter: it may import torch from a slow disk.
_START = 300.0

# Seconds in which a worker that is asked to end, or was killed, does so.
_END = 1.0
_KILLED = 5.0
_TOLD = 0.05

# Seconds after which a waiting parent looks whether its worker is there. Time counts in which this process waited: one
# that was stopped and goes on finds its workers stopped, too.
_LOOK = 1.0


class WorkerTraceback(Exception):
    """Raised by nothing: the cause of an error that a worker had, with where it had it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkerPool:
    """Processes that read micro-batches; they end with the last reference to it.

    Args:
        reader: Reads one micro-batch. It pickles small.
        num_workers: Processes, at least 1.
        ahead: Micro-batches that each is asked for in advance, at least 1.
        pin_memory: Whether tensors lie in page-locked memory.
        start_method: "fork", "spawn" or "forkserver"; None for Python's default.
        timeout: Seconds that a worker may be silent while it is waited for; 0 for any.

    Attributes:
        close: Ends the processes; to be called as often as one likes.

    Raises:
        LoaderError: A process cannot be started.
    """

    def __init__(
        self,
        reader: MicroBatchReader,
        num_workers: int,
        ahead: int,
        pin_memory: bool = False,
        start_method: str | None = None,
        timeout: float = 0.0,
    ) -> None:
        context = multiprocessing.get_context(start_method)
        self._ahead = ahead
        self._interrupted = False
        self._pid = os.getpid()
        self._workers: list[_Worker] = []
        # Behind what multiprocessing does at exit it would wait for those that hang.
        self.close = Finalize(self, _end, (self._workers,), exitpriority=100)
        if context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # where it starts with the first worker, it unblocks the signals
        try:
            with _signals_blocked():  # workers inherit it
                for number in range(num_workers):
                    self._workers.append(_Worker(context, number, reader, pin_memory, timeout))
        except OSError as error:
            started = len(self._workers)
            self.close()
            raise LoaderError(
                f"worker {started} of {num_workers} cannot be started ({error}); lower the number of "
                "workers, in TorchTitan training.dataloader.num_workers"
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """False in a fork of the process, too, whose sockets are those of its parent."""
        return self.close.still_active() and os.getpid() == self._pid

    def interrupt(self) -> None:
        """Lets who waits for an item, in another thread, get an error at once. Then the pool is to be closed."""
        if not self.is_open:
            return
        self._interrupted = True
        for worker in self._workers:
            worker.interrupt()

    def items(self, plan: Iterator[Sequence[Row]]) -> Iterator[Item]:
        """The items of a plan. Another call drops what was read ahead for the plan before.

        Raises:
            ReadFailure: A micro-batch cannot be read, or its worker died or hangs. The pool is closed then.
        """
        for worker in self._workers:
            worker.forget()
        planned = _Planned(plan)
        turns: deque[_Worker] = deque()
        try:
            for worker, rows in zip(chain(*[self._workers] * self._ahead), planned, strict=False):
                worker.ask(rows)
                turns.append(worker)
            while turns:
                worker = turns.popleft()
                yield worker.take()
                for rows in planned:  # behind the item: for many of them together it takes longer than a step may
                    worker.ask(rows)
                    turns.append(worker)
                    break
        except GeneratorExit:
            raise
        except BaseException:
            if not self._interrupted:
                self.close()  # there may be half a frame in a socket
            raise
        if planned.error is not None:
            raise planned.error


class _Planned:
    """A plan whose error waits until the items before it are handed out."""

    def __init__(self, plan: Iterator[Sequence[Row]]) -> None:
        self._plan = plan
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Sequence[Row]]:
        return self

    def __next__(self) -> Sequence[Row]:
        if self.error is None:
            try:
                return next(self._plan)
            except StopIteration:
                raise
            except Exception as error:
                self.error = error
        raise StopIteration


class _Worker:
    """A worker, seen from its parent."""

    def __init__(self, context: Any, number: int, reader: MicroBatchReader, pin_memory: bool, timeout: float) -> None:
        self._number = number
        self._pins = pin_memory
        self._timeout = timeout
        self._has_started = self._interrupted = False
        self._asked: deque[Sequence[Row]] = deque()
        self._forgotten = 0  # of these the first ones, which nobody waits for any more
        self.channel, theirs = socket.socketpair()
        try:
            is_fork = context.get_start_method() == "fork"
            self.process = context.Process(
                target=serve, args=(reader, theirs, is_fork), name=f"reader-{number}", daemon=True
            )
            self.process.start()
        except BaseException:  # Ctrl-C, too, which another thread may have got: then there is a process
            _cut(self.channel)
            raise
        finally:
            theirs.close()  # so that its end is seen
        self.channel.settimeout(min(_LOOK, timeout) if timeout else _LOOK)

    def ask(self, rows: Sequence[Row]) -> None:
        """Has a micro-batch read."""
        self._asked.append(rows)
        unsent = memoryview(frame(rows))
        waited = 0.0
        while unsent:
            try:
                unsent = unsent[self.channel.send(unsent) :]
            except TimeoutError:  # a worker takes what it is sent at once, so it is stopped, or starts
                waited = self._wait_longer(waited)
            except OSError:
                return  # it is dead, which is said when its items before this one have been taken

    def interrupt(self) -> None:
        self._interrupted = True
        with suppress(OSError):  # it is gone
            self.channel.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Drops what was asked for and not taken."""
        self._forgotten = len(self._asked)

    def take(self) -> Item:
        """The oldest item that was asked for.

        Raises:
            ReadFailure: It cannot be read, or the worker died or hangs.
        """
        while True:
            if not self._has_started:
                self._receive()
                self._has_started = True
            reply, buffer = self._receive()
            rows = self._asked.popleft()
            if not self._forgotten:
                break
            self._forgotten -= 1
        if isinstance(reply, Failed):
            raise ReadFailure(reply.kind, reply.reason, rows) from WorkerTraceback(reply.traceback)
        values = buffer.view(torch.int64)
        views = {view.name: values.as_strided(view.shape, view.strides, view.first) for view in reply}
        labels = views.pop(LABELS)
        return views, labels

    def _receive(self) -> tuple[Any, torch.Tensor]:
        """The next frame: what was pickled, and a fresh buffer with the bytes behind it, uint8."""
        head = bytearray(SIZES.size)
        self._fill(memoryview(head))
        size, behind = SIZES.unpack(head)
        content = bytearray(size)
        self._fill(memoryview(content))
        buffer = torch.empty(behind, dtype=torch.uint8, pin_memory=self._pins and behind > 0)
        self._fill(buffer.numpy().data)
        return pickle.loads(content), buffer

    def _fill(self, view: memoryview) -> None:
        waited = 0.0
        while view:
            try:
                count = self.channel.recv_into(view)
            except TimeoutError:
                if self.process.is_alive():  # where another process has its end of the socket, too, that does not end
                    waited = self._wait_longer(waited)
                    continue
                count = 0
            except ConnectionError:
                count = 0
            if not count:
                raise self._failure("interrupted" if self._interrupted else self._death())
            view, waited = view[count:], 0.0

    def _wait_longer(self, waited: float) -> float:
        """The seconds waited now.

        Raises:
            ReadFailure: They are too many.
        """
        waited += self.channel.gettimeout() or 0.0
        limit = self._timeout if self._has_started else max(self._timeout, _START)
        if self._timeout and waited >= limit:
            what = "gave nothing" if self._has_started else "has not started"
            raise self._failure(
                f"worker {self._number} (process {self.process.pid}) {what} for {limit:g} seconds"
                f"{_state_of(self.process.pid)}: a file system that does not answer, a stopped process, or a timeout "
                "that is too short. See that the store can be read (zephon-data verify), or set data.worker_timeout to "
                "more seconds, or 0 to wait for any time"
            )
        return waited

    def _death(self) -> str:
        self.process.join(_KILLED)
        status = self.process.exitcode
        if status is None:  # another thread may have waited for it, too, and tells the status in a moment
            time.sleep(_TOLD)
            status = self.process.exitcode
        worker = f"worker {self._number} (process {self.process.pid})"
        if status is None:
            return f"{worker} has closed its connection"
        if status >= 0:
            advice = "" if self._has_started else _BEFORE_ITS_START
            return f"{worker} ended with status {status}{advice}"
        name = signal.Signals(-status).name if -status in iter(signal.Signals) else f"signal {-status}"
        return f"{worker} was killed by {name}{_BY_SIGNAL.get(name, '')}"

    def _failure(self, reason: str) -> ReadFailure:
        wanted = self._asked[self._forgotten] if len(self._asked) > self._forgotten else ()
        return ReadFailure(ReadError, reason, wanted)


_BEFORE_ITS_START = (
    " before it could begin; what it printed stands above. With the start methods spawn and forkserver a script does "
    'its work under `if __name__ == "__main__":`'
)

_BY_SIGNAL = {
    "SIGKILL": ": by somebody, or by the kernel for want of memory (`dmesg` says so; fewer workers need less)",
    "SIGBUS": ": a file of the store became shorter while it was read, or its disk fails; see zephon-data verify",
    "SIGSEGV": ": a fault in native code; PYTHONFAULTHANDLER=1 prints where",
}


def _state_of(pid: int) -> str:
    """What Linux says a process does, in words; nothing elsewhere."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    words = {"D": "waits for a disk or file system", "T": "is stopped", "S": "sleeps", "R": "runs", "Z": "is dead"}
    return f" (it {words.get(state, f'is in state {state}')})"


def _cut(channel: socket.socket) -> None:
    with suppress(OSError):  # it is gone
        channel.shutdown(socket.SHUT_RDWR)  # also where another process has this end, too
    channel.close()


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        _cut(worker.channel)
    for seconds in (_END, _KILLED):
        until = time.monotonic() + seconds
        for worker in workers:
            worker.process.join(max(until - time.monotonic(), 0))
            if worker.process.is_alive():
                worker.process.kill()  # a stopped one does not end by itself
    workers.clear()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    if not SIGNALS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
