"""Stretches of tokens of which a model scores the last ones, in batches of like ones."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Window(NamedTuple):
    """The model reads all of `ids` but the last, int64, and the last `scored` of them are what it should have said."""

    ids: NDArray[np.int64]
    scored: int


class WindowBatch(NamedTuple):
    """Windows side by side: their inputs [b, s], with zeros behind short ones; places and ids to score, [b, k] each."""

    numbers: list[int]
    tokens: Tensor
    places: Tensor
    labels: Tensor


def batch_numbers(windows: Sequence[Window], size: int) -> list[list[int]]:
    """The numbers of the windows, each once, in batches of up to `size` that score equally many tokens."""
    order = sorted(range(len(windows)), key=lambda i: (windows[i].scored, len(windows[i].ids)))
    alike = itertools.groupby(order, key=lambda i: windows[i].scored)
    return [batch for _, group in alike for batch in _of_size(list(group), size)]


def _of_size(numbers: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(numbers), size):
        yield numbers[start : start + size]


def make_batch(windows: Sequence[Window], numbers: list[int], device: torch.device) -> WindowBatch:
    """The batch of the windows of these numbers, which score equally many tokens."""
    chosen = [windows[i] for i in numbers]
    scored = chosen[0].scored
    tokens = torch.zeros(len(chosen), max(len(one.ids) for one in chosen) - 1, dtype=torch.int64)  # [b, s]
    for row, one in zip(tokens, chosen, strict=True):
        row[: len(one.ids) - 1] = torch.from_numpy(one.ids[:-1])
    places = torch.tensor([range(len(one.ids) - 1 - scored, len(one.ids) - 1) for one in chosen])  # [b, k]
    labels = torch.from_numpy(np.stack([one.ids[-scored:] for one in chosen]))  # [b, k]
    return WindowBatch(numbers, tokens.to(device), places.to(device), labels.to(device))
