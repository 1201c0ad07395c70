"""Random chains of runs: some at every start of the tests, many by their own command, and proof that faults are seen.

    scripts/test.sh -m slow -s tests/test_chains.py       2,000 chains whose seeds are new each time, and printed

A chain that fails prints its seed and the command that repeats it; see ``tests/chains.py``.
"""

import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests import chains, planted

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


@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda fault: fault.plant.__name__)
def test_a_planted_fault_is_found(monkeypatch, fault):
    fault.plant(monkeypatch)
    with pytest.raises(AssertionError, match="repeat it: ") as found:
        chains.check_seeds(islice(fault.seeds(), 12), planted.FORK)
    # The seed that is told repeats the failure, and without the fault it is a good one.
    told = re.search(r"chain (\d+): .*\nrepeat it: .* -m tests.chains \1 --method fork\nsmaller: ", str(found.value))
    seed = int(told[1])
    assert chains.fault_of(chains.plan_chain(seed, planted.FORK))
    monkeypatch.undo()
    chains.check_seeds([seed], planted.FORK)
