"""Train, validation and test shares of a token set, by Megatron-LM 2.5's rule."""

import math

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, float, float]:
    """`"949,50,1"` -> the three weights divided by their sum; slashes may stand for commas, missing weights are 0.

    ValueError for anything but one to three numbers >= 0 of which one is positive.
    """
    parts = text.replace("/", ",").split(",")
    try:
        weights = [float(part) for part in parts]
    except ValueError:
        weights = []
    usable = 0 < len(weights) <= 3 and all(math.isfinite(w) and w >= 0 for w in weights) and sum(weights) > 0
    if not usable:
        raise ValueError(f"--split {text}: accepted are one to three weights >= 0 with a positive sum, as 949,50,1")
    weights += [0.0] * (3 - len(weights))
    total = sum(weights)
    return weights[0] / total, weights[1] / total, weights[2] / total


def split_boundaries(weights: tuple[float, float, float], n: int) -> list[int]:
    """Boundaries [0, a, b, n] of the three shares of `n` sequences: share i is `boundaries[i]` to `boundaries[i+1]`.

    Each share is rounded by itself (halves to even), then every boundary after the first is moved by the excess of the
    sum over `n`.
    """
    boundaries = [0]
    for weight in weights:
        boundaries.append(boundaries[-1] + round(weight * n))
    excess = boundaries[-1] - n
    # An empty first share can be moved below 0, where 2.5 wraps around to the end of the set: it is empty here.
    return [0] + [max(boundary - excess, 0) for boundary in boundaries[1:]]
