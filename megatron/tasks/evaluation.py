"""What a zero-shot evaluation is made of: windows, a measure of each, and what the numbers mean."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.tasks.measures import Measure
from megatron.tasks.windows import Window


class Figures(NamedTuple):
    """Results by name, and the lines that tell them."""

    numbers: dict[str, float]
    lines: list[str]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Windows, what is asked of the model about each, and the results that its numbers for each come to."""

    windows: list[Window]
    measure: Measure
    figures: Callable[[Sequence[Sequence[float]]], Figures]
