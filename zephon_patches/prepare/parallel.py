"""Worker processes of one builder: each builds whole units and writes their shards itself.

What comes back through a pipe is how far a worker is, and why it failed; tokens never travel between processes. A
worker takes the units that nobody holds, like any other builder, and ends when there are none. What is left after that
(of workers that were killed, say) is up to the caller. Workers pay no heed to Ctrl-C, which their parent answers by
ending them, and end by themselves when the parent is gone.
"""

import logging
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from multiprocessing import connection, resource_tracker
from typing import Any

from zephon_patches.errors import StoreError, ZephonError
from zephon_patches.prepare.builder import Job, errors_explained
from zephon_patches.prepare.progress import Live, Progress, Standing

__all__ = ["cores", "run_workers", "share_out", "thread_settings"]

logger = logging.getLogger(__name__)

# A process tokenizes so much in about ten times as long as it takes to start.
_WORKER_BYTES = 512 << 20

_GRACE_SECONDS, _MESSAGE_SECONDS = 5.0, 0.5


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_out(workers: int | None, units: int, size: int = 0) -> tuple[int, int]:
    """How many processes are of use, and how many threads each tokenizes with.

    Worked case: 8 workers and 3 units make 3 processes with 2 threads each; 1 unit makes 1 process with 8.

    Args:
        workers: None for as many as there are cores, but no more than pay for their start, and no fewer threads.
        units: That are to be built.
        size: Their bytes of input; 0 if that is not known.
    """
    wanted = workers or cores()
    processes = min(wanted, units)
    if workers is None and size:
        processes = min(processes, size // _WORKER_BYTES)
    processes = max(1, processes)
    return processes, max(1, wanted // processes)


def thread_settings(threads: int) -> dict[str, str]:
    """Environment variables for so many threads of the tokenizers library, which it reads at its first use."""
    return {"TOKENIZERS_PARALLELISM": "false" if threads == 1 else "true", "RAYON_NUM_THREADS": str(threads)}


def run_workers(job: Job, processes: int, threads: int, progress: Progress) -> None:
    """Runs worker processes until no unit is left that nobody holds.

    Args:
        job: What to build.
        processes: How many.
        threads: The tokenizer's, in each.
        progress: Is told how far they are.

    Raises:
        InputError, StoreError: As in a worker, with the same message.
    """
    payload = pickle.dumps(job)
    context = multiprocessing.get_context("spawn")
    workers: dict[connection.Connection, Any] = {}
    try:
        with _no_interrupts() as interrupted, _threads_of_workers(threads):
            for _ in range(processes):
                if interrupted():
                    break
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(payload, writer), daemon=True)
                workers[reader] = process
                process.start()
                writer.close()
        open_readers = set(workers)
        numbers = {reader: number for number, reader in enumerate(workers, start=1)}
        while open_readers:
            for ready in connection.wait(list(open_readers), timeout=1.0):
                assert isinstance(ready, connection.Connection)
                try:
                    message = ready.recv()
                except (EOFError, OSError):
                    open_readers.remove(ready)
                    _check_ended(workers[ready])
                    continue
                if isinstance(message, Exception):
                    raise message
                if message is None:
                    open_readers.remove(ready)
                else:
                    progress.update(Live(*message), numbers[ready])
            progress.show()
    finally:
        _end([process for process in workers.values() if process.pid is not None])


def _check_ended(process: Any) -> None:
    """A worker that ended without a word."""
    process.join(_GRACE_SECONDS)
    code = process.exitcode
    if code is not None and code < 0:
        logger.warning(
            "a worker process was killed by signal %d (%s); what it was at is built by another",
            -code,
            "out of memory? --workers takes fewer" if -code == signal.SIGKILL else signal.strsignal(-code),
        )
        return
    raise StoreError(f"a worker process ended with status {code} before its work was done; --workers 1 starts none")


def _end(processes: list[Any]) -> None:
    try:
        for process in processes:
            process.terminate()  # no more than asks it to clean up; those that are done are gone
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def _no_interrupts() -> Iterator[Callable[[], bool]]:
    """Keeps Ctrl-C back until the block ends, and from processes that are started in it for good.

    Gives a function that says whether there was one.
    """
    came: list[Any] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    # Started here, since its start would let Ctrl-C through again.
    resource_tracker.ensure_running()
    previous = signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    # Its handler is not inherited, but the mask is: from a process's first instruction on, not from its first line on.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield lambda: bool(came) or signal.SIGINT in signal.sigpending()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, previous)
        if came and callable(previous):
            previous(*came[0])


@contextmanager
def _threads_of_workers(threads: int) -> Iterator[None]:
    """Sets the tokenizers library's threads for processes that are started in the block, before they import it."""
    wanted = thread_settings(threads)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- in a worker ---


def _work(payload: bytes, writer: connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_watch_parent, daemon=True).start()
    try:
        try:
            _build(pickle.loads(payload), writer)
            writer.send(None)
        except ZephonError as error:
            writer.send(type(error)(str(error)))
        except Exception:
            writer.send(RuntimeError(f"in a worker process: {traceback.format_exc()}"))
    except BrokenPipeError:  # the parent is gone
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends anyway


def _build(job: Job, writer: connection.Connection) -> None:
    sent, last = -math.inf, Live()

    def tell(live: Live) -> None:
        nonlocal sent, last
        now = time.monotonic()
        if live is not last:  # another unit: the size of the last one's texts is known now
            writer.send(astuple(last))
            last = live
        if now - sent >= _MESSAGE_SECONDS:
            sent = now
            writer.send(astuple(live))

    builder = job.builder(job.tokenizer())
    builder.on_progress = tell
    with errors_explained(job.source, job.folder), builder.at_work() as units:
        if units is not None:
            builder.build(units, Standing(builder.store), wait=False)


def _leave(*arguments: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough, and this must not come while Python shuts down
    raise SystemExit(1)


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)  # temporary files are removed on the way out
    time.sleep(_GRACE_SECONDS)
    os._exit(1)
