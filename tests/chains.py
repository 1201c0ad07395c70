"""Random chains of all that happens to a run, in one process, compared with the reference item by item.

A chain is planned from its seed alone: data and order, then actions as plain values, each of which makes sense wherever
it stands. So a chain that fails is made small by leaving actions out, and is repeated by its seed::

    PYTHONPATH=. python -m tests.chains 1234                       that chain
    PYTHONPATH=. python -m tests.chains --count 2000 [--first 0]   many; the first seed is drawn if none is given

All loaders of a run stand in this process. What they give is compared for each rank, micro-batch and row, inputs and
labels, and the cursor after each item. Stores are made once.
"""

import argparse
import json
import random
import secrets
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests import reference
from tests.corpora import D60, Sources, make_sources, words, write_tokenizer
from tests.reference import IGNORE, Mixture
from tests.resume import Build, Run, builder, expected_mix
from zephon_patches.errors import StateError
from zephon_patches.loader import plan as loader_plan

# 43, 25 and 3 samples at seq_len 8: the last two wrap early, the smallest within a step.
LENGTHS = {"web": D60[:31], "code": [9] * 20, "a": [5, 5, 9]}
NAMES = list(LENGTHS)

# Further packings come here, and into the samples of ``reference.Stream``.
PACKINGS = ("concat",)

METHODS = ("fork", "spawn", "forkserver")
SHORT_BLOCK = 20  # numbers are located in short blocks, so that short runs cross many of them
HANG = 600  # seconds of one chain, which takes a fraction of one

DAMAGES = ("cursor", "order", "seed", "seq_len", "tokenizer", "edited", "end")


class Data(NamedTuple):
    """What stays the same over a chain."""

    packing: str
    seq_len: int
    order: dict[str, int]
    weights: dict[str, float] | None  # None: by size
    epochs: int  # 0: without end
    method: str


class Way(NamedTuple):
    """Where a run runs, and how: a place that also says how its workers read ahead."""

    dp: int
    local: int
    batch: int
    workers: int = 0
    prefetch: int | None = None
    persistent: bool = False


class Steps(NamedTuple):
    """Goes on until so many steps have ended."""

    count: int


class Items(NamedTuple):
    """Goes on by so many micro-batches, into the middle of a step."""

    count: int


class Save(NamedTuple):
    """Keeps a checkpoint; in the middle of a step it is that of the step's start."""


class Restart(NamedTuple):
    """Makes new iterators."""


class Load(NamedTuple):
    """Loads a checkpoint into the loaders as they run; refused if what it has consumed is no longer so."""

    back: int


class Offer(NamedTuple):
    """Loads what must be refused."""

    damage: str
    choice: int


class Resume(NamedTuple):
    """Drops everything and goes on elsewhere from a checkpoint, perhaps with more to come or to skip beyond it."""

    back: int
    way: Way
    stage: tuple[int, dict[str, float]] | None  # numbers behind the cursor, weights
    skip: tuple[int, int] | None  # numbers behind the cursor, length
    forget: bool  # leaves out the stages and skips that are not consumed


Action = Steps | Items | Save | Restart | Load | Offer | Resume


class Chain(NamedTuple):
    data: Data
    actions: list[Action]


# --- planning ---


def plan_chain(seed: int, method: str = "") -> Chain:
    """The chain of a seed.

    Args:
        seed: Fixes everything.
        method: How workers start; drawn if empty, and then seldom another one than fork, since those take seconds.
    """
    draw = random.Random(seed)
    kind = draw.choice(["sizes", "end", "weights", "weights", "one"])
    weights = None
    if kind == "one":
        weights = {**dict.fromkeys(NAMES, 0.0), draw.choice(NAMES): 1.0}
    elif kind == "weights":
        weights = _weights(draw)
    drawn_method = draw.choices(METHODS, [196, 2, 2])[0]
    data = Data(
        packing=draw.choice(PACKINGS),
        seq_len=draw.choice([8, 8, 5]),
        order={
            "shard_bytes": draw.choice([0, 150, 700]),
            "shuffle_shards": draw.choice([0, 1, 2, 256]),
            "seed": draw.choice([0, 1, 2**63 - 1]),
        },
        weights=weights,
        epochs=draw.choice([1, 2, 5]) if kind == "end" else 0,
        method=method or drawn_method,
    )
    slow = data.method != "fork"
    actions: list[Action] = [_resume(draw, data, slow)]
    for _ in range(draw.randint(4, 18)):
        actions.append(_action(draw, data, slow))
        if isinstance(actions[-1], Resume) and actions[-1].back and draw.random() < 0.5:
            actions.append(Load(0))  # of what came after the place that the run went back to
    return Chain(data, actions)


def _action(draw: random.Random, data: Data, slow: bool) -> Action:
    kind = draw.choices([Steps, Items, Save, Restart, Load, Offer, Resume], [5, 5, 5, 1, 3, 2, 1 if slow else 4], k=1)[
        0
    ]
    if kind is Steps:
        return Steps(draw.randint(1, 4))
    if kind is Items:
        return Items(draw.randint(1, 5))
    if kind is Load:
        return Load(_back(draw))
    if kind is Offer:
        return Offer(draw.choice(DAMAGES), draw.randrange(1000))
    if kind is Resume:
        return _resume(draw, data, slow)
    return kind()


def _back(draw: random.Random) -> int:
    """Which checkpoint, counted from the newest."""
    return draw.choice([0, 0, 0, 1, 2, 5])


def _resume(draw: random.Random, data: Data, slow: bool) -> Resume:
    batch = draw.choice([1, 2, 3, 7, 8, 12, 12, 12, 24, 30])
    dp = draw.randint(1, min(batch, 2 if slow else 6))
    workers = draw.choices([0, 1, 2], [0, 1, 0] if slow else [10, 1, 1])[0]
    return Resume(
        back=_back(draw),
        way=Way(
            dp,
            draw.choice([1, 1, 2, draw.randint(1, batch // dp + 2)]),
            batch,
            workers,
            draw.choice([None, 1, 4]) if workers else None,
            bool(workers) and draw.random() < 0.5,
        ),
        stage=(draw.choice([0, 0, 1, 5, 30]), _weights(draw)) if not data.epochs and draw.random() < 0.4 else None,
        skip=(draw.choice([0, 0, 1, 5, 30]), draw.choice([1, 4, 12, 40])) if draw.random() < 0.4 else None,
        forget=draw.random() < 0.2,
    )


def _weights(draw: random.Random) -> dict[str, float]:
    while True:
        weights = {name: draw.choice([0, 1, 2, 3, 0.1, 0.7, 1e-6, 12.5]) for name in NAMES}
        if any(weights.values()):
            return weights


# --- the data ---


class World:
    """The sources, and two that are like them: with another tokenizer, and with an edited file in each source."""

    def __init__(self, folder: Path) -> None:
        self.made = make_sources(folder / "made", **LENGTHS)
        self.tokenizer = make_sources(folder / "tokenizer", **LENGTHS)
        write_tokenizer(self.tokenizer.tokenizer, self.tokenizer.all_lengths, first_id=1000)
        self.edited = make_sources(folder / "edited", **LENGTHS)
        for name, lengths in LENGTHS.items():
            path = self.edited.texts(name) / "0.jsonl"
            lines = path.read_text().splitlines(keepends=True)
            first = " ".join(words(self.edited.first(name), lengths[0]))
            backwards = " ".join(first.split()[::-1])
            assert first in lines[0] and first != backwards
            path.write_text("".join([lines[0].replace(first, backwards), *lines[1:]]))


@cache
def the_world() -> World:
    _FOLDER.append(tempfile.TemporaryDirectory(prefix="chains"))
    return World(Path(_FOLDER[0].name))


_FOLDER: list[tempfile.TemporaryDirectory] = []  # removed at exit


@cache
def _sizes(shard_bytes: int, seq_len: int) -> dict[str, float]:
    made = the_world().made
    sizes = {}
    for name in NAMES:
        sizes[name] = expected_mix(made, weights={name: 1}, shard_bytes=shard_bytes, seq_len=seq_len).epoch_samples
    return sizes


# --- driving ---


@dataclass(frozen=True)
class Checkpoint:
    state: dict[str, Any]
    mixture: Mixture

    @property
    def cursor(self) -> int:
        return self.state["cursor"]


class Driver:
    """A run, and the simplest picture of it: a cursor, what was taken of the step there, and the checkpoints."""

    def __init__(self, data: Data, counts: Counter | None = None) -> None:
        self.data = data
        self.counts = Counter() if counts is None else counts
        sizes = _sizes(data.order["shard_bytes"], data.seq_len)
        self.mixture = Mixture(((0, sizes if data.weights is None else data.weights),))
        self.end = int(data.epochs * sum(sizes.values())) or None
        self.checkpoints: list[Checkpoint] = []
        self.run: Run | None = None
        self.cursor = self.taken = 0

    def do(self, action: Action) -> None:
        self.counts[type(action).__name__ + (", in mid-step" if self.taken else "")] += 1
        match action:
            case Resume():
                self._resume(action)
            case _ if self.run is None:
                return  # its first action was left out
            case Steps(count):
                for _ in range(count):
                    while self._item() and self.taken:
                        pass
            case Items(count):
                for _ in range(count):
                    self._item()
            case Save():
                self._save()
            case Restart():
                self._restart()
            case Load(back):
                self._load(back)
            case Offer():
                self._refused(self._damaged(action), action)

    def _build(self, made: Sources, data: Data, way: Way, mixture: Mixture) -> Build:
        reading = {
            "prefetch_factor": way.prefetch,
            "persistent_workers": way.persistent,
            "multiprocessing_context": data.method if way.workers else None,
        }
        return builder(
            made,
            seq_len=data.seq_len,
            loader=reading,
            weights=data.weights,
            stages=mixture.stages[1:],
            skip=list(mixture.skip),
            epochs=data.epochs,
            **data.order,
        )

    def _resume(self, action: Resume) -> None:
        self.run = None  # the crash: its workers go with it
        saved = self._checkpoint(action.back)
        cursor = saved.cursor if saved else 0
        mixture = self.mixture
        if saved and not reference.same_until(cursor, saved.mixture, mixture):
            mixture = saved.mixture
        if action.forget:
            mixture = mixture.until(cursor)
        if action.stage:
            at = max(cursor + action.stage[0], mixture.stages[-1][0] + 1)
            mixture = mixture._replace(stages=(*mixture.stages, (at, action.stage[1])))
        if action.skip:
            start = cursor + action.skip[0]
            mixture = mixture._replace(skip=(*mixture.skip, (start, start + action.skip[1])))
        self.mixture, self.way = mixture, action.way
        self.expected = expected_mix(
            the_world().made,
            weights=self.data.weights,
            stages=mixture.stages[1:],
            seq_len=self.data.seq_len,
            **self.data.order,
        )
        self.run = Run(self._build(the_world().made, self.data, action.way, mixture), action.way)
        self._stand_at(0)
        self.counts["runs with workers"] += bool(action.way.workers)
        if saved:
            self._accepted(saved)
        else:
            self._save()

    def _checkpoint(self, back: int) -> Checkpoint | None:
        return self.checkpoints[-1 - min(back, len(self.checkpoints) - 1)] if self.checkpoints else None

    def _save(self) -> None:
        state = self.run.state()
        assert state["cursor"] == self.cursor, f"the state says {state['cursor']}, and the run is at {self.cursor}"
        self.checkpoints.append(Checkpoint(state, self.mixture))

    def _restart(self) -> None:
        self.run.start()
        self._stand_at(self.cursor)

    def _load(self, back: int) -> None:
        saved = self._checkpoint(back)
        if reference.same_until(saved.cursor, saved.mixture, self.mixture):
            if self.ended:
                self._restart()  # an iterator that has ended is over
            self._accepted(saved)
        else:
            self._refused(saved.state, "a checkpoint of another mixture")
            self.counts["refused, another mixture"] += 1

    def _accepted(self, saved: Checkpoint) -> None:
        self.run.load(saved.state)
        self._stand_at(saved.cursor)
        self.counts["loaded, mixture grown"] += saved.mixture != self.mixture
        assert self.run.state()["cursor"] == saved.cursor

    def _refused(self, state: object, what: object) -> None:
        before = self.run.state()
        for loader in self.run.loaders:
            try:
                loader.load_state_dict(state)
            except StateError:
                continue
            raise AssertionError(f"loaded although it must be refused: {what}: {state}")
        assert self.run.state() == before, f"refused, and yet the loader is another one: {what}"
        self.counts["refused"] += 1

    def _damaged(self, action: Offer) -> object:
        state = self.run.state()
        data, world = self.data, the_world()
        match action.damage:
            case "cursor":
                damaged = [-1, None, str(self.cursor), float(self.cursor), True, 2**63, [self.cursor]]
                found = [*({**state, "cursor": c} for c in damaged), {"order": state["order"]}, {}, None]
            case "order":
                order = json.loads(state["order"])
                text = state["order"]
                other = json.dumps({**order, "seed": order["seed"] + 1})
                damaged = [None, "", text[: len(text) // 2], text[:-1], other, [text], "[]", json.loads(text)]
                found = [*({**state, "order": d} for d in damaged), {"cursor": self.cursor}]
            case "end":
                return {**state, "cursor": self.end + 1 if self.end else 2**62 + 1}
            case "seed":
                return self._state_of(world.made, data._replace(order={**data.order, "seed": 77}))
            case "seq_len":
                return self._state_of(world.made, data._replace(seq_len=data.seq_len + 1))
            case "tokenizer":
                return self._state_of(world.tokenizer, data)
            case "edited":
                return self._state_of(world.edited, data)
        return found[action.choice % len(found)]

    def _state_of(self, made: Sources, data: Data) -> dict[str, Any]:
        """The state that another run would have here."""
        build = self._build(made, data, Way(1, 1, self.way.batch), self.mixture)
        return {**build(Way(1, 1, self.way.batch), 0).state_dict(), "cursor": self.cursor}

    def _stand_at(self, cursor: int) -> None:
        self.cursor, self.taken, self.ended = cursor, 0, False

    def _item(self) -> bool:
        """Takes one micro-batch of each rank and compares it; False at the end of the data."""
        dp, local, batch = self.way[:3]
        dealt, behind = reference.deal(self.cursor, batch, local, dp, self.end, self.mixture.skip)
        numbers = [n for rank in dealt for rows in rank for n in rows if n is not None]
        ranks = self.run.micro_step()
        if not numbers:
            assert not any(ranks), f"items behind the end of the data, at {self.cursor}: {ranks}"
            self.ended = True
            self.counts["ends of the data"] += 1
        for rank, rows in enumerate(ranks if numbers else ()):
            own = [n for micro_batch in dealt[rank] for n in micro_batch if n is not None]
            filling = {self.expected[n].inputs for n in own or numbers}
            wanted = dealt[rank][self.taken]
            where = f"rank {rank}, micro-batch {self.taken} of the step at {self.cursor}"
            assert len(rows) == len(wanted), f"{where}: {len(rows)} rows instead of {len(wanted)}"
            for row, n in zip(rows, wanted, strict=True):
                if n is None:
                    assert set(row.labels) == {IGNORE}, f"{where}: a padding row has labels: {row}"
                    assert row.inputs in filling, f"{where}: a padding row is none of the rank's: {row}"
                else:
                    assert row == self.expected[n], f"{where}: number {n}: {row} instead of {self.expected[n]}"
                self.counts["rows"] += 1
        if numbers:
            self.taken += 1
            if self.taken == len(dealt[0]):
                self._stand_at(behind)
        assert self.run.cursor == self.cursor, f"the cursor is {self.run.cursor} instead of {self.cursor}"
        return bool(numbers)


def drive(chain: Chain, counts: Counter | None = None) -> None:
    """Does all actions of a chain.

    Raises:
        AssertionError: The run did not do what the reference does.
    """
    driver = Driver(chain.data, counts)
    with mock.patch.object(loader_plan, "_BLOCK_ROWS", SHORT_BLOCK):
        for action in chain.actions:
            driver.do(action)
        driver.do(Steps(2))  # so that the last action has consequences


# --- checking many ---


def fault_of(chain: Chain, counts: Counter | None = None) -> str:
    """What goes wrong in a chain; empty if nothing does."""
    try:
        drive(chain, counts)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def smaller(chain: Chain) -> Chain:
    """A chain that fails with as few of the actions as leaving them out one by one can reach."""
    for number in range(len(chain.actions) - 1, -1, -1):
        left = [*chain.actions[:number], *chain.actions[number + 1 :]]
        if left and fault_of(chain._replace(actions=left)):
            chain = chain._replace(actions=left)
    return chain


def check_seed(seed: int, method: str = "", counts: Counter | None = None) -> None:
    """Drives the chain of a seed.

    Raises:
        AssertionError: It fails; the message has the seed, the command that repeats it, and the smallest chain found.
    """
    chain = plan_chain(seed, method)
    fault = fault_of(chain, counts)
    if not fault:
        return
    small = smaller(chain)
    actions = "\n  ".join(map(repr, small.actions))
    again = f"PYTHONPATH=. python -m tests.chains {seed}{f' --method {method}' if method else ''}"
    raise AssertionError(
        f"chain {seed}: {fault}\nrepeat it: {again}\nsmaller: {small.data}\n  {actions}\n  {fault_of(small)}"
    )


def check_seeds(seeds: Iterable[int], method: str = "") -> Counter:
    """Drives the chains of many seeds; returns what was done how often."""
    counts: Counter = Counter()
    for seed in seeds:
        check_seed(seed, method, counts)
        counts["chains"] += 1
    return counts


def _hangs(*_: object) -> None:
    raise TimeoutError(f"a chain takes more than {HANG} seconds")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chains", description="Drives random chains of runs.")
    parser.add_argument("seeds", type=int, nargs="*", help="chains to drive")
    parser.add_argument("--count", type=int, default=0, help="chains to drive in place of given ones")
    parser.add_argument("--first", type=int, help="seed of the first of them; drawn if not given")
    parser.add_argument("--method", default="", choices=("", *METHODS), help="how workers start; drawn if not given")
    options = parser.parse_args(arguments)
    first = secrets.randbelow(10**9) if options.first is None else options.first
    seeds = options.seeds or range(first, first + options.count)
    if options.count:
        print(f"seeds {first} to {first + options.count - 1}", flush=True)
    counts: Counter = Counter()
    failed = 0
    signal.signal(signal.SIGALRM, _hangs)
    for number, seed in enumerate(seeds, start=1):
        signal.alarm(HANG)
        try:
            counts += check_seeds([seed], options.method)
        except AssertionError as error:
            failed += 1
            print(error, flush=True)
        signal.alarm(0)
        if number % 100 == 0:
            print(f"{number} chains, {failed} failed", flush=True)
    print(f"{failed} of {len(seeds)} chains failed; {dict(sorted(counts.items()))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
