"""What happens in a random chain of runs, as plain values drawn from a seed; ``tests/chains.py`` has the command.

Each action makes sense wherever it stands, so a chain that fails is made small by leaving actions out.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

NAMES = ("web", "code", "a")
TALK = "talk"  # conversations, of which only a part counts in the loss; they go with packings that keep documents whole

METHODS = ("fork", "spawn", "forkserver")
PACKINGS = ("concat", "best_fit", "document")
DAMAGES = ("cursor", "order", "seed", "seq_len", "tokenizer", "edited", "end", "packing", "positions", "boundaries")
WEIGHTS = (0, 1, 2, 3, 0.1, 0.7, 1e-6, 12.5)

SLOW = 0.01  # share of resumes whose workers start in another way than by fork, which takes seconds
SLOW_DP = 2


class Holds(NamedTuple):
    """What samples hold."""

    packing: str
    positions: bool
    mask_boundaries: bool


class Data(NamedTuple):
    """What stays the same over a chain, but for what samples hold."""

    holds: Holds
    names: tuple[str, ...]
    seq_len: int
    order: dict[str, int]
    weights: dict[str, float] | None  # None: by size
    epochs: int  # 0: without end


class Way(NamedTuple):
    """Where a run runs, and how: a place that also says how its workers start and read ahead."""

    dp: int
    local: int
    batch: int
    workers: int = 0
    prefetch: int | None = None
    persistent: bool = False
    method: str = "fork"


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


class Remap(NamedTuple):
    """Deals the running loaders to another number of ranks; refused in the middle of a step, and beyond the batch."""

    dp: int
    local: int | None  # None leaves it
    shuffle: int  # seed of who gets which rank, who goes and who comes in
    anew: bool  # in the middle of a step: begins it anew and then does so


class Resume(NamedTuple):
    """Drops everything and goes on elsewhere from a checkpoint, perhaps with more to come or to skip beyond it."""

    back: int
    way: Way
    stage: tuple[int, dict[str, float]] | None  # numbers behind the cursor, weights
    skip: tuple[int, int] | None  # numbers behind the cursor, length
    forget: bool  # leaves out the stages and skips that are not consumed
    cache: str  # "": as it was, "new": an empty one, "damaged": some plans are lost
    holds: Holds | None  # goes on with samples that hold something else, as data.accept_change allows


Action = Steps | Items | Save | Restart | Load | Offer | Remap | Resume

KINDS = {Steps: 5, Items: 5, Save: 5, Restart: 2, Load: 3, Offer: 2, Remap: 3, Resume: 4}


class Chain(NamedTuple):
    data: Data
    actions: list[Action]


def plan_chain(seed: int, methods: Sequence[str] = ()) -> Chain:
    """The chain of a seed.

    Args:
        seed: Fixes everything.
        methods: How workers start, drawn anew for each resume; if empty, all ways, seldom another one than fork.
    """
    draw = random.Random(seed)
    holds = _holds(draw, NAMES)
    names = NAMES if holds.packing == "concat" or draw.random() < 0.5 else (*NAMES, TALK)
    kind = draw.choice(["sizes", "end", "weights", "weights", "one"])
    weights = None
    if kind == "one":
        weights = {**dict.fromkeys(names, 0.0), draw.choice(names): 1.0}
    elif kind == "weights":
        weights = _weights(draw, names)
    data = Data(
        holds=holds,
        names=names,
        seq_len=draw.choice([8, 8, 5]),
        order={
            "shard_bytes": draw.choice([0, 150, 700]),
            "shuffle_shards": draw.choice([0, 1, 2, 256]),
            "seed": draw.choice([0, 1, 2**63 - 1]),
        },
        weights=weights,
        epochs=draw.choice([1, 2, 5]) if kind == "end" else 0,
    )
    actions: list[Action] = [_resume(draw, data, methods)]
    way = actions[0].way
    for _ in range(draw.randint(4, 18)):
        actions.append(_action(draw, data, methods, way))
        if isinstance(actions[-1], Resume):
            way = actions[-1].way
            if actions[-1].back and draw.random() < 0.5:
                actions.append(Load(0))  # of what came after the place that the run went back to
    return Chain(data, actions)


def _action(draw: random.Random, data: Data, methods: Sequence[str], way: Way) -> Action:
    kind = draw.choices([*KINDS], [*KINDS.values()])[0]
    if kind is Steps:
        return Steps(draw.randint(1, 12 if data.epochs else 4))  # so that many come to the end
    if kind is Items:
        return Items(draw.randint(1, 5))
    if kind is Load:
        return Load(_back(draw))
    if kind is Offer:
        return Offer(draw.choice(DAMAGES), draw.randrange(1000))
    if kind is Remap:
        most = way.batch if way.method == "fork" else SLOW_DP
        dp = way.batch + 1 if draw.random() < 0.1 else draw.randint(1, min(most, 6))
        return Remap(
            dp,
            draw.choice([None, 1, 2, draw.randint(1, way.batch // dp + 2)]),
            draw.randrange(1000),
            draw.random() < 0.5,
        )
    if kind is Resume:
        return _resume(draw, data, methods)
    return kind()


def _back(draw: random.Random) -> int:
    """Which checkpoint, counted from the newest."""
    return draw.choice([0, 0, 0, 1, 2, 5])


def _resume(draw: random.Random, data: Data, methods: Sequence[str]) -> Resume:
    drawn = draw.choices(METHODS, [1 - SLOW, SLOW / 2, SLOW / 2])[0]
    method = draw.choice(methods) if methods else drawn
    slow = method != "fork"
    batch = draw.choice([1, 2, 3, 7, 8, 12, 12, 12, 24, 30])
    dp = draw.randint(1, min(batch, SLOW_DP if slow else 6))
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
            method,
        ),
        stage=(draw.choice([0, 0, 1, 5, 30]), _weights(draw, data.names))
        if not data.epochs and draw.random() < 0.4
        else None,
        skip=(draw.choice([0, 0, 1, 5, 30]), draw.choice([1, 4, 12, 40])) if draw.random() < 0.4 else None,
        forget=draw.random() < 0.2,
        cache=draw.choices(["", "new", "damaged"], [17, 1, 2])[0],
        holds=_holds(draw, data.names) if draw.random() < 0.1 and not slow else None,
    )


def _holds(draw: random.Random, names: Sequence[str]) -> Holds:
    packing = draw.choice([packing for packing in PACKINGS if packing != "concat" or TALK not in names])
    return Holds(packing, draw.random() < 0.5, packing == "concat" and draw.random() < 0.5)


def _weights(draw: random.Random, names: Sequence[str]) -> dict[str, float]:
    while True:
        weights = {name: draw.choice(WEIGHTS) for name in names}
        if any(weights.values()):
            return weights
