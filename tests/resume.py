"""Runs without a trainer: all ranks of a run in one process, and the one way to check that a resume is exact.

What a run delivers is compared row by row and token by token with what is expected at each sequence number.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tests import reference
from tests.corpora import Corpus, Sources
from tests.reference import IGNORE, Sample
from zephon_patches import build_loader
from zephon_patches.loader.loader import Loader


class Place(NamedTuple):
    """Where a run runs, and how."""

    dp: int
    local: int
    batch: int = 12
    workers: int = 0


# (place, rank) -> the loader of that rank
Build = Callable[[Place, int], Loader]


def builder(
    corpus: Corpus | Sources, *, seq_len: int = 8, infinite: bool = True, loader: dict | None = None, **config
) -> Build:
    """Builds loaders over a corpus; they share its store.

    Args:
        loader: Further arguments of ``build_loader``.
        config: Settings of ``DataConfig``.
    """

    def build(place: Place, rank: int) -> Loader:
        return build_loader(
            corpus.config(**config),
            corpus.tokenizer,
            seq_len=seq_len,
            global_batch_size=place.batch,
            local_batch_size=place.local,
            dp_rank=rank,
            dp_size=place.dp,
            num_workers=place.workers,
            infinite=infinite,
            **(loader or {}),
        )

    return build


def expected_stream(corpus: Corpus, *, seq_len: int = 8, shard_bytes: int = 0, **order) -> reference.Stream:
    """What a corpus must give, by the reference."""
    return _stream(corpus.documents, corpus.line_bytes, seq_len, shard_bytes, **order)


def _stream(
    documents: Sequence[Sequence[int]], line_bytes: Sequence[int], seq_len: int, shard_bytes: int, **order
) -> reference.Stream:
    shards = reference.cut_documents(line_bytes, shard_bytes or 2**24)
    holds = {key: order.pop(key) for key in ("packing", "positions", "mask_boundaries") if key in order}
    if holds:
        holds = {"packing": "concat", **holds}
        return reference.Stream([[documents[d] for d in shard] for shard in shards], seq_len, holds=holds, **order)
    return reference.Stream([[t for d in shard for t in documents[d]] for shard in shards], seq_len, **order)


def expected_mix(
    made: Sources, *, weights=None, stages=(), seq_len: int = 8, shard_bytes: int = 0, **order
) -> reference.Mix:
    """What several sources must give, by the reference. Weights are numbers that are read as written."""
    names = sorted(made.lengths if weights is None else weights)
    streams = [
        _stream(made.documents(name), made.line_bytes(name), seq_len, shard_bytes, name=name, **order) for name in names
    ]
    sizes = {name: stream.epoch_samples for name, stream in zip(names, streams, strict=True)}
    mixtures = [(0, sizes if weights is None else weights), *stages]
    return reference.Mix(streams, [(at, [str(of.get(name, 0)) for name in names]) for at, of in mixtures])


class Run:
    """All ranks of one run."""

    def __init__(self, build: Build, place: Place) -> None:
        self.place = place
        self.loaders = [build(place, rank) for rank in range(place.dp)]
        self.iterators: list[Any] | None = None

    @property
    def cursor(self) -> int:
        cursors = {loader.cursor for loader in self.loaders}
        assert len(cursors) == 1, f"the ranks stand at different places: {cursors}"
        return cursors.pop()

    def state(self) -> dict[str, Any]:
        """The state, after a look that each rank has the same."""
        texts = {json.dumps(loader.state_dict()) for loader in self.loaders}
        assert len(texts) == 1, f"the ranks have different states: {texts}"
        return json.loads(texts.pop())  # as another process would get it

    def load(self, state: dict[str, Any]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)

    def start(self) -> None:
        """Makes the iterators; the first step does it otherwise."""
        self.iterators = [iter(loader) for loader in self.loaders]

    def micro_step(self) -> list[list[Sample]]:
        """The rows of each rank's next micro-batch; empty lists at the end of the data, for all ranks at once."""
        if self.iterators is None:
            self.start()
        items = [next(iterator, None) for iterator in self.iterators or []]
        ended = [item is None for item in items]
        assert all(ended) or not any(ended), f"some ranks are at the end of the data, others not: {ended}"
        return [[] if item is None else rows_of(item) for item in items]

    def step_by_rank(self) -> list[list[Sample]]:
        """The real rows of each rank in one step; padding rows are checked and left out."""
        ranks: list[list[Sample]] = [[] for _ in self.loaders]
        for _ in range(self.loaders[0].micro_batches_per_step):
            for rank, rows in zip(ranks, self.micro_step(), strict=True):
                assert len(rows) in (0, self.place.local)
                rank += rows
        counted = {loader.delivered_in_step for loader in self.loaders}
        assert counted == {0}, f"after a whole step the ranks count {counted} items of the next one"
        return [without_padding(rows) for rows in ranks]

    def step(self) -> list[Sample]:
        """The global batch of one step, in order; empty at the end of the data."""
        return [row for rank in self.step_by_rank() for row in rank]


def rows_of(item: Any) -> list[Sample]:
    inputs, labels = item
    rows = [inputs["input"].tolist(), labels.tolist()]
    rows += [inputs["positions"].tolist()] if "positions" in inputs else []
    return [Sample(*map(tuple, row)) for row in zip(*rows, strict=True)]


def is_padding(row: Sample) -> bool:
    return all(label == IGNORE for label in row.labels)


def without_padding(rows: Sequence[Sample]) -> list[Sample]:
    """The real rows of a rank's step: padding rows stand behind them, and each repeats one of them."""
    real = [row for row in rows if not is_padding(row)]
    assert all(is_padding(row) for row in rows[len(real) :]), "a padding row stands before a real one"
    if real:
        seen = {row.inputs for row in real}
        assert all(row.inputs in seen for row in rows), "a padding row is none of the rank's own rows"
    return real


def uninterrupted(build: Build, steps: int, batch: int = 12) -> list[Sample]:
    """What a run on one rank without workers gives, by sequence number."""
    run = Run(build, Place(1, batch, batch))
    return [row for _ in range(steps) for row in run.step()]


def check_steps(run: Run, expected: Sequence[Sample] | reference.Stream, steps: int) -> None:
    """Takes steps and compares each with what is expected from its cursor on."""
    for _ in range(steps):
        cursor = run.cursor
        rows = run.step()
        assert len(rows) == run.place.batch, f"the step at {cursor} has {len(rows)} rows, not {run.place.batch}"
        for n, row in enumerate(rows, start=cursor):
            assert row == expected[n], f"{run.place}: number {n} (step at {cursor}): {row} instead of {expected[n]}"
        assert run.cursor == cursor + len(rows)


def check_every_stop(
    build: Build, first: Place, others: Sequence[Place], steps: int, run_class: type[Run] = Run
) -> None:
    """Stops a run at every step, goes on elsewhere, and compares the whole rest with an uninterrupted run.

    Args:
        build: Builds the loaders.
        first: Where the run starts; all places have its global batch.
        others: Where it goes on, one after the other in turn.
        steps: Length of the run.
        run_class: A run, or one with a fault to be found.
    """
    expected = uninterrupted(build, steps, first.batch)
    run = run_class(build, first)
    for stop in range(steps + 1):
        state = run.state()
        assert state["cursor"] == stop * first.batch
        resumed = run_class(build, others[stop % len(others)])
        resumed.load(state)
        assert resumed.state() == state
        check_steps(resumed, expected, steps - stop)
        if stop < steps:
            check_steps(run, expected, 1)


def check_chain(
    build: Build,
    links: Iterable[tuple[Place, int]],
    expected: Sequence[Sample] | reference.Stream,
    cursor: int = 0,
    run_class: type[Run] = Run,
) -> int:
    """Runs some steps in each place, each resumed from the one before; returns the last cursor."""
    state = None
    for place, steps in links:
        run = run_class(build, place)
        if state is None and cursor:
            state = {**run.state(), "cursor": cursor}
        if state is not None:
            run.load(state)
        check_steps(run, expected, steps)
        state = run.state()
        cursor += steps * place.batch
        assert state["cursor"] == cursor
    return cursor
