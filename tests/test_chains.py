"""Random chains of runs: some at every start of the tests, many by their own command, and proof that faults are seen.

    scripts/test.sh -m slow -s tests/test_chains.py       2,000 chains whose seeds are new each time, and printed

A chain that fails prints its seed and the command that repeats it; see ``tests/chains.py``.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import chains
from zephon_patches import mapping
from zephon_patches.loader.loader import Loader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_random_chains_do_what_the_reference_does():
    counts = chains.check_seeds(range(40), "fork")
    # All that can happen does: none of this is left to the soak.
    for kind in ("Items", "Load", "Offer", "Restart", "Resume", "Save"):
        assert counts[f"{kind}, in mid-step"], kind
    for kind in ("ends of the data", "loaded, mixture grown", "refused, another mixture", "runs with workers"):
        assert counts[kind], kind
    assert counts["chains"] == 40


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_chain_with_workers_that_start_in_another_way(method):
    with_workers = (
        seed
        for seed in range(1000)
        if sum(isinstance(a, chains.Resume) and a.way.workers for a in chains.plan_chain(seed, method).actions) == 1
    )
    assert chains.check_seeds([next(with_workers)], method)["runs with workers"] == 1


def test_a_seed_gives_the_same_chain():
    assert chains.plan_chain(5) == chains.plan_chain(5) != chains.plan_chain(6)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_soak():
    command = [sys.executable, "-m", "tests.chains", "--count", "2000"]
    assert subprocess.run(command, cwd=Path(__file__).parents[1]).returncode == 0


# --- planted faults ---


def counted_one_too_far(monkeypatch):
    real = mapping.next_cursor
    monkeypatch.setattr(mapping, "next_cursor", lambda *given: real(*given) + 1)


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


def stale_prefetch(monkeypatch):
    """A load moves the cursor, and a running iterator goes on with what workers fetched for the old place."""
    real = Loader.seek

    def seek(self, cursor):
        moves = self._moves
        real(self, cursor)
        if self._items._workers is not None:
            self._moves = moves

    monkeypatch.setattr(Loader, "seek", seek)


def ranks_swapped(monkeypatch):
    real = mapping.part_of_rank

    def part(size, topology):
        rank, dp = topology
        return real(size, mapping.Topology(1 - rank if rank < 2 <= dp else rank, dp))

    monkeypatch.setattr(mapping, "part_of_rank", part)


def accepted_all(monkeypatch):
    monkeypatch.setattr("zephon_patches.loader.loader.check_order", lambda *given: [])


def moved_before_refused(monkeypatch):
    real = Loader.load_state_dict

    def load(self, state):
        if isinstance(state, dict) and type(state.get("cursor")) is int and 0 <= state["cursor"] < 2**62:
            self._delivered = 0
            self._moves += 1  # starts the step anew
        real(self, state)

    monkeypatch.setattr(Loader, "load_state_dict", load)


FAULTS = [
    counted_one_too_far,
    read_one_too_far_after_a_load,
    stale_prefetch,
    ranks_swapped,
    accepted_all,
    moved_before_refused,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="repeat it: ") as found:
        chains.check_seeds(range(50), "fork")
    # The seed that is told repeats the failure, and without the fault it is a good one.
    told = re.search(r"chain (\d+): .*\nrepeat it: .* -m tests.chains \1 --method fork\nsmaller: ", str(found.value))
    seed = int(told[1])
    assert chains.fault_of(chains.plan_chain(seed, "fork"))
    monkeypatch.undo()
    chains.check_seeds([seed], "fork")
