"""Where a range of a flattened parameter lies in the whole tensor, so that checkpoints can cut it anew."""

import dataclasses
from collections.abc import Iterator

from megatron.base.rectangles import Rectangle, contiguous_parts, intersection, number_of, rectangles_of_range
from megatron.mpu.sharding import Piece, Sharding


@dataclasses.dataclass(frozen=True)
class FlatSharding:
    """Which part of a global tensor a range of a rank's flattened parameter is.

    Attributes:
        sharding: of the whole parameter on this rank.
        parameter_shape: the parameter's shape on this rank.
        begin, end: the elements `begin` to `end` (not included) of it in row-major order; none where they are equal.
    """

    sharding: Sharding
    parameter_shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def name(self) -> str:
        """Of the global tensor."""
        return self.sharding.name

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Of the whole, without the padding rows of a vocabulary."""
        return self.sharding.global_shape

    @property
    def split_dim(self) -> int | None:
        """The dimension that is cut over the tensor ranks; None where each of them holds the whole parameter."""
        return self.sharding.split_dim

    def pieces(self, local_shape: tuple[int, ...]) -> list[Piece]:
        """The rectangles of the global tensor in a 1-D tensor of `end - begin` elements, in its order.

        A piece's `local` is one slice, whose elements are those of a tensor of the piece's `shape`. Of a matrix split
        by rows there are at most three: the tail of a row, whole rows, the head of a row. Padding is in no piece.
        """
        assert tuple(local_shape) == (self.end - self.begin,), f"{self.name}: {local_shape} is not {self}"
        return sorted(self._pieces(), key=lambda piece: piece.local[0].start)

    def _pieces(self) -> Iterator[Piece]:
        parts = list(rectangles_of_range(self.parameter_shape, self.begin, self.end))
        for held in self.sharding.pieces(self.parameter_shape):
            origin = tuple(s.start for s in held.local)
            overlaps = [intersection(Rectangle(origin, held.shape), part) for part in parts]
            for both in filter(None, overlaps):
                for run in contiguous_parts(self.parameter_shape, both):
                    first = number_of(self.parameter_shape, run.offset) - self.begin
                    moved = zip(run.offset, origin, held.offset, strict=True)
                    offset = tuple(i - local + whole for i, local, whole in moved)
                    yield Piece((slice(first, first + run.size),), offset, run.shape)
