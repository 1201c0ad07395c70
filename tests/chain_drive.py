"""Does what a random chain says, and compares it with the reference item by item.

All loaders of a run stand in this process. What they give is compared for each rank, micro-batch and row: inputs,
labels and positions; and the cursor after each item. Stores are made once, but for the chains that make them anew.
"""

import json
import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from tests import reference
from tests.chain_plan import (
    NAMES,
    PACKINGS,
    TALK,
    Action,
    Chain,
    Data,
    Holds,
    Items,
    Load,
    Offer,
    Remap,
    Restart,
    Resume,
    Save,
    Steps,
    Way,
)
from tests.corpora import D60, Sources, make_sources, words, write_tokenizer
from tests.reference import IGNORE, Mixture, Sample
from tests.resume import Build, Run
from zephon_patches import DataConfig, SourceConfig, build_loader
from zephon_patches.errors import LoaderError, MappingError, StateError
from zephon_patches.loader import plan as loader_plan
from zephon_patches.loader.loader import Loader
from zephon_patches.prepare.tokenizers import TextTokenizer

# In any packing the smallest source has 2 to 5 samples, so it wraps within a step. Empty texts have but an EOS: enough
# of them in a row make a sample none of whose labels counts where boundaries are masked, and no sample where documents
# are kept whole.
LENGTHS = {
    "web": D60[:31],
    "code": [9] * 10 + [0] * 12 + [9] * 8,
    "a": [5, 0, 9],
    TALK: [2 + 5 * i % 23 for i in range(16)],
}
assert {*LENGTHS} == {*NAMES, TALK}

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} {% endgeneration %}"
    "{% else %}{{ m.content }} {% endif %}{% endfor %}"
)

SHORT_BLOCK = 20  # numbers are located in short blocks, so that short runs cross many of them


# --- the data ---


def turn_of(document: int) -> int:
    """Words of each turn of a conversation; the user has the first one, and in a short one the only one."""
    return 1 + document % 7


def conversation(document: int, length: int) -> str:
    """Its line: the words of a document, said by user and assistant in turns."""
    said, turn = words(document, length), turn_of(document)
    messages = [
        {"role": "assistant" if place // turn % 2 else "user", "content": " ".join(said[place : place + turn])}
        for place in range(0, length, turn)
    ]
    return json.dumps({"messages": messages}) + "\n"


@dataclass(frozen=True)
class Texts(Sources):
    """Sources, one of conversations, and a folder of stores."""

    cache: str = "cache"

    def documents(self, name: str) -> list[list[int]]:
        found = super().documents(name)
        return [tokens[:-1] for tokens in found] if name == TALK else found  # the template writes no EOS

    def line_bytes(self, name: str) -> list[int]:
        if name != TALK:
            return super().line_bytes(name)
        return [len(conversation(i, length)) for i, length in enumerate(self.lengths[name], start=self.first(name))]

    def counting(self, name: str) -> list[list[bool]] | None:
        """Which tokens of each conversation count."""
        if name != TALK:
            return None
        return [
            [bool(place // turn_of(i) % 2) for place in range(length)]
            for i, length in enumerate(self.lengths[name], start=self.first(name))
        ]

    def sources(self, weights: Mapping[str, float] | None = None) -> list[SourceConfig]:
        return [replace(s, chat_field="messages") if s.name == TALK else s for s in super().sources(weights)]

    def config_of(self, data: Data, mixture: Mixture, accept: str) -> DataConfig:
        in_use = replace(self, lengths={name: self.lengths[name] for name in data.names})
        config = in_use.config(
            weights=data.weights,
            stages=mixture.stages[1:],
            skip=list(mixture.skip),
            epochs=data.epochs,
            accept_change=accept,
            **data.holds._asdict(),
            **data.order,
        )
        return replace(config, cache_dir=str(self.folder / self.cache))


def make_texts(folder: Path, first_id: int = 0) -> Texts:
    made = Texts(folder, make_sources(folder, **LENGTHS).lengths)
    first = made.first(TALK)
    lines = [conversation(i, length) for i, length in enumerate(LENGTHS[TALK], start=first)]
    (made.texts(TALK) / "0.jsonl").write_text("".join(lines))
    write_tokenizer(made.tokenizer, made.all_lengths, first_id=first_id)
    (made.tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    return made


class World:
    """The sources, and two that are like them: with another tokenizer, and with an edited file in each source."""

    def __init__(self, folder: Path) -> None:
        self.made = make_texts(folder / "made")
        self.tokenizer = make_texts(folder / "tokenizer", first_id=1000)
        self.edited = make_texts(folder / "edited")
        for name in LENGTHS:
            path, counting = self.edited.texts(name) / "0.jsonl", self.edited.counting(name)
            # A conversation without a label is left out, with what is edited in it.
            edited = 0 if counting is None else [any(counts) for counts in counting].index(True)
            number = self.edited.first(name) + edited
            lines = path.read_text().splitlines(keepends=True)
            swapped = re.sub(rf"\b{number}_([01])\b", lambda word, n=number: f"{n}_{1 - int(word[1])}", lines[edited])
            assert swapped != lines[edited]
            lines[edited] = swapped
            path.write_text("".join(lines))


_FOLDER: list[tempfile.TemporaryDirectory] = []  # removed at exit


@cache
def the_world() -> World:
    _FOLDER.append(tempfile.TemporaryDirectory(prefix="chains"))
    return World(Path(_FOLDER[0].name))


@cache
def tokenizer_in(folder: Path) -> TextTokenizer:
    return TextTokenizer(folder)


def expected_of(data: Data, mixture: Mixture) -> reference.Mix:
    """All samples of a chain's data in their order, by the reference."""
    names = sorted(data.names)
    stages = [(at, [str(of.get(name, 0)) for name in names]) for at, of in mixture.stages]
    return reference.Mix(
        [_stream(name, data.holds, data.seq_len, *sorted(data.order.items())) for name in names], stages
    )


def end_of(data: Data) -> int | None:
    return data.epochs * sum(sizes_of(data).values()) or None


def weights_of(data: Data) -> dict[str, float]:
    return sizes_of(data) if data.weights is None else data.weights


def sizes_of(data: Data) -> dict[str, int]:
    """Samples of each source."""
    return {
        name: _stream(name, data.holds, data.seq_len, *sorted(data.order.items())).epoch_samples for name in data.names
    }


@cache
def _stream(name: str, holds: Holds, seq_len: int, *order: tuple[str, int]) -> reference.Stream:
    made, of = the_world().made, dict(order)
    shards = reference.cut_documents(made.line_bytes(name), of.pop("shard_bytes") or 2**24)
    documents, counting = made.documents(name), made.counting(name)
    return reference.Stream(
        [[documents[d] for d in shard] for shard in shards],
        seq_len,
        name,
        holds=holds._asdict(),
        counting=counting and [[counting[d] for d in shard] for shard in shards],
        **of,
    )


# --- a run whose ranks come and go ---


class ElasticRun(Run):
    """A run that can be dealt to another number of ranks while it goes on."""

    def __init__(self, build: Build, way: Way) -> None:
        super().__init__(build, way)
        self.build = build

    def remap(self, way: Way, shuffle: int) -> None:
        """Gives the loaders other ranks in any order; some go, or others come in."""
        state = self.state()
        ranks = [*range(max(len(self.loaders), way.dp))]
        random.Random(shuffle).shuffle(ranks)
        old = list(zip(ranks, self.loaders, self.iterators or [None] * len(self.loaders), strict=False))
        iterators = {rank: iterator for rank, _, iterator in old}
        loaders = {rank: loader for rank, loader, _ in old if rank < way.dp}
        for rank, loader in loaders.items():
            loader.remap(rank, way.dp, local_batch_size=way.local)
        for rank in set(range(way.dp)) - set(loaders):
            loaders[rank] = self.build(way, rank)
            loaders[rank].load_state_dict(state)
        self.place = way
        self.loaders = [loaders[rank] for rank in range(way.dp)]
        if self.iterators is not None:
            self.iterators = [iterators.get(rank) or iter(self.loaders[rank]) for rank in range(way.dp)]


# --- driving ---


@dataclass(frozen=True)
class Checkpoint:
    state: dict[str, Any]
    data: Data
    mixture: Mixture

    @property
    def cursor(self) -> int:
        return self.state["cursor"]


class Driver:
    """A run, and the simplest picture of it: a cursor, what was taken of the step there, and the checkpoints."""

    run: ElasticRun | None = None
    way: Way
    expected: reference.Mix

    def __init__(self, data: Data, counts: Counter | None = None) -> None:
        self.data = data
        self.counts = Counter() if counts is None else counts
        self.mixture = Mixture(((0, weights_of(data)),))
        self.made = the_world().made
        self.fresh = ExitStack()  # holds caches that are this chain's alone
        self.checkpoints: list[Checkpoint] = []
        self.methods: set[str] = set()
        self._stand_at(0)

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
                self.counts[f"offered, {action.damage}"] += 1
            case Remap():
                self._remap(action)

    def close(self) -> None:
        self.run = None
        self.fresh.close()

    def _build(self, made: Texts, data: Data, mixture: Mixture, accept: str = "") -> Build:
        config, tokenizer = made.config_of(data, mixture, accept), tokenizer_in(made.tokenizer)

        def build(way: Way, rank: int) -> Loader:
            return build_loader(
                config,
                tokenizer,
                seq_len=data.seq_len,
                global_batch_size=way.batch,
                local_batch_size=way.local,
                dp_rank=rank,
                dp_size=way.dp,
                num_workers=way.workers,
                prefetch_factor=way.prefetch,
                persistent_workers=way.persistent,
                multiprocessing_context=way.method if way.workers else None,
            )

        return build

    def _resume(self, action: Resume) -> None:
        self.run = None  # the crash: its workers go with it
        saved = self._checkpoint(action.back)
        cursor = saved.cursor if saved else 0
        mixture = self.mixture
        if saved and not self._counts_here(saved):
            self.data, mixture = saved.data, saved.mixture
        if action.forget:
            mixture = mixture.until(cursor)
        if action.stage:
            at = max(cursor + action.stage[0], mixture.stages[-1][0] + 1)
            mixture = mixture._replace(stages=(*mixture.stages, (at, action.stage[1])))
        if action.skip:
            start = cursor + action.skip[0]
            mixture = mixture._replace(skip=(*mixture.skip, (start, start + action.skip[1])))
        self.mixture, self.way = mixture, action.way
        self._change_cache(action.cache)
        self._start()
        if action.way.workers:
            self.counts["runs with workers"] += 1
            self.counts["another start method in mid-chain"] += bool(self.methods - {action.way.method})
            self.methods.add(action.way.method)
        if saved:
            self._accepted(saved)
        else:
            self._save()
        if action.holds:
            self._hold(action.holds)

    def _start(self, accept: str = "") -> None:
        self.run = None
        self.expected = expected_of(self.data, self.mixture)
        self.run = ElasticRun(self._build(self.made, self.data, self.mixture, accept), self.way)
        self._stand_at(0)

    def _hold(self, holds: Holds) -> None:
        """Goes on with samples that hold something else, by what the refusal says; then without the setting again."""
        data, state = self.data._replace(holds=holds), self.run.state()
        if data == self.data or state["cursor"] > (end_of(data) or state["cursor"]):
            return
        mixture = self.mixture._replace(stages=((0, weights_of(data)), *self.mixture.stages[1:]))
        self.data, self.mixture = data, mixture
        self._start()
        refusal = self._refused(state, "a state of other samples")
        self._start(refusal.partition('data.accept_change = "')[2].partition('"')[0])
        self.run.load(state)
        self._stand_at(state["cursor"])
        while self._item() and self.taken:
            pass
        self._save()
        self._start()
        self._accepted(self.checkpoints[-1])
        self.counts["went on with other samples"] += 1

    def _counts_here(self, saved: Checkpoint) -> bool:
        """Whether the run may go on from a checkpoint as it is."""
        return saved.data == self.data and reference.same_until(saved.cursor, saved.mixture, self.mixture)

    def _change_cache(self, change: str) -> None:
        """Nothing of what stores and plans are in is held by anyone now."""
        if change == "new":
            self.fresh.close()
            new = self.fresh.enter_context(tempfile.TemporaryDirectory(dir=self.made.folder))
            self.made = replace(self.made, cache=Path(new).name)
        elif change == "damaged" and self.data.holds.packing != "concat":
            plans = (self.made.folder / self.made.cache).glob(f"*/*/*{self.data.holds.packing}-{self.data.seq_len}*")
            for number, path in enumerate(sorted(plans)):
                if number % 3 == 0:
                    path.unlink()
                elif number % 3 == 1:
                    path.write_bytes(path.read_bytes()[:-1])
        self.counts[f"cache {change}"] += bool(change)

    def _checkpoint(self, back: int) -> Checkpoint | None:
        return self.checkpoints[-1 - min(back, len(self.checkpoints) - 1)] if self.checkpoints else None

    def _save(self) -> None:
        state = self.run.state()
        assert state["cursor"] == self.cursor, f"the state says {state['cursor']}, and the run is at {self.cursor}"
        self.checkpoints.append(Checkpoint(state, self.data, self.mixture))

    def _restart(self) -> None:
        self.run.start()
        self._stand_at(self.cursor)

    def _load(self, back: int) -> None:
        saved = self._checkpoint(back)
        if self._counts_here(saved):
            if self.ended:
                self._restart()  # an iterator that has ended is over
            self._accepted(saved)
        else:
            self._refused(saved.state, "a checkpoint of another order")
            self.counts["refused, another mixture" if saved.data == self.data else "refused, other samples"] += 1

    def _accepted(self, saved: Checkpoint) -> None:
        self.run.load(saved.state)
        self._stand_at(saved.cursor)
        self.counts["loaded, mixture grown"] += saved.mixture != self.mixture
        assert self.run.state()["cursor"] == saved.cursor

    def _remap(self, action: Remap) -> None:
        way = self.way._replace(dp=action.dp, local=action.local or self.way.local)
        before = self.run.state()
        if self.taken:
            self._refused_remap(way, LoaderError)
            if action.anew:  # as the refusal says
                for loader in self.run.loaders:
                    loader.seek(loader.cursor)
                self._stand_at(self.cursor)
                self.counts["step begun anew"] += 1
        if not self.taken and way.dp > way.batch:
            self._refused_remap(way, MappingError)
        elif not self.taken:
            self.counts[f"remap to {'more' if way.dp > self.way.dp else 'fewer or as many'} ranks"] += 1
            self.counts["remap of workers"] += bool(way.workers)
            self.run.remap(way, action.shuffle)
            self.way = way
            if self.ended:
                self._restart()
        assert self.run.state() == before, f"the state is another one after {action}"

    def _refused_remap(self, way: Way, error: type[Exception]) -> None:
        for loader in self.run.loaders:
            try:
                loader.remap(0, way.dp, local_batch_size=way.local)
            except error:
                continue
            raise AssertionError(
                f"remapped from {self.way} to {way}, although it must be refused by a {error.__name__}"
            )
        self.counts["refused, remap"] += 1

    def _refused(self, state: object, what: object) -> str:
        """Offers a state to each loader; returns what the last one says."""
        before = self.run.state()
        for loader in self.run.loaders:
            try:
                loader.load_state_dict(state)
            except StateError as error:
                said = str(error)
                continue
            raise AssertionError(f"loaded although it must be refused: {what}: {state}")
        assert self.run.state() == before, f"refused, and yet the loader is another one: {what}"
        self.counts["refused"] += 1
        return said

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
                return {**state, "cursor": (end_of(data) or 2**62) + 1}
            case "seed":
                return self._state_of(self.made, data._replace(order={**data.order, "seed": 77}))
            case "seq_len":
                return self._state_of(self.made, data._replace(seq_len=data.seq_len + 1))
            case "tokenizer":
                return self._state_of(world.tokenizer, data)
            case "edited":
                return self._state_of(world.edited, data)
            case "packing":
                others = [packing for packing in PACKINGS if packing != data.holds.packing]
                if TALK in data.names:
                    others.remove("concat")
                other = others[action.choice % len(others)]
                return self._state_of_other(packing=other, mask_boundaries=False)
            case "boundaries" if data.holds.packing == "concat":
                return self._state_of_other(mask_boundaries=not data.holds.mask_boundaries)
            case "positions" | "boundaries":
                return self._state_of_other(positions=not data.holds.positions)
        return found[action.choice % len(found)]

    def _state_of_other(self, **holds: object) -> dict[str, Any]:
        """The state that a run with samples that hold something else would have here."""
        return self._state_of(self.made, self.data._replace(holds=self.data.holds._replace(**holds)))

    def _state_of(self, made: Texts, data: Data) -> dict[str, Any]:
        """The state that another run would have here."""
        way = Way(1, 1, self.way.batch)
        return {**self._build(made, data, self.mixture)(way, 0).state_dict(), "cursor": self.cursor}

    def _stand_at(self, cursor: int) -> None:
        self.cursor, self.taken, self.ended = cursor, 0, False

    def _item(self) -> bool:
        """Takes one micro-batch of each rank and compares it; False at the end of the data."""
        dp, local, batch = self.way[:3]
        dealt, behind = reference.deal(self.cursor, batch, local, dp, end_of(self.data), self.mixture.skip)
        numbers = [n for rank in dealt for rows in rank for n in rows if n is not None]
        ranks = self.run.micro_step()
        assert len(ranks) == dp
        if not numbers:
            assert not any(ranks), f"items behind the end of the data, at {self.cursor}: {ranks}"
            self.ended = True
            self.counts["ends of the data"] += 1
        for rank, rows in enumerate(ranks if numbers else ()):
            where = f"rank {rank}, micro-batch {self.taken} of the step at {self.cursor}"
            self._compare(rows, dealt[rank], numbers, where)
        if numbers:
            self.taken += 1
            if self.taken == len(dealt[0]):
                self._end_step(dealt, behind)
        assert self.run.cursor == self.cursor, f"the cursor is {self.run.cursor} instead of {self.cursor}"
        return bool(numbers)

    def _compare(
        self, rows: Sequence[Sample], dealt: Sequence[Sequence[int | None]], numbers: Sequence[int], where: str
    ) -> None:
        own = [n for micro_batch in dealt for n in micro_batch if n is not None]
        filling = {self.expected[n]._replace(labels=()) for n in own or numbers}
        wanted = dealt[self.taken]
        assert len(rows) == len(wanted), f"{where}: {len(rows)} rows instead of {len(wanted)}"
        for row, n in zip(rows, wanted, strict=True):
            if n is None:
                assert set(row.labels) == {IGNORE}, f"{where}: a padding row has labels: {row}"
                assert row._replace(labels=()) in filling, f"{where}: a padding row is none of the rank's: {row}"
            else:
                assert row == self.expected[n], f"{where}: number {n}: {row} instead of {self.expected[n]}"
                self.counts["rows without a label"] += set(row.labels) == {IGNORE}
            self.counts["rows"] += 1

    def _end_step(self, dealt: Sequence[Sequence[Sequence[int | None]]], behind: int) -> None:
        for loader, rank in zip(self.run.loaders, dealt, strict=True):
            labels = {label for rows in rank for n in rows if n is not None for label in self.expected[n].labels}
            wanted = bool(labels - {IGNORE})
            assert loader.has_labels_in_last_step == wanted, (
                f"rank {rank} of the step at {self.cursor}: labels {wanted}"
            )
        self._stand_at(behind)


def drive(chain: Chain, counts: Counter | None = None) -> None:
    """Does all actions of a chain.

    Raises:
        AssertionError: The run did not do what the reference does.
    """
    driver = Driver(chain.data, counts)
    # A crash of the machine is not among what happens here, and syncing takes longer than all the rest of a build.
    with mock.patch.object(loader_plan, "_BLOCK_ROWS", SHORT_BLOCK), mock.patch.object(os, "fsync", lambda file: None):
        try:
            for action in chain.actions:
                driver.do(action)
            driver.do(Steps(2))  # so that the last action has consequences
        finally:
            driver.close()
    driver.counts[f"chains, {chain.data.holds.packing}"] += 1
    driver.counts["chains with conversations"] += TALK in chain.data.names
    driver.counts["chains with masked boundaries"] += chain.data.holds.mask_boundaries
    driver.counts["chains with positions"] += chain.data.holds.positions
