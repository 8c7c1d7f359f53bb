"""Whole tensors from the pieces that ranks hold of them, whatever the layout; copies of a piece are compared."""

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.checkpointing.placed import Placed, held_rectangles


class Piece(NamedTuple):
    """A rectangle of a global tensor: the tensor's name and shape, where in it the rectangle begins, and its values."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Whole:
    """Global tensors put together.

    Attributes:
        tensors: by name.
        apart: of each, the largest difference between the values that two ranks have of one element; 0 where all agree.
        missing: names of those of which no rank holds some element.
    """

    tensors: dict[str, Tensor]
    apart: dict[str, float]
    missing: list[str]


def as_array(tensor: Tensor) -> np.ndarray:
    """A copy of the values; NumPy has no bfloat16, of which every value is a float32."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().cpu().numpy().copy()


def pieces_of(placed: Placed) -> list[Piece]:
    """What this rank holds of global tensors; padding is in no piece."""
    return [
        Piece(name, tuple(place.global_shape), tuple(rectangle.offset), as_array(values))
        for name, (tensor, place) in placed.items()
        for rectangle, values in held_rectangles(tensor, place)
    ]


def assemble(pieces: Iterable[Piece]) -> Whole:
    """The global tensors of which all ranks together hold `pieces`."""
    whole: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    apart: dict[str, float] = {}
    for name, shape, offset, values in pieces:
        target = whole.setdefault(name, np.zeros(shape, values.dtype))
        covered = seen.setdefault(name, np.zeros(shape, bool))
        place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        apart[name] = max(apart.get(name, 0.0), _apart(target[place][covered[place]], values[covered[place]]))
        target[place], covered[place] = values, True
    missing = [name for name, covered in seen.items() if not covered.all()]
    return Whole({name: torch.from_numpy(values) for name, values in whole.items()}, apart, missing)


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two arrays; infinite where one is not a number and the other is one."""
    if np.array_equal(one, other, equal_nan=True):
        return 0.0
    with np.errstate(invalid="ignore"):
        largest = np.abs(one.astype(np.float64) - other.astype(np.float64)).max()
    return float(np.nan_to_num(largest, nan=math.inf))
