"""How far a build is: a bar on a terminal, log lines elsewhere; one for the whole source, whoever builds it.

Finished shards are read from their records, whoever made them. Of shards that are being made, those of this process
and its workers are known as well. How far is counted in bytes of input. Inside a unit only its texts can be measured,
and they may be shorter than the input (JSON) or longer (parquet is compressed): the units that this process and its
workers have finished tell by how much.
"""

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from zephon_patches.prepare.unfinished import Unfinished

__all__ = ["Live", "Progress", "Standing"]

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS, _REPORT_SECONDS = 1.0, 10.0


@dataclass
class Live:
    """What one builder is at: counts of its present shard, and the texts of the present unit so far."""

    unit: int = -1
    shard: str = ""
    documents: int = 0
    tokens: int = 0
    unit_text_bytes: int = 0


class Standing:
    """What is finished in a store, by the records of its shards.

    Args:
        sizes: Input bytes of each unit, as far as they are known.
    """

    def __init__(self, store: Unfinished, sizes: Sequence[int] = ()) -> None:
        self._store = store
        self._sizes = sizes
        self._known: set[str] = set()
        self.units = self.bytes = self.documents = self.tokens = 0
        self.finished: set[int] = set()

    def update(self) -> None:
        """Looks for shards that were finished since the last look."""
        for unit, record, last in self._store.records(self._known):
            self.documents += record.documents
            self.tokens += record.tokens
            if last and unit not in self.finished:
                self.finished.add(unit)
                self.units += 1
                self.bytes += self._sizes[unit] if unit < len(self._sizes) else 0

    def has(self, shard: str) -> bool:
        return f"{shard}.json" in self._known

    def __str__(self) -> str:
        units = f"{self.units:,} of {len(self._sizes):,}" if self._sizes else f"{self.units:,}"
        return f"{units} units done, {self.documents:,} documents, {self.tokens:,} tokens"


class Progress:
    """Shows how far the build of a store is, as long as this process works on it."""

    def __init__(self, name: str, store: Unfinished, sizes: Sequence[int]) -> None:
        self._name = name
        self._sizes = sizes
        self._total = sum(sizes)
        self._live: dict[int, Live] = {}  # by builder of this process
        self._measured: dict[int, int] = {}  # unit -> bytes of the texts, of units that were built here
        self.standing = Standing(store, sizes)
        self.standing.update()
        self._started = time.monotonic()
        self._first_bytes, self._first_tokens = self.standing.bytes, self.standing.tokens
        self._shown = self._logged = self._started
        self._bar = tqdm(
            desc=f"tokenize {name}",
            total=self._total or None,
            initial=self._first_bytes,
            unit="B",
            unit_scale=True,
            smoothing=0.0,  # units come in large steps
            disable=not sys.stderr.isatty(),
            leave=False,
        )

    def update(self, live: Live, builder: int = 0) -> None:
        """Takes in what a builder of this process is at."""
        before = self._live.get(builder)
        if before is not None and before.unit != live.unit and before.unit >= 0:
            self._measured[before.unit] = before.unit_text_bytes
        self._live[builder] = live
        self.show()

    def show(self) -> None:
        """Says how far the build is, if that was not said just now."""
        now = time.monotonic()
        if now - self._shown < _PROGRESS_SECONDS:
            return
        self._shown = now
        self.standing.update()
        making = [live for live in self._live.values() if live.shard and not self.standing.has(live.shard)]
        documents = self.standing.documents + sum(live.documents for live in making)
        tokens = self.standing.tokens + sum(live.tokens for live in making)
        seconds = max(now - self._started, 1e-9)
        rate = (tokens - self._first_tokens) / seconds
        position = self.standing.bytes + self._inside()
        self._bar.update(max(position - self._bar.n, 0))
        self._bar.set_postfix_str(f"{documents:,} documents, {tokens:,} tokens, {rate:,.0f} tokens/s")
        if self._bar.disable and now - self._logged >= _REPORT_SECONDS:
            self._logged = now
            left = ""
            done = position - self._first_bytes
            if self._total and done > 0:
                left = f", about {seconds * (self._total - position) / done:,.0f} s left"
            logger.info(
                "source %r: tokenizing, %s of %s units done, %s MB, %s documents, %s tokens, %s tokens/s%s",
                self._name,
                f"{self.standing.units:,}",
                f"{len(self._sizes):,}",
                f"{position / 1e6:,.1f}",
                f"{documents:,}",
                f"{tokens:,}",
                f"{rate:,.0f}",
                left,
            )

    def close(self) -> None:
        self._bar.close()

    def _inside(self) -> int:
        """Bytes that are done of the units that this process is at, estimated."""
        texts = sum(self._measured.values())
        ratio = sum(self._sizes[unit] for unit in self._measured) / texts if texts else 1.0
        return sum(
            min(int(live.unit_text_bytes * ratio), self._sizes[live.unit])
            for live in self._live.values()
            if live.unit >= 0 and live.unit not in self.standing.finished
        )
