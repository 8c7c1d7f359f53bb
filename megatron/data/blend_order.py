"""The order in which a blend draws from its sets: the greedy rule of Megatron-LM 2.5, compiled.

Each choice depends on all before it, so that NumPy cannot make them together; numba compiles the loop when it is first
asked for, which takes some seconds, and only runs with a blend import this file.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

_BLOCK = 64  # choices between two looks at all groups
_BINS = 1024  # of what sets miss, from one sample too many to two too few, which are the bounds of the rule


class Groups(NamedTuple):
    """Sets of equal weight, which are chosen in turn: those of group g are `members[starts[g] : starts[g + 1]]`.

    Its next set is the `turn[g]`th of them; `rounds[g]` is how many samples that one has given.
    """

    weights: np.ndarray  # float64 [groups]
    members: np.ndarray  # int64 [sets], rising in each group
    starts: np.ndarray  # int64 [groups + 1]
    turn: np.ndarray  # int64 [groups]
    rounds: np.ndarray  # float64 [groups]


def group(weights: np.ndarray) -> Groups:
    """Groups of which nothing has been chosen."""
    distinct, group_of, sizes = np.unique(weights, return_inverse=True, return_counts=True)
    members, starts = np.argsort(group_of, kind="stable"), np.concatenate([[0], np.cumsum(sizes)])
    return Groups(distinct, members, starts, np.zeros(len(sizes), np.int64), np.zeros(len(sizes)))


@njit
def _bin(missing):  # type: ignore[no-untyped-def]
    """A number that does not fall where `missing` grows."""
    return min(max(int((missing + 1.0) * (_BINS / 3.0)), 0), _BINS - 1)


@njit
def _candidates(groups, first, bins, found):  # type: ignore[no-untyped-def]
    """Put the groups that can be chosen in `_BLOCK` choices from number `first` on into `found`; returns how many.

    What is missing from a set, `weight * i - samples taken`, grows from choice to choice until the set is chosen. Of
    any `_BLOCK` sets one is still not chosen at any time in the block: the choice misses at least as much as the least
    of these does now. A group that will be in a lower bin than these even at the end of the block is out.
    """
    weights, _, starts, turn, rounds = groups
    now, later = float(max(first, 1)), float(first + _BLOCK)
    bins[:] = 0
    for g in range(len(weights)):
        bins[_bin(weights[g] * now - rounds[g])] += starts[g + 1] - starts[g] - turn[g]
        if turn[g]:
            bins[_bin(weights[g] * now - (rounds[g] + 1.0))] += turn[g]
    least, above = _BINS, 0
    while least > 0 and above < _BLOCK:
        least -= 1
        above += bins[least]
    count = 0
    for g in range(len(weights)):
        found[count] = g
        count += _bin(weights[g] * later - rounds[g]) >= least
    return count


@njit
def _draw(groups, sets, numbers):  # type: ignore[no-untyped-def]
    """Fill `sets` and `numbers` [n]; returns how far a set was ahead and behind at most."""
    weights, members, starts, turn, rounds = groups
    ahead, behind = 0.0, 0.0
    found, bins = np.empty(len(weights) + 1, np.int64), np.empty(_BINS, np.int64)
    count = 0
    for i in range(len(sets)):
        if i % _BLOCK == 0:
            count = _candidates(groups, i, bins, found)
        most, best, chosen = -np.inf, 0, 0
        for g in found[:count]:
            missing = weights[g] * float(max(i, 1)) - rounds[g]
            if missing >= most:
                member = members[starts[g] + turn[g]]
                if missing > most or member < chosen:
                    most, best, chosen = missing, g, member
        if i > 0:
            behind = max(behind, most)
        sets[i] = chosen
        numbers[i] = int(rounds[best])
        ahead = max(ahead, rounds[best] + 1.0 - weights[best] * float(i + 1))
        turn[best] += 1
        if starts[best] + turn[best] == starts[best + 1]:
            turn[best] = 0
            rounds[best] += 1.0
    return ahead, max(behind, (weights * float(len(sets)) - rounds).max())


def draw_order(weights: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, float, float]:
    """The set of each of `n` samples, and its number in that set, for `weights` float64 [sets] that add up to 1.

    Sample i comes from the set with the largest `weight * max(i, 1) - samples taken from it`, the first of equals.

    Returns:
        sets: uint8 [n], or wider where there are more sets.
        numbers: int64 [n].
        ahead, behind: the most samples by which a set was ahead of and behind its weight at any time.
    """
    sets = np.empty(n, np.min_scalar_type(len(weights) - 1))
    numbers = np.empty(n, np.int64)
    ahead, behind = _draw(group(weights), sets, numbers)
    return sets, numbers, float(ahead), float(behind)
