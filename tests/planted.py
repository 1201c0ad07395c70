"""Faults to be planted into the product, each of which the random chains must find.

A fault is a function that plants it with pytest's ``monkeypatch``, and a look at a chain's plan that says whether the
chain goes where the fault can show: so few chains have to be driven.
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.chain_plan import TALK, Action, Chain, Items, Load, Offer, Remap, Resume, Steps, plan_chain
from tests.reference import IGNORE
from zephon_patches import mapping
from zephon_patches.loader import state
from zephon_patches.loader.collate import MicroBatchReader
from zephon_patches.loader.loader import Loader
from zephon_patches.loader.workers import ItemReader
from zephon_patches.store.reader import TokenStore

FORK = ("fork",)
MOST_ACTIONS = 9

Look = Callable[[Chain], bool]
Which = Callable[[Action], bool]


class Fault(NamedTuple):
    plant: Callable[[pytest.MonkeyPatch], None]
    can_show: Look

    def seeds(self) -> Iterator[int]:
        """Of short chains in which it can show."""
        chains = ((seed, plan_chain(seed, FORK)) for seed in count())
        return (seed for seed, chain in chains if len(chain.actions) <= MOST_ACTIONS and self.can_show(chain))


def anywhere(chain: Chain) -> bool:
    return True


def in_a_run(*wanted: Which) -> Look:
    """Chains with a resume that is the first one wanted, and behind it the others in their order before the next."""

    def found(chain: Chain) -> bool:
        left: list[Which] = []
        for action in chain.actions:
            if isinstance(action, Resume):
                left = [*wanted]
            if left and left[0](action):
                left.pop(0)
                if not left:
                    return True
        return False

    return found


def resumes(action: Action) -> bool:
    return isinstance(action, Resume)


def reads_ahead(action: Action) -> bool:
    return isinstance(action, Resume) and 0 < action.way.workers * action.way.dp <= 2


def takes_many_rows(action: Action) -> bool:
    return isinstance(action, Resume) and action.way.local > 2


def takes_many_items(action: Action) -> bool:
    return isinstance(action, Resume) and action.way.batch > 3 * action.way.dp * action.way.local


def goes_on(action: Action) -> bool:
    return isinstance(action, Steps | Items)


def loads(action: Action) -> bool:
    return isinstance(action, Load)


def remaps(action: Action) -> bool:
    return isinstance(action, Remap)


def offers(*damages: str) -> Which:
    return lambda action: isinstance(action, Offer) and (not damages or action.damage in damages)


HELD = ("positions", "mask_boundaries")


# --- the cursor ---


def counted_one_too_far(monkeypatch):
    real = mapping.step_at

    def step_at(*given):
        size, behind = real(*given)
        return size, behind + 1

    monkeypatch.setattr(mapping, "step_at", step_at)


def read_one_too_far_after_a_load(monkeypatch):
    """The cursor that is told stays right."""
    real = Loader._plan

    def plan(self):
        if not self.restored:
            return real(self)
        self._cursor += 1
        try:
            return real(self)
        finally:
            self._cursor -= 1

    monkeypatch.setattr(Loader, "_plan", plan)


# --- prefetch ---


def moves_unseen(monkeypatch, name: str) -> None:
    """A running iterator goes on with what workers fetched for the old place."""
    make, move = ItemReader.__init__, getattr(Loader, name)

    def made(self, reader, delivery):
        make(self, reader, delivery)
        self.reads_ahead = delivery.num_workers > 0

    def moved(self, *given, **more):
        moves = self._moves
        move(self, *given, **more)
        if self._items.reads_ahead:
            self._moves = moves

    monkeypatch.setattr(ItemReader, "__init__", made)
    monkeypatch.setattr(Loader, name, moved)


def stale_prefetch(monkeypatch):
    moves_unseen(monkeypatch, "seek")


def stale_prefetch_after_a_remap(monkeypatch):
    moves_unseen(monkeypatch, "remap")


# --- ranks ---


def ranks_swapped(monkeypatch):
    real = mapping.part_of_rank

    def part(size, topology):
        rank, dp = topology
        return real(size, mapping.Topology(1 - rank if rank < 2 <= dp else rank, dp))

    monkeypatch.setattr(mapping, "part_of_rank", part)


def remapped_in_mid_step(monkeypatch):
    real = Loader.remap

    def remap(self, *given, **more):
        self._delivered = 0
        real(self, *given, **more)

    monkeypatch.setattr(Loader, "remap", remap)


def rows_as_before_the_remap(monkeypatch):
    """The rank is another one, and its micro-batches are as large as they were."""
    real = Loader.remap
    monkeypatch.setattr(Loader, "remap", lambda self, *given, **more: real(self, *given))


# --- states ---


def accepted_all(monkeypatch):
    monkeypatch.setattr("zephon_patches.loader.loader.check_order", lambda *given: [])


def positions_and_boundaries_not_compared(monkeypatch):
    real = state.check_order

    def check(saved, present, *given):
        kept = {key: value for key, value in saved.items() if key not in HELD}
        return real({**kept, **{key: present[key] for key in HELD if key in present}}, present, *given)

    monkeypatch.setattr("zephon_patches.loader.loader.check_order", check)


def moved_before_refused(monkeypatch):
    real = Loader.load_state_dict

    def load(self, given):
        if isinstance(given, dict) and type(given.get("cursor")) is int and 0 <= given["cursor"] < 2**62:
            self._delivered = 0
            self._moves += 1  # starts the step anew
        real(self, given)

    monkeypatch.setattr(Loader, "load_state_dict", load)


# --- what samples hold ---


def changed_items(monkeypatch, change: Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]) -> None:
    """Changes each item that is read; the function gets inputs and labels, and gives labels."""
    real = MicroBatchReader.read

    def read(self, rows, *empty):
        inputs, labels = real(self, rows, *empty)
        changed = change(inputs, labels)
        if not empty or changed is labels:
            return inputs, changed
        labels = torch.from_numpy(empty[0](changed.shape))  # where a worker's items lie
        return inputs, labels.copy_(changed)

    monkeypatch.setattr(MicroBatchReader, "read", read)
    monkeypatch.setattr(MicroBatchReader, "row_words", property(lambda self: 4 * self.seq_len + 1))


def positions_not_reset(monkeypatch):
    def change(inputs, labels):
        if "positions" in inputs:
            inputs["positions"][:] = torch.arange(labels.shape[1])
        return labels

    changed_items(monkeypatch, change)


def masks_of_the_rows_before(monkeypatch):
    """Rows without padding get each other's masked labels too."""

    def change(inputs, labels):
        whole = labels[:, -1] != IGNORE
        labels = labels.clone()
        labels[whole] = labels[whole].masked_fill((labels[whole] == IGNORE).roll(1, 0), IGNORE)
        return labels

    changed_items(monkeypatch, change)


def answers_a_token_late(monkeypatch):
    real = TokenStore.mask

    def mask(self, shard):
        found = real(self, shard)
        return None if found is None else np.roll(found, 1)

    monkeypatch.setattr(TokenStore, "mask", mask)


def padding_counts(monkeypatch):
    """A place behind the last document of a row has a label."""

    def change(inputs, labels):
        short = (labels[:, -1] == IGNORE) & (labels != IGNORE).any(1)
        labels = labels.clone()
        labels[short, -1] = inputs["input"][short, -1]
        return labels

    changed_items(monkeypatch, change)


FAULTS = [
    Fault(counted_one_too_far, anywhere),
    Fault(read_one_too_far_after_a_load, in_a_run(resumes, goes_on, loads)),
    Fault(stale_prefetch, in_a_run(reads_ahead, goes_on, loads)),
    Fault(stale_prefetch_after_a_remap, in_a_run(reads_ahead, goes_on, remaps)),
    Fault(ranks_swapped, anywhere),
    Fault(remapped_in_mid_step, in_a_run(takes_many_items, goes_on, remaps)),
    Fault(rows_as_before_the_remap, in_a_run(resumes, remaps)),
    Fault(accepted_all, in_a_run(resumes, offers("seed", "seq_len", "tokenizer", "edited", "packing"))),
    Fault(positions_and_boundaries_not_compared, in_a_run(resumes, offers("positions", "boundaries"))),
    Fault(moved_before_refused, in_a_run(takes_many_items, goes_on, offers())),
    Fault(positions_not_reset, lambda chain: chain.data.holds.positions),
    Fault(
        masks_of_the_rows_before, lambda chain: chain.data.holds.mask_boundaries and in_a_run(takes_many_rows)(chain)
    ),
    Fault(answers_a_token_late, lambda chain: TALK in chain.data.names),
    Fault(padding_counts, anywhere),
]
