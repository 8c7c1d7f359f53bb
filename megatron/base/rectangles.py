"""Arithmetic of rectangles: parts of a tensor given by an offset and a shape, one number for each dimension."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self


class Rectangle(NamedTuple):
    """The elements `offset[i] <= index[i] < offset[i] + shape[i]` of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """All of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def within(self, shape: Sequence[int]) -> bool:
        """Whether it lies inside a tensor of `shape`, with as many dimensions."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= total for o, n, total in zip(self.offset, self.shape, shape, strict=True)
        )

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """How to index it in an array whose first element is the element `origin` of the tensor."""
        return tuple(slice(o - b, o - b + n) for o, n, b in zip(self.offset, self.shape, origin, strict=True))


def intersection(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """The elements in both, None where there are none."""
    begin = tuple(map(max, a.offset, b.offset))
    end = tuple(min(ao + an, bo + bn) for ao, an, bo, bn in zip(*a, *b, strict=True))
    shape = tuple(e - s for s, e in zip(begin, end, strict=True))
    return Rectangle(begin, shape) if all(n > 0 for n in shape) else None


def rectangles_of_range(shape: Sequence[int], begin: int, end: int) -> Iterator[Rectangle]:
    """The elements `begin` to `end` (not included) of a tensor of `shape` in row-major order, as rectangles.

    They come in that order and each is contiguous in it: of a matrix at most the tail of a row, whole rows and the head
    of a row.
    """
    if begin >= end:
        return
    if len(shape) <= 1:
        yield Rectangle((begin,), (end - begin,)) if shape else Rectangle((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the whole rows
    if first > last:  # all inside one row
        yield from _in_row(shape, last, begin - last * row, end - last * row)
        return
    yield from _in_row(shape, first - 1, begin - (first - 1) * row, row if begin < first * row else 0)
    if first < last:
        yield Rectangle((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: Sequence[int], row: int, begin: int, end: int) -> Iterator[Rectangle]:
    for inner in rectangles_of_range(shape[1:], begin, end):
        yield Rectangle((row, *inner.offset), (1, *inner.shape))


def number_of(shape: Sequence[int], index: Sequence[int]) -> int:
    """Which element of a tensor of `shape`, in row-major order, stands at `index`."""
    number = 0
    for size, i in zip(shape, index, strict=True):
        number = number * size + i
    return number


def contiguous_parts(shape: Sequence[int], rectangle: Rectangle) -> Iterator[Rectangle]:
    """`rectangle` of a tensor of `shape` cut into parts whose elements follow one another in row-major order.

    They come in that order, as few as can be, and there are none of a rectangle without elements.
    """
    if not rectangle.size:
        return
    # Dimensions after `last` are held whole, so that only those before it need to be cut into single indices.
    last = max((d for d, size in enumerate(shape) if rectangle.shape[d] != size), default=0)
    single = [range(o, o + n) for o, n in zip(rectangle.offset[:last], rectangle.shape[:last], strict=True)]
    for index in itertools.product(*single):
        yield Rectangle((*index, *rectangle.offset[last:]), (*(1 for _ in index), *rectangle.shape[last:]))


def cover_problem(shape: Sequence[int], pieces: Sequence[Rectangle]) -> str | None:
    """What is wrong where `pieces` do not cover a tensor of `shape` exactly once; None where they do."""
    for piece in pieces:
        if not piece.within(shape):
            return f"the piece at {list(piece.offset)} of shape {list(piece.shape)} is not inside {list(shape)}"
    overlap = _first_overlap([piece for piece in pieces if piece.size])
    if overlap is not None:
        return f"the pieces at {list(overlap[0].offset)} and {list(overlap[1].offset)} overlap"
    missing = math.prod(shape) - sum(piece.size for piece in pieces)
    return f"{missing} of its {math.prod(shape)} elements are in no piece" if missing else None


def _first_overlap(pieces: list[Rectangle]) -> tuple[Rectangle, Rectangle] | None:
    """Two pieces that share an element. Sweeps along the first dimension, so that rows cost no pairs."""
    if pieces and not pieces[0].shape:
        return (pieces[0], pieces[1]) if len(pieces) > 1 else None
    open_pieces: list[Rectangle] = []
    for piece in sorted(pieces):
        open_pieces = [other for other in open_pieces if other.offset[0] + other.shape[0] > piece.offset[0]]
        for other in open_pieces:
            if intersection(piece, other) is not None:
                return other, piece
        open_pieces.append(piece)
    return None
