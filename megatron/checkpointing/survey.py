"""Looks at a checkpoint without a model: what it holds, whether it is whole, how two of them differ."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.rectangles import Rectangle
from megatron.checkpointing.errors import DamageError
from megatron.checkpointing.index import Index, StoredTensor, dtype_of
from megatron.checkpointing.load import check_files, find, read_index, read_state_of
from megatron.checkpointing.reader import PieceReader


@dataclasses.dataclass(frozen=True)
class Survey:
    """A checkpoint whose index was read."""

    folder: Path
    index: Index

    @classmethod
    def of(cls, directory: str | os.PathLike[str], iteration: int | None = None) -> "Survey":
        """The checkpoint of `iteration`, by default the tracker's. Raises ValueError where its index is not whole."""
        folder, number = find(Path(directory), iteration)
        return cls(folder, read_index(folder, number)[0])

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What the ranks share, by global name."""
        return self.index.contents.tensors

    def state(self) -> dict[str, Any]:
        """The plain values. Raises `DamageError` where they are not whole."""
        return read_state_of(self.folder, self.index)

    def problems(self, *, verify: bool = False) -> Iterator[str]:
        """A sentence for each thing that is not as it was saved; with `verify` every stored byte is read for it."""
        for check in (self.state, lambda: check_files(self.folder, self.index), self.index.contents.check_cover):
            try:
                check()
            except DamageError as error:
                yield str(error)
        if verify:
            with PieceReader(self.folder, self.index.block_bytes) as reader:
                yield from reader.problems(self.index.contents.all_tensors())

    def read(self, name: str) -> Tensor:
        """A whole tensor that the ranks share. Raises `DamageError` where it is not what was saved."""
        return self.read_stored(self.tensors[name])

    def read_stored(self, stored: StoredTensor) -> Tensor:
        """A whole tensor, of the ranks together or of one. Raises `DamageError` where it is not what was saved."""
        values = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
        with PieceReader(self.folder, self.index.block_bytes) as reader:
            reader.read([(stored, [(Rectangle.whole(stored.shape), values)])])
        return values


def differences(a: Survey, b: Survey) -> Iterator[str]:
    """A sentence for each tensor and each plain value that is not the same in both; one tensor of each in memory.

    What belongs to the ranks alone, such as their random generators, is compared where both have one layout.
    """
    own = a.index.layout == b.index.layout
    one, other = ({t.name: t for t in _tensors(survey, own)} for survey in (a, b))
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            yield f"{name}: only in the {'first' if name in one else 'second'}"
            continue
        kinds = [f"{t.dtype} {list(t.shape)}" for t in (one[name], other[name])]
        if kinds[0] != kinds[1]:
            yield f"{name}: {kinds[0]} and {kinds[1]}"
        elif (words := _difference(a.read_stored(one[name]), b.read_stored(other[name]))) is not None:
            yield f"{name}: {words}"
    yield from _value_differences(a.index.layout, b.index.layout, "layout")
    yield from _value_differences(a.state(), b.state(), "state")


def _tensors(survey: Survey, own: bool) -> Iterable[StoredTensor]:
    """What the ranks share and, with `own`, what belongs to each alone."""
    return survey.index.contents.all_tensors() if own else survey.tensors.values()


def _difference(a: Tensor, b: Tensor) -> str | None:
    """In words, how far two tensors of one shape and dtype are apart; None where all bits are equal."""
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)]
    if torch.equal(*bits):
        return None
    apart, largest = (a.double() - b.double()).abs().max().item(), b.double().abs().max().item()
    return f"{apart:.3g} apart at most, of values up to {largest:.3g}"


def _value_differences(a: Any, b: Any, where: str) -> Iterator[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from _value_differences(a.get(key), b.get(key), f"{where}.{key}")
    elif a != b and not (a != a and b != b):  # NaN is not equal to itself
        yield f"{where}: {a!r} and {b!r}"
