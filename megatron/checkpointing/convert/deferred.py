"""Tensors that are read when they are needed, so that one at a time is in memory."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Readable(Protocol):
    """A tensor that is somewhere, and what is known of it before it is read."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""

    def read(self) -> Tensor:
        """Its values, on the CPU, read or computed anew at each call."""


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A tensor of known dtype and shape that `make` makes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    def read(self) -> Tensor:
        """Its values."""
        made = self.make()
        assert (made.dtype, tuple(made.shape)) == (self.dtype, self.shape), (made.dtype, made.shape, self)
        return made


def same_values(a: Readable, b: Readable) -> bool:
    """Whether two tensors are equal in dtype, shape and every value."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.read(), b.read())


def in_dtype(tensor: Readable, dtype: torch.dtype) -> Readable:
    """The same tensor in `dtype`."""
    return tensor if tensor.dtype == dtype else Deferred(dtype, tensor.shape, lambda: tensor.read().to(dtype))
