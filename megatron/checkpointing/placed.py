"""Tensors and the places in global tensors that they hold, whole parameters and ranges of them alike."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from megatron.base.rectangles import Rectangle
from megatron.mpu.sharding import Piece


class Place(Protocol):
    """Which part of a global tensor a rank's tensor is: a `Sharding`, or a `FlatSharding` of the optimizer."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Of the whole, without padding."""

    @property
    def split_dim(self) -> int | None:
        """The dimension that is cut over the tensor ranks; None where each of them holds the same."""

    def pieces(self, local_shape: tuple[int, ...]) -> list[Piece]:
        """The rectangles of the global tensor in a tensor of `local_shape`, perhaps none."""


Placed = Mapping[str, tuple[Tensor, Place]]


def held_rectangles(tensor: Tensor, place: Place) -> list[tuple[Rectangle, Tensor]]:
    """The rectangles of the global tensor that `tensor` holds, and views of it of their shapes."""
    values = tensor.detach()
    return [
        (Rectangle(piece.offset, piece.shape), values[piece.local].view(piece.shape))
        for piece in place.pieces(tuple(tensor.shape))
    ]
