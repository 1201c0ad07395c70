"""The rows that one rank reads: numbers of each step, found in the global order.

Numbers are located in blocks of several steps ahead of need, since numpy's cost is per call; a mixture makes calls for
each of its sources, so there the blocks are longer. Where the data is small they are shorter, since each epoch that
they reach into is permuted anew. The first blocks are short, so that the first batch comes soon, and each is longer
than the one before.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from zephon_patches import mapping
from zephon_patches.loader.collate import Row
from zephon_patches.mapping import NO_SKIPS, Skips, Topology
from zephon_patches.order.global_order import GlobalOrder

__all__ = ["plan_rows"]

_FIRST_ROWS = 128
_GROWTH = 16
_BLOCK_ROWS = 8192
_MOST_BLOCKS = 4
_BLOCK_EPOCHS = 64

# Rows that are Python's objects at a time: more of them would not stay in the processor's caches.
_MADE_ROWS = 1024


def plan_rows(
    order: GlobalOrder,
    steps: Iterable[tuple[int, int]],
    global_batch_size: int,
    local_batch_size: int,
    topology: Topology,
    skips: Skips = NO_SKIPS,
) -> Iterator[list[Row]]:
    """Yields the rows of each micro-batch of one rank.

    Args:
        order: Finds the numbers.
        steps: Half-open intervals of kept numbers, none empty or larger than ``global_batch_size``.
        global_batch_size: Fixes the number of micro-batches of a step.
        local_batch_size: Rows of a micro-batch.
        topology: The rank.
        skips: Numbers that are left out.
    """
    steps = iter(steps)
    rows = local_batch_size * mapping.micro_batches_per_step(global_batch_size, local_batch_size, topology.dp_size)
    block_rows = _BLOCK_ROWS * min(order.num_sources, _MOST_BLOCKS)
    block_rows = min(block_rows, max(_BLOCK_EPOCHS * order.num_samples, _FIRST_ROWS))
    size = min(_FIRST_ROWS, block_rows)
    while block := list(islice(steps, max(1, size // rows))):
        size = min(_GROWTH * size, block_rows)
        numbers = mapping.numbers_of_steps(
            np.array(block, dtype=np.int64), global_batch_size, local_batch_size, topology, skips
        ).reshape(len(block), rows)
        padding = numbers < 0
        if padding.any():
            # A padding row repeats the rank's first row; a rank that has none in a short step, the step's first.
            starts = skips.numbers(np.array([start for start, _ in block], dtype=np.int64))
            instead = np.where(padding[:, 0], starts, numbers[:, 0])
            numbers = np.where(padding, instead[:, None], numbers)
        place = order.locate(numbers.ravel())
        columns = (place.source, place.shard, place.sample, padding.ravel())
        made = max(_MADE_ROWS // local_batch_size, 1) * local_batch_size
        for first in range(0, padding.size, made):
            found = zip(*(column[first : first + made].tolist() for column in columns), strict=True)
            while micro_batch := list(islice(found, local_batch_size)):
                yield micro_batch
