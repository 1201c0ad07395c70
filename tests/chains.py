"""Random chains of all that happens to a run, in one process, compared with the reference item by item.

A chain is planned from its seed alone: data and order, then actions as plain values, each of which makes sense wherever
it stands. So a chain that fails is made small by leaving actions out, and is repeated by its seed::

    PYTHONPATH=. python -m tests.chains 1234                       that chain
    PYTHONPATH=. python -m tests.chains --count 2000 [--first 0]   many; the first seed is drawn if none is given

``tests/chain_plan.py`` says what is drawn, ``tests/chain_drive.py`` does it and compares.
"""

import argparse
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.chain_drive import drive
from tests.chain_plan import METHODS, Chain, plan_chain

HANG = 600  # seconds of one chain, which takes a fraction of one


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


def check_seed(seed: int, methods: Sequence[str] = (), counts: Counter | None = None) -> None:
    """Drives the chain of a seed.

    Raises:
        AssertionError: It fails; the message has the seed, the command that repeats it, and the smallest chain found.
    """
    chain = plan_chain(seed, methods)
    fault = fault_of(chain, counts)
    if not fault:
        return
    small = smaller(chain)
    actions = "\n  ".join(map(repr, small.actions))
    again = f"PYTHONPATH=. python -m tests.chains {seed}{' --method ' * bool(methods)}{' '.join(methods)}"
    raise AssertionError(
        f"chain {seed}: {fault}\nrepeat it: {again}\nsmaller: {small.data}\n  {actions}\n  {fault_of(small)}"
    )


def check_seeds(seeds: Iterable[int], methods: Sequence[str] = ()) -> Counter:
    """Drives the chains of many seeds; returns what was done how often."""
    counts: Counter = Counter()
    for seed in seeds:
        check_seed(seed, methods, counts)
        counts["chains"] += 1
    return counts


def _hangs(*_: object) -> None:
    raise TimeoutError(f"a chain takes more than {HANG} seconds")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chains", description="Drives random chains of runs.")
    parser.add_argument("seeds", type=int, nargs="*", help="chains to drive")
    parser.add_argument("--count", type=int, default=0, help="chains to drive in place of given ones")
    parser.add_argument("--first", type=int, help="seed of the first of them; drawn if not given")
    parser.add_argument(
        "--method", nargs="+", default=(), choices=METHODS, help="how workers may start; any if not given"
    )
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
