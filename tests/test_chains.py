"""Random chains of runs: some at every start of the tests, many by their own command, and proof that faults are seen.

    scripts/test.sh -m slow -s tests/test_chains.py       2,000 chains whose seeds are new each time, and printed

A chain that fails prints its seed and the command that repeats it; see ``tests/chains.py``.
"""

import re
import subprocess
import sys
from itertools import count, islice
from pathlib import Path

import pytest

from tests import chains, planted
from tests.chain_plan import DAMAGES, METHODS, PACKINGS, Chain, Resume, plan_chain

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SEEDS = range(215, 239)  # so chosen that few chains have all that can happen


def test_random_chains_do_what_the_reference_does():
    counts = chains.check_seeds(SEEDS, planted.FORK)
    # All that can happen does: none of this is left to the soak.
    for kind in ("Items", "Load", "Offer", "Remap", "Restart", "Resume", "Save", "Steps"):
        assert counts[f"{kind}, in mid-step"], kind
    for damage in DAMAGES:
        assert counts[f"offered, {damage}"], damage
    for packing in PACKINGS:
        assert counts[f"chains, {packing}"], packing
    for kind in (
        "cache damaged",
        "cache new",
        "chains with conversations",
        "chains with masked boundaries",
        "chains with positions",
        "ends of the data",
        "loaded, mixture grown",
        "refused, another mixture",
        "refused, other samples",
        "refused, remap",
        "remap of workers",
        "remap to fewer or as many ranks",
        "remap to more ranks",
        "rows without a label",
        "runs with workers",
        "step begun anew",
        "went on with other samples",
    ):
        assert counts[kind], kind
    assert counts["chains"] == len(SEEDS)


def test_workers_start_in_each_way_in_one_chain():
    def fits(chain: Chain) -> bool:
        slow = [a.way for a in chain.actions if isinstance(a, Resume) and a.way.method != "fork"]
        return len(chain.actions) < 10 and len(slow) == 2 and sorted(w.method for w in slow) == ["forkserver", "spawn"]

    seed = next(seed for seed in count() if fits(plan_chain(seed, METHODS)))
    assert chains.check_seeds([seed], METHODS)["another start method in mid-chain"]


def test_a_seed_gives_the_same_chain():
    assert plan_chain(5) == plan_chain(5) != plan_chain(6)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_soak():
    command = [sys.executable, "-m", "tests.chains", "--count", "2000"]
    assert subprocess.run(command, cwd=Path(__file__).parents[1]).returncode == 0


@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda fault: fault.plant.__name__)
def test_a_planted_fault_is_found(monkeypatch, fault):
    fault.plant(monkeypatch)
    with pytest.raises(AssertionError, match="repeat it: ") as found:
        chains.check_seeds(islice(fault.seeds(), 12), planted.FORK)
    # The seed that is told repeats the failure, and without the fault it is a good one.
    told = re.search(r"chain (\d+): .*\nrepeat it: .* -m tests.chains \1 --method fork\nsmaller: ", str(found.value))
    seed = int(told[1])
    assert chains.fault_of(plan_chain(seed, planted.FORK))
    monkeypatch.undo()
    chains.check_seeds([seed], planted.FORK)
