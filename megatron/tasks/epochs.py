"""Examples in the order in which they are trained on, epoch after epoch, and in which they are evaluated."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron import mpu
from megatron.data.identity import SetPart
from megatron.tasks.examples import ExampleSet


def iterations_per_epoch(examples: int, batch: int, *, keep_last: bool) -> int:
    """Global batches of `batch` examples in an epoch: whole ones alone, or with `keep_last` the rest as one more."""
    return -(-examples // batch) if keep_last else examples // batch


def weighted(examples: ExampleSet, number: int | None) -> dict[str, Any]:
    """A sample of `examples`, with its number and what it weighs in loss and accuracy.

    number: int64 [], that of the example; -1 for None, which is filling.
    weight: float32 [], 1; 0 for filling, which only keeps batches equally large.
    """
    return {
        **examples[0 if number is None else number],
        "number": np.array(-1 if number is None else number, np.int64),
        "weight": np.array(float(number is not None), np.float32),
    }


class Epochs:
    """`epochs` times all examples, each time in another order: sample i belongs to iteration i // batch.

    The order of an epoch depends on seed and epoch alone, not on ranks or batches. An epoch has
    `iterations_per_epoch` global batches of `batch` samples. Where they do not divide its examples, those at the end of
    the epoch's order are not seen in this epoch; with `keep_last` they are one more batch, whose other samples are
    filling, so that its loss is the mean over fewer examples.
    """

    def __init__(
        self,
        examples: ExampleSet,
        epochs: int,
        *,
        batch: int,
        seed: int,
        keep_last: bool = False,
        report: Sequence[str] = (),
    ) -> None:
        self._examples = examples
        self._epochs = epochs
        self._seed = seed
        self._length = batch * iterations_per_epoch(len(examples), batch, keep_last=keep_last)
        self._report = report
        self._order = functools.lru_cache(maxsize=2)(self._drawn_order)

    def __len__(self) -> int:
        return self._epochs * self._length

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        epoch, place = divmod(i, self._length)
        return weighted(self._examples, int(self._order(epoch)[place]) if place < len(self._examples) else None)

    def __getstate__(self) -> dict[str, Any]:  # a worker process that is spawned remembers anew
        return {name: value for name, value in vars(self).items() if name != "_order"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._order = functools.lru_cache(maxsize=2)(self._drawn_order)

    def identity(self) -> list[SetPart]:
        """What it draws from, to tell from other examples."""
        return [self._examples.identity()]

    def report(self) -> list[str]:
        """Lines that tell what it is: what is in `report` by now."""
        return list(self._report)

    def _drawn_order(self, epoch: int) -> NDArray[np.int64]:
        """A permutation of the numbers of the examples."""
        seed = mpu.derive_seed(self._seed, "epoch", epoch) & 0xFFFFFFFF
        return np.random.RandomState(seed).permutation(len(self._examples))


class OncePadded:
    """Every example once, in order, and filling behind them up to a multiple of `batch`.

    So all data-parallel ranks have equally many samples, and no example is left out or seen twice.
    """

    def __init__(self, examples: ExampleSet, *, batch: int) -> None:
        self._examples = examples
        self._length = batch * iterations_per_epoch(len(examples), batch, keep_last=True)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> dict[str, Any]:
        return weighted(self._examples, i if i < len(self._examples) else None)
