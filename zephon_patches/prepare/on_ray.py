"""A store's units spread over a Ray cluster: one Ray task a unit, with Ray's own scheduling and retries.

A task is a builder that builds one unit; what it says is nothing, since its shard and its record are in the store.
A task that runs again after its machine was lost finds what is finished, and the lock of its unit free, as the system
has freed it. All machines must see the input, the tokenizer and the cache under the same paths, on a file system with
locks. The driver closes the store, and builds what is left after all tasks.
"""

import logging
from collections.abc import Sequence
from typing import Any

from zephon_patches.errors import ConfigError, ZephonError
from zephon_patches.prepare.builder import Job, errors_explained
from zephon_patches.prepare.parallel import thread_settings
from zephon_patches.prepare.progress import Progress
from zephon_patches.prepare.tokenizers import TextTokenizer

__all__ = ["run_on_ray"]

logger = logging.getLogger(__name__)

# A machine that Ray gave up may hold the lock a little longer; what another builder holds is left to it.
_LOCK_SECONDS = 30.0
_RETRIES = 5  # of a task, each after the loss of its process or its machine
_POLL_SECONDS = 1.0

_tokenizers: dict[tuple[object, ...], TextTokenizer] = {}
"""The last one, by its identity and settings: Ray uses its processes for many tasks"""


def run_on_ray(job: Job, units: Sequence[int], progress: Progress) -> None:
    """Builds units on the cluster that is running, or on one of this machine if there is none.

    Args:
        job: What to build.
        units: Which.
        progress: Shows what is finished.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached.
        InputError, StoreError: As in a task, with the same message.
    """
    ray = _connected()
    environment = {"env_vars": thread_settings(1)}
    task = ray.remote(max_retries=_RETRIES, num_cpus=1, runtime_env=environment)(build_unit)
    shared = ray.put(job)
    waiting = [task.remote(shared, number) for number in units]
    try:
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_SECONDS, fetch_local=False)
            for failed in done:
                ray.get(failed)
            progress.show()
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ZephonError):
            raise type(error.cause)(str(error.cause)) from None
        raise
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError, ray.exceptions.NodeDiedError) as error:
        logger.warning("a Ray task was lost %d times (%s); what it was at is built here", _RETRIES + 1, error)
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)


def _connected() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "--engine ray: Ray is not installed; pip install 'torchtitan-zephon[ray]' (or pip install ray)"
        ) from None
    if not ray.is_initialized():
        try:
            # RAY_ADDRESS, or the cluster that runs on this machine; else one of this machine alone, while this runs.
            ray.init(log_to_driver=False, configure_logging=False, include_dashboard=False)
        except Exception as error:  # of many kinds
            raise ConfigError(f"--engine ray: the cluster cannot be reached ({error}); see RAY_ADDRESS") from error
    return ray


def build_unit(job: Job, number: int) -> None:
    """Builds a unit; in a process of Ray's."""
    key = (job.tokenizer_identity, job.tokenizer_engine, job.exact)
    if key not in _tokenizers:
        _tokenizers.clear()
        _tokenizers[key] = job.tokenizer()
    builder = job.builder(_tokenizers[key])
    with errors_explained(job.source, job.folder), builder.at_work() as units:
        if units is not None:
            builder.build_unit(units, number, _LOCK_SECONDS)
