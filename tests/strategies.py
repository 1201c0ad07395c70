"""What the properties are tried on: batches, topologies, cursors, chains of resumes, documents, shards."""

from hypothesis import strategies as st

from tests.resume import Place
from zephon_patches.config import MAX_NUMBER

MAX_DP = 24

batch_sizes = st.integers(1, 48)

# Small ones, any, and those around which numbers stop fitting into a type.
cursors = st.one_of(
    st.integers(0, 1000),
    st.integers(0, 10**15),
    st.sampled_from([2**31 - 5, 2**32 - 5, 2**53 - 5, 10**15, MAX_NUMBER - 10**6]),
)

seeds = st.sampled_from([0, 1, 2**63 - 1]) | st.integers(0, 2**63 - 1)

# Lengths in tokens without EOS; 0 is an empty text.
document_lengths = st.lists(st.integers(0, 20), min_size=1, max_size=25)

shuffle_shards = st.sampled_from([0, 1, 2, 3, 256])

samples_per_shard = st.lists(st.one_of(st.just(0), st.integers(0, 30)), min_size=1, max_size=20).filter(any)


@st.composite
def places(draw: st.DrawFn, batch: int | None = None, max_dp: int = MAX_DP, workers: int = 0) -> Place:
    """A topology with its batches; the local batch may be larger than a rank's share."""
    batch = draw(batch_sizes) if batch is None else batch
    dp = draw(st.integers(1, min(batch, max_dp)))
    local = draw(st.integers(1, batch + 2))
    return Place(dp, local, batch, draw(st.integers(0, workers)))


def chains(batch: int | None = None, resumes: int = 3, max_dp: int = MAX_DP) -> st.SearchStrategy:
    """Places and the steps taken there, with at least some resumes; batches change too unless one is given."""
    return st.lists(st.tuples(places(batch, max_dp), st.integers(0, 3)), min_size=resumes + 1, max_size=resumes + 3)


# Weights of a mixture: ordinary ones, tiny ones beside large ones, many equal ones, and each half of the one before.
weights = st.one_of(
    st.lists(st.integers(1, 100), min_size=1, max_size=12),
    st.lists(st.sampled_from([1, 2, 3, 10**3, 10**6, 10**12, 10**30]), min_size=1, max_size=12),
    st.integers(1, 300).flatmap(lambda n: st.lists(st.integers(1, 3), min_size=n, max_size=n)),
    st.integers(1, 80).map(lambda n: [2**i for i in range(n)]),
)


@st.composite
def stages(draw: st.DrawFn, sources: int, last: int = 300) -> list[tuple[int, list[int]]]:
    """(first number, weights) of one to five stages; in each some source is on."""
    starts = [0, *sorted(draw(st.sets(st.integers(1, last), max_size=4)))]
    mixture = st.lists(st.integers(0, 9), min_size=sources, max_size=sources).filter(any)
    return [(start, draw(mixture)) for start in starts]


# Intervals of numbers; they may touch and overlap, in any order.
skips = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)).map(lambda s: (s[0], sum(s))), max_size=5)
