"""The order in which a blend draws from its sets: the greedy rule of Megatron-LM 2.5, compiled.

Each choice depends on all before it, so that NumPy cannot make them together; numba compiles the loop when it is first
asked for (about a second), and only runs with a blend import this file.
"""

import numpy as np
from numba import njit

_BLOCK = 32  # choices between two looks at all sets


@njit
def _candidates(weights, taken, first, block, found):  # type: ignore[no-untyped-def]
    """Put the sets that can be chosen in `block` choices from number `first` on into `found`; returns how many.

    What is missing from a set, `weights[d] * i - taken[d]`, grows from choice to choice until the set is chosen. Of the
    `block` sets that miss most now, one is still not chosen at any time in the block: the choice misses at least as
    much as the least of these does now. A set that will miss less even at the end of the block is out.
    """
    now, later = float(max(first, 1)), float(first + block)
    missing = weights * now - taken
    place = len(missing) - block
    least = np.partition(missing, place)[place] if place > 0 else -np.inf
    count = 0
    for d in range(len(weights)):
        if weights[d] * later - taken[d] >= least:
            found[count] = d
            count += 1
    return count


@njit
def _draw(weights, taken, sets, numbers):  # type: ignore[no-untyped-def]
    """Fill `sets` and `numbers` [n], count in `taken`; returns how far a set was ahead and behind at most."""
    ahead, behind = 0.0, 0.0
    found = np.empty(len(weights), np.int64)
    count = 0
    for i in range(len(sets)):
        if i % _BLOCK == 0:
            count = _candidates(weights, taken, i, _BLOCK, found)
        most, best = -np.inf, 0
        for k in range(count):
            d = found[k]
            missing = weights[d] * float(max(i, 1)) - taken[d]
            if missing > most:
                most, best = missing, d
        if i > 0:
            behind = max(behind, most)
        sets[i] = best
        numbers[i] = int(taken[best])
        taken[best] += 1.0
        ahead = max(ahead, taken[best] - weights[best] * float(i + 1))
    return ahead, max(behind, (weights * float(len(sets)) - taken).max())


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
    ahead, behind = _draw(weights, np.zeros(len(weights)), sets, numbers)
    return sets, numbers, float(ahead), float(behind)
