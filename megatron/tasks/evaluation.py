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


def read_utf8(path: str) -> str:
    """The text of the file of --valid-data, its line ends as they are. Raises ValueError where it is no UTF-8."""
    with open(path, encoding="utf-8", newline="") as stream:
        try:
            return stream.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"--valid-data {path}: it is not UTF-8 ({error.reason} at byte {error.start})") from None
