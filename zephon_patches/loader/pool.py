"""Worker processes that read micro-batches ahead.

Of W workers, worker k reads the micro-batches k, k + W, k + 2 W, ... of a plan; the parent takes them in turn, so the
order is the plan's. Each worker has a socket of its own to the parent, over which the rows of some micro-batches go one
way, and word that they are read the other; the items lie in memory that the two share (``slots.py``). There is no lock
that a killed worker could hold, and no file with a name that it could leave. That one is dead is seen at once, and that
one hangs after ``timeout`` seconds without a byte from it.

Only their parent ends workers. Signals to the process group (torchrun, schedulers and Ctrl-C send those) are the
trainer's to deal with, which may want to finish its step; workers have them blocked from before they start, since a
spawned one imports for seconds. A worker ends when its socket does, whatever its main thread hangs in, and when
its parent is gone.
"""

import multiprocessing
import os
import pickle
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle, islice
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zephon_patches.errors import LoaderError, ReadError
from zephon_patches.loader.bell import Bell, hear_all, ring
from zephon_patches.loader.collate import Item, MicroBatchReader, Row
from zephon_patches.loader.failure import ReadFailure
from zephon_patches.loader.serve import FRAME, LABELS, SIGNALS, SIZE, Failed, Filled, View, frame, serve
from zephon_patches.loader.slots import Slots, forks_share_no_item

__all__ = ["WorkerPool"]

# Items of a worker that are handed out at a time without a copy. Up to 32 of all workers are there in advance
# (``workers.py``), and a training loop has one or two.
_LENT = 36

# Bytes taken from a socket at a time.
_AT_ONCE = 2**16

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
        pin_memory: bool = False,
        start_method: str | None = None,
        timeout: float = 0.0,
    ) -> None:
        context = multiprocessing.get_context(start_method)
        self._pid = os.getpid()
        self._interrupted = False
        self._workers: list[_Worker] = []
        # Behind what multiprocessing does at exit it would wait for those that hang.
        self.close = Finalize(self, _end, (self._workers,), exitpriority=100)
        try:
            if context.get_start_method() != "fork":
                resource_tracker.ensure_running()  # where it starts with the first worker, it unblocks the signals
            with _signals_blocked(), forks_share_no_item():  # workers inherit it
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
        return bool(self._workers) and os.getpid() == self._pid

    def interrupt(self) -> None:
        """Lets who waits for an item, in another thread, get an error at once. Then the pool is to be closed."""
        if not self.is_open:
            return
        self._interrupted = True
        for worker in self._workers:
            worker.interrupt()

    def drop(self, seconds: float) -> bool:
        """Drops what was read ahead. Whether the workers gave it in that time; else the pool is to be closed."""
        until = time.monotonic() + seconds
        try:
            return all(worker.drop(until) for worker in self._workers)
        except BaseException:
            self.close()
            raise

    def items(self, plan: Iterator[Sequence[Row]], ahead: int, words: int) -> Iterator[Item]:
        """The items of a plan. Nothing may be left of the plan before (``drop``).

        Args:
            plan: Rows of each micro-batch.
            ahead: Micro-batches that each worker is asked for in advance, at least 1.
            words: Words (int64) of the largest item.

        Raises:
            ReadFailure: A micro-batch cannot be read, or its worker died or hangs. The pool is closed then.
        """
        planned = _Planned(plan)
        workers = self._workers
        # Each is asked for several at a time, as soon as it has no more than the others to do.
        together = -(-ahead // 2)
        enough = (ahead - together) * len(workers)
        turns: deque[_Worker] = deque()
        failed: Exception | None = None

        def ask(each: int) -> None:
            micro_batches = list(islice(planned, each * len(workers)))
            for number, worker in enumerate(workers):
                if its := micro_batches[number :: len(workers)]:
                    worker.ask(its, ahead, words)
            turns.extend(islice(cycle(workers), len(micro_batches)))

        try:
            ask(1)  # at once, since the places of many take some time
            ask(ahead - 1)
            while turns:
                item = turns.popleft().take()
                if len(turns) <= enough and planned.error is None:
                    try:
                        ask(together)
                    except (LoaderError, ReadFailure) as error:  # of a worker that hangs, say
                        failed = planned.error = error  # behind those that were read before
                yield item
                del item  # from here on its memory is the caller's alone
            if failed is not None:
                raise failed
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
        self._look = min(_LOOK, timeout) if timeout else _LOOK
        self._has_started = self._interrupted = False
        self._slots: Slots | None = None
        self._asked: deque[tuple[Slots, int, Sequence[Row]]] = deque()
        self._told = 0  # items, and that it has started, which were not yet taken
        self._taken = 0
        self._replies: deque[tuple[int, Filled | Failed]] = deque()  # with their numbers, of those in ``_told``
        self._last: Filled = (0, [])
        self._came = b""  # of frames
        self._channel, theirs = socket.socketpair()
        self._bells: list[Bell] = []
        try:
            for counts in (True, False):
                self._bells.append(Bell(counts))
            is_fork = context.get_start_method() == "fork"
            self.process = context.Process(
                target=serve, args=(reader, theirs, is_fork), name=f"reader-{number}", daemon=True
            )
            self.process.start()
            asks, tells = self._bells
            with suppress(ConnectionError):  # it is dead
                socket.send_fds(self._channel, [b" "], [asks.hearing, tells.ringing])
            self._channel.setblocking(False)
            self._poll = select.poll()
            self._poll.register(self._channel, select.POLLIN)
            self._poll.register(tells.hearing, select.POLLIN)
        except BaseException:  # Ctrl-C, too, which another thread may have got: then there is a process
            self.cut()
            raise
        finally:
            theirs.close()  # so that its end is seen

    def cut(self) -> None:
        """Ends the connection, which ends the worker."""
        self.interrupt()  # also where another process has this end, too
        self._channel.close()
        for bell in self._bells:
            bell.close()
        self._bells.clear()

    def interrupt(self) -> None:
        self._interrupted = True
        with suppress(OSError):  # it is gone
            self._channel.shutdown(socket.SHUT_RDWR)

    def ask(self, micro_batches: Sequence[Sequence[Row]], ahead: int, words: int) -> None:
        """Has micro-batches read.

        Args:
            micro_batches: Their rows.
            ahead: Micro-batches that it is asked for at a time.
            words: Words of the largest one.
        """
        try:
            if self._slots is None or self._slots.words < words or self._slots.asked < ahead:
                self._slots = Slots(ahead, _LENT, words)
            slots = self._slots
            asked = [(slots.claim(), rows) for rows in micro_batches]
            self._asked.extend([(slots, slot, rows) for slot, rows in asked])
            self._send(frame((slots.words, bool(slots.unsent), asked)), slots)
        except ConnectionError:
            pass  # it is dead, which is said when its items before these have been taken
        except OSError as error:
            raise LoaderError(
                f"worker {self._number} cannot be given memory for {ahead + _LENT:,} items of {8 * words:,} bytes "
                f"({error}); lower prefetch_factor or the number of workers, in TorchTitan training.dataloader"
            ) from error

    def _send(self, content: bytes, slots: Slots) -> None:
        unsent = memoryview(content)
        waited = 0.0
        while unsent:
            try:
                if slots.unsent:
                    count = socket.send_fds(self._channel, [unsent], slots.unsent)
                    slots.sent()
                else:
                    count = self._channel.send(unsent)
            except BlockingIOError:  # it reads, is stopped, or starts; or there is no room for what it answers
                waited = self._wait(select.POLLOUT, waited)
                continue
            if len(unsent) == len(content):
                ring(self._bells[0].ringing)
            unsent = unsent[count:]

    def drop(self, until: float) -> bool:
        """Drops what was asked for. Whether it came in time, which counts for one that has started."""
        while self._asked:
            self._wait_for_start()
            if not self._told and not self._poll.poll(1000 * max(until - time.monotonic(), 0)):
                return False
            self._reply()
            slots, slot, _ = self._asked.popleft()
            slots.give_back(slot)
        return True

    def take(self) -> Item:
        """The oldest item that was asked for.

        Raises:
            ReadFailure: It cannot be read, or the worker died or hangs.
        """
        reply = self._reply()
        slots, slot, rows = self._asked.popleft()
        if isinstance(reply, Failed):
            raise ReadFailure(reply.kind, reply.reason, rows) from WorkerTraceback(reply.traceback)
        words, views = reply
        if torch.is_inference_mode_enabled():  # of the loop, but not of the thread that also takes items
            with torch.inference_mode(False):
                return self._tensors(slots.take(slot, words), views)
        return self._tensors(slots.take(slot, words), views)

    def _tensors(self, array: np.ndarray, views: list[View]) -> Item:
        values = torch.from_numpy(array)
        if self._pins:
            values = values.pin_memory()
        tensors = {name: values.as_strided(shape, strides, first) for name, first, shape, strides in views}
        labels = tensors.pop(LABELS)
        return tensors, labels

    def _reply(self) -> Filled | Failed:
        self._wait_for_start()
        self._listen()
        self._taken += 1
        if self._replies and self._replies[0][0] == self._taken:
            _, reply = self._replies.popleft()
            if isinstance(reply, Failed):
                return reply
            self._last = reply
        return self._last

    def _wait_for_start(self) -> None:
        if not self._has_started:
            self._listen()
            self._has_started = True

    def _listen(self) -> None:
        """Waits for one that is told."""
        waited = 0.0
        try:
            while not self._told:
                waited = self._wait(0, waited)
        except ConnectionError:
            raise self._failure("interrupted" if self._interrupted else self._death()) from None
        self._told -= 1

    def _wait(self, event: int, waited: float) -> float:
        """Waits for the bell, or for an event of the socket. The seconds waited without either.

        Raises:
            ConnectionError: The worker is dead.
            ReadFailure: The seconds are too many.
        """
        self._poll.modify(self._channel, event | select.POLLIN)
        ready = dict(self._poll.poll(1000 * self._look))
        is_over = bool(ready.get(self._channel.fileno(), 0) & ~event) and not self._take_in()
        if self._bells[1].hearing in ready:
            number = hear_all(self._bells[1].hearing)
            self._replies.extend(self._frame() for _ in range(number // FRAME))
            self._told += number % FRAME
        elif is_over:
            raise ConnectionError
        return 0.0 if ready else self._wait_longer(waited)

    def _take_in(self) -> bool:
        """Takes what is in the socket. Whether the worker may send more."""
        for _ in range(2):  # that it ended uncleanly is said once, and first
            with suppress(ConnectionError):
                more = self._channel.recv(_AT_ONCE)
                self._came += more
                return bool(more)
        return False

    def _frame(self) -> Any:
        """What the next frame holds, all of which has been sent."""
        while len(self._came) < SIZE.size or len(self._came) < SIZE.size + SIZE.unpack_from(self._came)[0]:
            if not self._take_in():
                raise ConnectionError
        stop = SIZE.size + SIZE.unpack_from(self._came)[0]
        content = pickle.loads(self._came[SIZE.size : stop])
        self._came = self._came[stop:]
        return content

    def _wait_longer(self, waited: float) -> float:
        """The seconds waited now.

        Raises:
            ConnectionError: The worker is dead; where another process has its end of the socket, too, only this tells.
            ReadFailure: They are too many.
        """
        if not self.process.is_alive():
            raise ConnectionError
        waited += self._look
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
        return ReadFailure(ReadError, reason, self._asked[0][-1])


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


def _end(workers: list[_Worker]) -> None:
    ended = workers[:]
    workers.clear()
    with ExitStack() as stack:  # Ctrl-C ends none of it
        stack.callback(_join, ended)
        for worker in ended:
            stack.callback(worker.cut)


def _join(workers: list[_Worker]) -> None:
    for seconds in (_END, _KILLED):
        until = time.monotonic() + seconds
        for worker in workers:
            worker.process.join(max(until - time.monotonic(), 0))
            if worker.process.is_alive():
                worker.process.kill()  # a stopped one does not end by itself


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
