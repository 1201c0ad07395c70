"""Best-fit-decreasing packing: whole documents into samples of ``seq_len`` places, with little padding.

The pieces of a shard's documents (``pieces.py``) are taken from the largest to the smallest, equal ones in the order
of the shard. Each goes into the sample with the least room that is enough, of several the one that was begun first,
or begins a new one. Source: Ding et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830.

It is computed on counts. Say c pieces of p places are left, and r is the least room of at least p places. The first
sample with room r takes a piece. If it has room for another one, it is now the sample with the least room that is
enough, so it takes that too: each sample with room r takes ``r // p`` pieces and has less room than p afterwards. So
all samples of one room are filled in one move, a move empties a room or ends a size, and there are at most a few
moves for each size, whatever the number of documents. Samples of one room are kept as ranges of their numbers. In
all O(documents + moves), for any lengths.

Worked case, ``seq_len`` = 10, places 6 5 4 4 3 2 2 2: 6 begins sample 0 (room 4), 5 begins sample 1 (room 5), the first
4 fills sample 0, the second goes into sample 1 (room 1). 3 begins sample 2 (room 7), which takes all 2s (room 1). Fill:
28 of 30 places.

The result is a function of the lengths and ``seq_len`` alone: whole numbers, and sorts that keep equal elements in
their order.
"""

from array import array

import numpy as np

from zephon_patches.samples.pieces import Plan, labelled_pieces

__all__ = ["plan_best_fit"]


def plan_best_fit(lengths: np.ndarray, seq_len: int, mask: np.ndarray | None = None) -> Plan:
    """Packs the documents of a shard.

    Args:
        lengths: Integers, shape ``(documents,)``: tokens of each document, not negative.
        seq_len: Places of a sample, at least 1.
        mask: As ``labelled_pieces`` takes it.

    Returns:
        The plan; samples are numbered in the order in which they were begun.

    Raises:
        ValueError: As ``cut_pieces``.
    """
    pieces, left_out = labelled_pieces(lengths, seq_len, mask)
    places = pieces[:, 1] - 1
    counts = np.bincount(places, minlength=seq_len + 1)
    first, samples, each = _moves(counts.tolist(), seq_len)
    # The sample of each piece, in the order in which they were taken: sample s of a move takes `each` in a row.
    sizes = samples * each
    begin = np.cumsum(sizes) - sizes
    taken = np.arange(len(pieces)) - np.repeat(begin, sizes)
    taken //= np.repeat(each, sizes)
    taken += np.repeat(first, sizes)
    sample = np.empty(len(pieces), dtype=np.int64)
    sample[_stable_order(seq_len - places, seq_len)] = taken
    num_samples = int(taken.max()) + 1 if len(taken) else 0
    starts = np.zeros(num_samples + 1, dtype=np.int64)
    np.cumsum(np.bincount(sample, minlength=num_samples), out=starts[1:])
    return Plan(starts, pieces[_stable_order(sample, num_samples)], left_out)


def _moves(counts: list[int], seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which samples take how many pieces, in the order in which the pieces are taken.

    Args:
        counts: How many pieces there are of 0, 1, ... ``seq_len`` places; none of 0.

    Returns:
        For each move, int64: its first sample, its number of samples, the number of pieces that each takes.
    """
    moves = array("q")
    # Ranges of samples, as pairs (first, behind its last), by their room; a bit for each room that some sample has.
    rooms: list[list[tuple[int, int]]] = [[] for _ in range(seq_len + 1)]
    present = 0
    begun = 0
    for places in range(seq_len, 0, -1):
        count = counts[places]
        while count:
            larger = present >> places
            if larger:
                room = places + (larger & -larger).bit_length() - 1
                ranges = sorted(rooms[room])
                rooms[room] = []
                present ^= 1 << room
            else:
                room = seq_len
                ranges = [(begun, begun - -count // (seq_len // places))]
                begun = ranges[0][1]
            each = room // places
            for number, (first, stop) in enumerate(ranges):
                full = min(stop - first, count // each)
                if full:
                    moves.extend((first, full, each))
                    count -= full * each
                    first += full
                    present |= _put(rooms, room - each * places, first - full, first)
                if first < stop and count:  # one sample takes the last of this size, and is not full
                    moves.extend((first, 1, count))
                    present |= _put(rooms, room - count * places, first, first + 1)
                    first += 1
                    count = 0
                if first < stop:
                    present |= _put(rooms, room, first, stop)
                if not count:
                    rooms[room] += ranges[number + 1 :]
                    present |= bool(rooms[room]) << room
                    break
    table = np.frombuffer(moves, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _put(rooms: list[list[tuple[int, int]]], room: int, first: int, stop: int) -> int:
    """Adds samples to those of a room, and gives the room's bit; those without room are done."""
    if not room:
        return 0
    ranges = rooms[room]
    if ranges and ranges[-1][1] == first:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((first, stop))
    return 1 << room


def _stable_order(keys: np.ndarray, bound: int) -> np.ndarray:
    """The order that sorts keys in ``[0, bound]`` and keeps equal ones as they are, digit by digit of 16 bits."""
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    for shift in range(16, int(bound).bit_length(), 16):
        digit = ((keys >> shift) & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order
