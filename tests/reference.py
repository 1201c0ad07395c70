"""The simplest program that could be right, to compare with: plain lists, whole numbers, no product code.

It holds everything in memory and looks at every sample, which the product must not.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from fractions import Fraction
from math import floor
from typing import NamedTuple

PAD, IGNORE = 0, -100
FEISTEL_FROM = 4096
WORD = 2**64


class Sample(NamedTuple):
    inputs: tuple[int, ...]
    labels: tuple[int, ...]
    positions: tuple[int, ...] = ()


# --- documents to samples ---


def cut_documents(line_bytes: Sequence[int], shard_bytes: int) -> list[list[int]]:
    """The documents of each shard: lines are added until the shard has its bytes."""
    shards: list[list[int]] = [[]]
    room = shard_bytes
    for document, size in enumerate(line_bytes):
        if room <= 0:
            shards.append([])
            room = shard_bytes
        shards[-1].append(document)
        room -= size
    return shards


def samples_of_shard(tokens: Sequence[int], seq_len: int) -> list[Sample]:
    """Pairs each token but the last with its successor, and cuts the pairs into rows."""
    pairs = list(itertools.pairwise(tokens))
    samples = []
    while pairs:
        row, pairs = pairs[:seq_len], pairs[seq_len:]
        missing = seq_len - len(row)
        # The last token of a shard is no input of a pair, yet stands behind the last input where there is room.
        behind = [row[-1][1], *[PAD] * (missing - 1)] if missing else []
        samples.append(Sample((*(a for a, _ in row), *behind), (*(b for _, b in row), *[IGNORE] * missing)))
    return samples


def samples_of_documents(
    documents: Sequence[Sequence[int]],
    seq_len: int,
    packing: str,
    positions: bool = False,
    mask_boundaries: bool = False,
    counting: Sequence[Sequence[bool]] | None = None,
) -> list[Sample]:
    """The samples of a shard in any packing, with all that they may hold.

    Args:
        counting: Of each document, which of its tokens count as labels; None if all do. Not with ``concat``.
    """
    if packing != "concat":
        stream = [token for tokens in documents for token in tokens]
        counts = [True] * len(stream) if counting is None else [count for of in counting for count in of]
        pieces = [p for p in cut(documents, seq_len) if any(counts[p.first + 1 : p.first + p.tokens])]
        rows = best_fit(pieces, seq_len) if packing == "best_fit" else [[piece] for piece in pieces]
        samples = [sample_of_pieces(stream, row, seq_len, counts) for row in rows]
        runs = [[piece.tokens - 1 for piece in row] for row in rows]
    else:
        samples, runs = [], []
        owner = [number for number, tokens in enumerate(documents) for _ in tokens]
        cuts = samples_of_shard([token for tokens in documents for token in tokens], seq_len)
        for number, sample in enumerate(cuts):
            owners = owner[number * seq_len : (number + 1) * seq_len + 1]
            labels = list(sample.labels)
            for place, (one, other) in enumerate(itertools.pairwise(owners)):
                if mask_boundaries and one != other:
                    labels[place] = IGNORE
            samples.append(Sample(sample.inputs, tuple(labels)))
            runs.append([len(list(run)) for _, run in itertools.groupby(owners[:seq_len])])
    if not positions:
        return samples
    full = [[*run, seq_len - sum(run)] for run in runs]
    return [
        sample._replace(positions=tuple(place for count in run for place in range(count)))
        for sample, run in zip(samples, full, strict=True)
    ]


class Piece(NamedTuple):
    document: int
    first: int  # in the shard
    tokens: int


def cut(documents: Sequence[Sequence[int]], seq_len: int) -> list[Piece]:
    """The pieces of a shard's documents: as many pairs of neighbours as fit into a row, then the next ones."""
    pieces = []
    first = 0
    for number, tokens in enumerate(documents):
        pairs = len(tokens) - 1
        for place in range(0, pairs, seq_len):
            pieces.append(Piece(number, first + place, min(seq_len, pairs - place) + 1))
        first += len(tokens)
    return pieces


def best_fit(pieces: Sequence[Piece], seq_len: int) -> list[list[Piece]]:
    """Each piece, from the largest down, into the fullest row that has room for it, or else a new one."""
    rows: list[list[Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):  # keeps equal ones in their order
        fits = [row for row in range(len(rows)) if room[row] >= piece.tokens - 1]
        row = min(fits, key=lambda row: room[row], default=len(rows))
        if row == len(rows):
            rows.append([])
            room.append(seq_len)
        rows[row].append(piece)
        room[row] -= piece.tokens - 1
    return [sorted(row) for row in rows]


def sample_of_pieces(
    stream: Sequence[int], pieces: Sequence[Piece], seq_len: int, counts: Sequence[bool] | None = None
) -> Sample:
    """Pairs of neighbours inside each piece, then padding; labels that do not count are left out of the loss."""
    labels = [t if counts is None or counts[i] else IGNORE for i, t in enumerate(stream)]
    pairs = [(stream[i], labels[i + 1]) for _, first, tokens in pieces for i in range(first, first + tokens - 1)]
    missing = seq_len - len(pairs)
    return Sample((*(a for a, _ in pairs), *[PAD] * missing), (*(b for _, b in pairs), *[IGNORE] * missing))


# --- the order ---


def key_of(*path: int | str) -> int:
    text = json.dumps(list(path), separators=(",", ":")).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"zephon").digest(), "little")


def splitmix(key: int, x: int) -> int:
    """Output number x of the SplitMix64 generator that starts at ``key``."""
    z = (key + (x + 1) * 0x9E3779B97F4A7C15) % WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return z ^ z >> 31


def permuted(size: int, key: int) -> list[int]:
    """Element at each position of a shuffled range."""
    if size < FEISTEL_FROM:
        return sorted(range(size), key=lambda x: (splitmix(key, x), x))
    return [feistel(size, key, position) for position in range(size)]


def feistel(size: int, key: int, value: int) -> int:
    half = 1
    while 4**half < size:
        half += 1
    base = 2**half
    round_keys = [splitmix(key, i) for i in range(8)]
    while True:
        left, right = divmod(value, base)
        for round_key in round_keys:
            left, right = right, left ^ splitmix(round_key, right) % base
        value = left * base + right
        if value < size:
            return value


def epoch_order(
    name: str, samples_per_shard: Sequence[int], seed: int, shuffle_shards: int, epoch: int
) -> list[tuple[int, int]]:
    """(shard, sample) of each position of an epoch."""
    shards = list(range(len(samples_per_shard)))
    if not shuffle_shards:
        return [(shard, sample) for shard in shards for sample in range(samples_per_shard[shard])]
    shards = [shards[i] for i in permuted(len(shards), key_of(seed, name, epoch, "shards"))]
    order = []
    for group, start in enumerate(range(0, len(shards), shuffle_shards)):
        members = [(s, i) for s in shards[start : start + shuffle_shards] for i in range(samples_per_shard[s])]
        order += [members[i] for i in permuted(len(members), key_of(seed, name, epoch, "group", group))]
    return order


class Stream:
    """All samples of one source in their global order, over any number of epochs.

    Args:
        shards: The tokens of each shard.
        holds: In place of ``concat``, settings of ``samples_of_documents``; then each shard is its documents.
        counting: With ``holds``, of each shard what ``samples_of_documents`` takes.
    """

    def __init__(
        self,
        shards: Sequence[Sequence],
        seq_len: int,
        name: str = "web",
        seed: int = 0,
        shuffle_shards: int = 256,
        holds: dict | None = None,
        counting: Sequence[Sequence[Sequence[bool]]] | None = None,
    ) -> None:
        if holds is None:
            self._samples = [samples_of_shard(shard, seq_len) for shard in shards]
        else:
            self._samples = [
                samples_of_documents(shard, seq_len, **holds, counting=counts)
                for shard, counts in zip(shards, counting or [None] * len(shards), strict=True)
            ]
        self._settings = (name, [len(samples) for samples in self._samples], seed, shuffle_shards)
        self._orders: dict[int, list[tuple[int, int]]] = {}
        self.epoch_samples = sum(len(samples) for samples in self._samples)

    def __getitem__(self, n: int) -> Sample:
        epoch, position = divmod(n, self.epoch_samples)
        if epoch not in self._orders:
            self._orders[epoch] = epoch_order(*self._settings, epoch)
        shard, sample = self._orders[epoch][position]
        return self._samples[shard][sample]

    def rows(self, start: int, stop: int) -> list[Sample]:
        return [self[n] for n in range(start, stop)]


# --- mixtures ---


class Node:
    """A source, or two children that are drawn from in turn; takes one draw after the other."""

    def __init__(self, weights: dict[int, Fraction]) -> None:
        heaviest_first = sorted(weights, key=lambda source: (-weights[source], source))
        self.source = heaviest_first[0]
        self.drawn = 0
        self.children: list[Node] = []
        if len(weights) == 1:
            return
        total = sum(weights.values())
        left: list[int] = []
        right: list[int] = []
        for source in heaviest_first:
            in_left, in_right = sum(weights[s] for s in left), sum(weights[s] for s in right)
            (left if in_left <= in_right else right).append(source)
        self.part = sum(weights[s] for s in left) / total
        self.children = [Node({s: weights[s] for s in part}) for part in (left, right)]

    def draw(self) -> int:
        self.drawn += 1
        if not self.children:
            return self.source
        left, right = self.children
        return (left if floor(self.drawn * self.part + Fraction(1, 2)) > left.drawn else right).draw()


def fractions_of(weights: Sequence[int | str]) -> dict[int, Fraction]:
    """The weights above 0, by source; decimals are given as texts."""
    return {source: Fraction(weight) for source, weight in enumerate(weights) if Fraction(weight)}


def sources_of(stages: Sequence[tuple[int, Sequence[int | str]]], stop: int) -> list[tuple[int, int]]:
    """(source, numbers of that source before) of each number below ``stop``."""
    mixtures = dict(stages)
    before: dict[int, int] = {}
    found = []
    for n in range(stop):
        if n in mixtures:
            mixture = Node(fractions_of(mixtures[n]))
        source = mixture.draw()
        found.append((source, before.get(source, 0)))
        before[source] = before.get(source, 0) + 1
    return found


class Mix:
    """All samples of several sources in their global order.

    Args:
        streams: One for each source.
        stages: (first number, weights); None for the sources' sizes.
    """

    def __init__(self, streams: Sequence[Stream], stages: Sequence[tuple[int, Sequence[int | str]]] | None = None):
        self._streams = streams
        self.epoch_samples = sum(stream.epoch_samples for stream in streams)
        self._stages = stages or [(0, [stream.epoch_samples for stream in streams])]
        self._sources: list[tuple[int, int]] = []

    def __getitem__(self, n: int) -> Sample:
        if n >= len(self._sources):
            self._sources = sources_of(self._stages, 2 * n + 100)
        source, count = self._sources[n]
        return self._streams[source][count]

    def rows(self, start: int, stop: int) -> list[Sample]:
        return [self[n] for n in range(start, stop)]


# --- the steps ---


def deal(
    cursor: int,
    global_batch: int,
    local_batch: int,
    dp: int,
    end: int | None = None,
    skip: Sequence[tuple[int, int]] = (),
) -> tuple[list[list[list[int | None]]], int]:
    """One step: (numbers by rank, micro-batch and row, with None for padding; the cursor behind it)."""
    numbers: list[int] = []
    n = cursor
    while len(numbers) < global_batch and (end is None or n < end):
        if not any(start <= n < stop for start, stop in skip):
            numbers.append(n)
        n += 1
    bounds = [floor(Fraction(rank * len(numbers), dp)) for rank in range(dp + 1)]
    # All ranks take as many micro-batches as the one that has the most rows of a full step.
    most = max(floor(Fraction((r + 1) * global_batch, dp)) - floor(Fraction(r * global_batch, dp)) for r in range(dp))
    micro_batches = 0
    while micro_batches * local_batch < most:
        micro_batches += 1
    dealt = []
    for rank in range(dp):
        rows: list[int | None] = list(numbers[bounds[rank] : bounds[rank + 1]])
        rows += [None] * (micro_batches * local_batch - len(rows))
        dealt.append([rows[i : i + local_batch] for i in range(0, len(rows), local_batch)])
    return dealt, numbers[-1] + 1 if len(numbers) == global_batch else n


# --- what a resume accepts ---


class Mixture(NamedTuple):
    """What decides which sample has which number: (first number, weights) of each stage, and what is skipped."""

    stages: tuple[tuple[int, dict[str, float]], ...]
    skip: tuple[tuple[int, int], ...] = ()

    def until(self, cursor: int) -> "Mixture":
        """The part that is consumed below a cursor; the first stage always is."""
        stages = tuple(stage for stage in self.stages if stage[0] < max(cursor, 1))
        return Mixture(stages, tuple((start, min(stop, cursor)) for start, stop in self.skip if start < cursor))


def same_until(cursor: int, one: Mixture, other: Mixture) -> bool:
    """Whether a run that stands at a cursor of the one may go on in the other."""
    shares = []
    for mixture in (one.until(cursor), other.until(cursor)):
        weights = [(at, {n: Fraction(str(w)) for n, w in of.items() if w}) for at, of in mixture.stages]
        skipped = {n for start, stop in mixture.skip for n in range(start, stop)}
        shares.append(([(at, {n: w / sum(of.values()) for n, w in of.items()}) for at, of in weights], skipped))
    return shares[0] == shares[1]
