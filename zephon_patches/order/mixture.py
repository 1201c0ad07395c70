"""A mixture: draw number m -> (source, how many draws of that source came before), by weights that are whole numbers.

The sources are the leaves of a binary tree. A node that has been drawn m times has sent ``round(m * p)`` of its draws
to its left child, whose part of the node's weight is p, and the others to the right one. In exact integers that is
``(2 * m * a + b) // (2 * b)``, with the child's weight a and the node's b. So a draw is found by walking down, and the
draw of a source by walking up; nothing is simulated, stored or rounded, and number 10^15 costs what number 0 costs.

How far a source can be from its share follows from the tree. Each node on the way adds at most 1/2, scaled by the part
that the source has of the node. So a source of weight w is at most half of the sum of ``w / (weight of the node)``
away, over the nodes on its way but for the root. To keep that sum below 3, a node's sources are put, the heaviest
first, always to the lighter one of its two children (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). Then
the heavier child outweighs the other one by at most its own lightest source, and a source with at least half of a
node's weight is a child of its own. Take a source of weight x, and s, the weight of its sibling:

- x >= s. The node above weighs x + s, and its lightest source at most s, so the next one weighs at least
  2 (x + s) - s = 2x + s, the next 4x + s, then 8x + s, and the sum is below 1 + 1 + 1/2 + 1/4 + ... = 3.
- x < s. The node above weighs more than 2x, and its lightest source at most x, so the next one weighs more than
  2 * 2x - x = 3x, then 5x, 9x, ..., and the sum is below 1 + 1/2 + 1/3 + 1/5 + 1/9 + ... < 2.3.

Hence, for all weights and any number of sources:

- at every prefix a source is within 1.5 of its share; in any window of numbers, of whatever length, within 3;
- after every ``period`` draws (the sum of the weights without a common factor) all counts are exact: that is a block.

Counts by stacked floors (``n * W_j // W``, and a source has the difference of two) would be within 1 everywhere, but
they can fall: with weights 4, 1, 4 the second source would have 1 of the first 2 numbers and 0 of the first 3. On a
grid of blocks of B numbers that can happen to every source whose weight is below a B-th of all.

Worked case, weights 5, 3, 2: the first is on the left, with ``round(m / 2)`` of m draws. The others share what is left,
``round(m * 3 / 5)`` for the second::

    draw              0  1  2  3  4  5  6  7  8  9
    source            0  1  0  2  0  1  0  2  0  1
    draws before      0  0  1  0  2  1  3  1  4  2
"""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple

import numpy as np

__all__ = ["Mixture", "exact_weights"]

_INT64_MAX = 2**63 - 1


def exact_weights(weights: Sequence[int | float]) -> list[int]:
    """Whole numbers in the ratio of weights, without a common factor.

    Args:
        weights: At least 0 and finite, one of them above 0. A float stands for the decimal that Python prints for it,
            the shortest that reads back the same: 0.1 is one tenth.

    Returns:
        One for each weight: [0.7, 0.3, 0] becomes [7, 3, 0].
    """
    exact = [Fraction(float.__repr__(w)) if isinstance(w, float) else Fraction(w) for w in weights]
    scale = lcm(*(w.denominator for w in exact))
    whole = [int(w * scale) for w in exact]
    divisor = gcd(*whole)
    return [w // divisor for w in whole]


class _Node(NamedTuple):
    """Draw m goes left if the count of the left child grows with it."""

    left_weight: int
    weight: int
    left: "_Node | int"  # a leaf is the number of its source
    right: "_Node | int"


class Mixture:
    """Draws from sources by their weights, the same for ever: nothing depends on how many draws there will be.

    Args:
        weights: At least 0, one of them above 0, of any size. A source of weight 0 is never drawn, and its presence
            changes nothing. Sources of equal weight are taken in the order that they are given in.

    Attributes:
        weights: Without their common factor.
        period: The sum of them; after each so many draws all counts are exact.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        assert weights and min(weights) >= 0 and any(weights), weights
        divisor = gcd(*weights)
        self.weights = [w // divisor for w in weights]
        self.period = sum(self.weights)
        self._root = _tree(self.weights)
        self._paths = dict(_paths(self._root))

    def draw(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds draws.

        Args:
            numbers: int64, shape ``(k,)``, at least 0.

        Returns:
            The source of each, and the draws of that source before it, both int64 of shape ``(k,)``.
        """
        sources, counts = np.empty_like(numbers), np.empty_like(numbers)
        if not len(numbers):
            return sources, counts
        first = int(numbers.min())
        # Draws of a node, as differences to the first: those stay small where the numbers are near each other.
        waiting = [(self._root, first, numbers - first, np.arange(len(numbers)))]
        while waiting:
            node, first, draws, places = waiting.pop()
            if isinstance(node, int):
                sources[places] = node
                counts[places] = first + draws
                continue
            before, lefts, goes_left = _split(node, first, draws)
            if goes_left.any():
                waiting.append((node.left, before, lefts[goes_left], places[goes_left]))
            if not goes_left.all():
                goes_right = ~goes_left
                rights = draws[goes_right] - lefts[goes_right]
                waiting.append((node.right, first - before, rights, places[goes_right]))
        return sources, counts

    def counts(self, number: int) -> list[int]:
        """Draws of each source before a number."""
        counts = [0] * len(self.weights)
        waiting = [(self._root, number)]
        while waiting:
            node, draws = waiting.pop()
            if isinstance(node, int):
                counts[node] = draws
            else:
                left = _left(node, draws)
                waiting += [(node.left, left), (node.right, draws - left)]
        return counts

    def number(self, source: int, count: int) -> int | None:
        """The draw of a source before which it has been drawn ``count`` times; None if it never is."""
        if source not in self._paths:
            return None
        for node, is_left in self._paths[source]:
            # The least draw d with count + 1 draws of the child among the d + 1 first ones.
            if is_left:
                count = -(-(2 * count + 1) * node.weight // (2 * node.left_weight)) - 1
            else:
                count = (2 * count + 1) * node.weight // (2 * (node.weight - node.left_weight))
        return count


def _left(node: _Node, draws: int) -> int:
    """How many of a node's first draws went left."""
    return (2 * draws * node.left_weight + node.weight) // (2 * node.weight)


def _split(node: _Node, first: int, draws: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Sends draws left or right.

    Args:
        first: The number of draws that the others are counted from.
        draws: int64, shape ``(k,)``, at least 0.

    Returns:
        How many draws went left before the first one; for each draw how many more did, and whether it does.
    """
    step, whole = 2 * node.left_weight, 2 * node.weight
    before, rest = divmod(first * step + node.weight, whole)
    if whole * (int(draws.max()) + 2) > _INT64_MAX:
        lefts = _floors(rest, step, whole, draws)
        goes_left = _floors(rest + step, step, whole, draws) > lefts
    else:
        scaled = rest + step * draws
        lefts = scaled // whole
        goes_left = scaled - lefts * whole >= whole - step
    return before, lefts, goes_left


def _floors(rest: int, step: int, whole: int, draws: np.ndarray) -> np.ndarray:
    """``(rest + step * draws) // whole``, exact for numbers of any size, such as the weights of 17 digits that a
    program computes. Floats tell the quotient wherever it is not near a whole number, which is nearly everywhere.

    Args:
        rest: In ``[0, 2 * whole)``.
        step: In ``[0, whole]``.
        draws: int64, shape ``(k,)``, at least 0.
    """
    quotients = rest / whole + draws * (step / whole)
    floors = np.floor(quotients).astype(np.int64)
    # The float of a draw, both divisions, the product and the sum are each rounded by at most 2^-53 of themselves.
    unsure = np.abs(quotients - np.rint(quotients)) <= quotients * 2.0**-50
    for place in np.flatnonzero(unsure).tolist():
        floors[place] = (rest + step * int(draws[place])) // whole
    return floors


def _tree(weights: Sequence[int]) -> _Node | int:
    """The tree over all sources with a weight."""
    heaviest_first = sorted((s for s, weight in enumerate(weights) if weight), key=lambda s: (-weights[s], s))
    # Without recursion: a tree of sources whose weights halve from one to the next is as deep as they are many.
    order: list[tuple[list[int], list[int]]] = []
    waiting = [heaviest_first]
    while waiting:
        sources = waiting.pop()
        if len(sources) > 1:
            left, right = _two_parts(sources, weights)
            order.append((left, right))
            waiting += [left, right]
    made: dict[tuple[int, ...], _Node | int] = {(s,): s for s in heaviest_first}
    for left, right in reversed(order):
        left_weight, right_weight = (sum(weights[s] for s in part) for part in (left, right))
        divisor = gcd(left_weight, left_weight + right_weight)
        node = _Node(
            left_weight // divisor,
            (left_weight + right_weight) // divisor,
            made.pop(tuple(left)),
            made.pop(tuple(right)),
        )
        made[tuple(sorted(left + right, key=lambda s: (-weights[s], s)))] = node
    (root,) = made.values()
    return root


def _two_parts(sources: list[int], weights: Sequence[int]) -> tuple[list[int], list[int]]:
    """Puts sources, the heaviest first, always to the lighter part, the left one if both weigh the same."""
    parts: tuple[list[int], list[int]] = ([], [])
    sums = [0, 0]
    for source in sources:
        lighter = int(sums[1] < sums[0])
        parts[lighter].append(source)
        sums[lighter] += weights[source]
    return parts


def _paths(root: _Node | int) -> list[tuple[int, list[tuple[_Node, bool]]]]:
    """For each source the nodes from it up to the root, each with whether it lies on the left."""
    found = []
    waiting: list[tuple[_Node | int, list[tuple[_Node, bool]]]] = [(root, [])]
    while waiting:
        node, path = waiting.pop()
        if isinstance(node, int):
            found.append((node, path))
        else:
            waiting += [(node.left, [(node, True), *path]), (node.right, [(node, False), *path])]
    return found
