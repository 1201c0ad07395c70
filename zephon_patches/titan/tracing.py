"""Writes the traces of one rank of a run (``trace/records.py``): a line for each step."""

import logging
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch.distributed as dist

from zephon_patches.errors import ConfigError
from zephon_patches.loader.collate import Item
from zephon_patches.loader.loader import Loader
from zephon_patches.loader.state import ORDER
from zephon_patches.titan.agreement import told_by_first_rank
from zephon_patches.trace.digest import Digest, row_digests
from zephon_patches.trace.records import FOLDER, TraceWriter, as_ranges

__all__ = ["Tracing"]

logger = logging.getLogger(__name__)

# A name by time; of starts that sort before it by their clock also how many they are.
_SEGMENT = re.compile(r"(?P<first>\d{8}-\d{6}-\d{3}-[0-9a-f]{4})(-(?P<later>\d{6})-[0-9a-f]{4})?")


class Tracing:
    """Digests what the loader hands out, and writes a line after each step.

    Args:
        loader: At the place where training starts.
        dump_folder: The run's.
        step: The trainer's at the start.

    Attributes:
        loss: Of the step under way, if it was logged.

    Raises:
        ConfigError: The traces cannot be begun.
    """

    def __init__(self, loader: Loader, dump_folder: str, step: int) -> None:
        self._loader = loader
        self._names = loader.sources
        self._cursor, self._digest, self._waited = loader.cursor, Digest(), loader.seconds_waited
        self.loss: float | None = None
        joined = dist.is_initialized()
        rank = dist.get_rank() if joined else loader.topology.dp_rank
        header = {
            "segment": told_by_first_rank("segment", _behind_others(_new_segment(), Path(dump_folder))),
            "rank": rank,
            "dp_rank": loader.topology.dp_rank,
            "dp_size": loader.topology.dp_size,
            "world_size": dist.get_world_size() if joined else loader.topology.dp_size,
            "global_batch_size": loader.global_batch_size,
            "local_batch_size": loader.local_batch_size,
            "end": loader.end,
            "order": loader.state_dict()[ORDER],
            "step": step,
            "cursor": loader.cursor,
        }
        try:
            self._writer: TraceWriter | None = TraceWriter(Path(dump_folder), header)
        except OSError as error:
            raise ConfigError(
                f"{Path(dump_folder) / FOLDER}: the trace of rank {rank} cannot be written ({error}); make room there, "
                "set job.dump_folder to another folder, or data.trace = false"
            ) from error
        loader.on_item = self._item
        if rank == 0:
            logger.info("data: each rank traces its steps in %s", self._writer.path.parent)

    def step(self, step: int) -> None:
        """Writes down the step that was completed."""
        loader, loss, self.loss = self._loader, self.loss, None
        numbers = loader.numbers_from(self._cursor)
        counts = np.bincount(loader.order.locate(numbers).source, minlength=len(self._names)).tolist()
        line = {
            "step": step,
            "cursor": self._cursor,
            "next": loader.cursor,
            "ranges": as_ranges(numbers.tolist()),
            "digest": self._digest.digest,
            "rows": self._digest.rows,
            "sources": {name: count for name, count in zip(self._names, counts, strict=True) if count},
            "wait": round(loader.seconds_waited - self._waited, 6),
            **({} if loss is None else {"loss": loss}),
        }
        self._waited = loader.seconds_waited
        if self._writer is None:
            return
        try:
            self._writer.write(line)
        except OSError as error:  # a full disk, say: no reason to stop a run, and the audit finds what is missing
            logger.error("data: the trace %s ends here, it cannot be written (%s)", self._writer.path, error)
            with suppress(OSError):  # it tries once more to write the line
                self._writer.close()
            self._writer = None

    def _item(self, item: Item) -> None:
        loader = self._loader
        if not loader.delivered_in_step:
            self._cursor, self._digest = loader.cursor, Digest()
        inputs, labels = item
        self._digest.add(row_digests({name: value.numpy() for name, value in [*inputs.items(), ("labels", labels)]}))


def _new_segment() -> str:
    """A name that sorts by time."""
    now = time.time()
    milliseconds = int(now * 1000) % 1000
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{milliseconds:03d}-{secrets.token_hex(2)}"


def _behind_others(name: str, run: Path) -> str:
    """The name, or one that sorts behind all others: rank 0 may be on another machine now, whose clock is behind."""
    found = (_SEGMENT.fullmatch(path.name) for path in (run / FOLDER).glob("*"))
    last = max((match for match in found if match), key=lambda match: match[0], default=None)
    if last is None or name >= last[0]:
        return name
    return f"{last['first']}-{int(last['later'] or 0) + 1:06d}-{secrets.token_hex(2)}"
