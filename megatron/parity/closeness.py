"""What "equal" means: the largest difference against the largest value of a tensor."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Difference:
    """The element at which a tensor differs most from the expected one.

    Attributes:
        worst: how much it differs there; infinite where one of the two has values that are not finite.
        scale: the largest expected value, or the floor that was given where that is above it.
        position: the element.
        actual, expected: its two values.
    """

    worst: float
    scale: float
    position: tuple[int, ...]
    actual: float
    expected: float

    @property
    def relative(self) -> float:
        """`worst` over `scale`."""
        if self.worst == 0.0:
            return 0.0
        return self.worst / self.scale if self.scale > 0 else math.inf

    def within(self, tolerance: float) -> bool:
        """Whether the tensors are close: `worst <= tolerance * scale`."""
        return self.worst <= tolerance * self.scale


def difference(actual: Any, expected: Any, floor: float = 0.0) -> Difference:
    """How far `actual` is from `expected`, tensors, arrays or numbers of one shape, the latter perhaps of wider dtype.

    Elementwise relative comparison is not used: where exact arithmetic gives zero, rounding leaves noise.

    Args:
        floor: scale below which the largest expected value does not count, such as the model's largest gradient.

    Raises ValueError where the shapes differ.
    """
    mine, theirs = as_float64(actual), as_float64(expected)
    if mine.shape != theirs.shape:
        raise ValueError(f"shape {tuple(mine.shape)}, expected {tuple(theirs.shape)}")
    if theirs.numel() == 0:
        return Difference(0.0, floor, (), 0.0, 0.0)
    apart = (mine - theirs).abs().nan_to_num(nan=math.inf)
    index = int(apart.argmax())
    position = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), theirs.shape))
    scale = max(theirs.abs().nan_to_num(nan=0.0, posinf=0.0).max().item(), floor)
    return Difference(apart.max().item(), scale, position, mine.flatten()[index].item(), theirs.flatten()[index].item())


def as_float64(value: Any) -> Tensor:
    """A tensor, array or number as a tensor of float64 on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64)
    return torch.as_tensor(value, dtype=torch.float64)  # a plain number would become float32 first
