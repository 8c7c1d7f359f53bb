"""Rectangle arithmetic against enumeration of elements."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron.base.rectangles import (
    Rectangle,
    contiguous_parts,
    cover_problem,
    intersection,
    number_of,
    rectangles_of_range,
)

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def elements(shape: tuple[int, ...], rectangle: Rectangle) -> list[int]:
    """Row-major numbers of the elements of a rectangle, in row-major order."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers[rectangle.slices((0,) * len(shape))].ravel().tolist()


@st.composite
def rectangles(draw: st.DrawFn, shape: tuple[int, ...]) -> Rectangle:
    begin = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Rectangle(begin, tuple(draw(st.integers(1, n - b)) for n, b in zip(shape, begin, strict=True)))


@given(st.data(), SHAPES)
def test_a_range_is_its_rectangles_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    parts = list(rectangles_of_range(shape, begin, end))
    assert [n for part in parts for n in elements(shape, part)] == list(range(begin, end))
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    assert all(part.within(shape) and part.size for part in parts)


def test_a_range_of_a_matrix_is_at_most_a_tail_rows_and_a_head() -> None:
    assert list(rectangles_of_range((10, 4), 3, 37)) == [((0, 3), (1, 1)), ((1, 0), (8, 4)), ((9, 0), (1, 1))]
    assert list(rectangles_of_range((10, 4), 4, 40)) == [((1, 0), (9, 4))]
    assert list(rectangles_of_range((10, 4), 5, 7)) == [((1, 1), (1, 2))]


@given(st.data(), SHAPES)
def test_intersection(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(rectangles(shape)), data.draw(rectangles(shape))
    both = intersection(a, b)
    expected = set(elements(shape, a)) & set(elements(shape, b))
    assert (set(elements(shape, both)) if both else set()) == expected


@given(st.data(), SHAPES)
def test_contiguous_parts_are_runs_in_order_and_as_few_as_can_be(data: st.DataObject, shape: tuple[int, ...]) -> None:
    rectangle = data.draw(rectangles(shape))
    parts = list(contiguous_parts(shape, rectangle))
    for part in parts:
        begin = number_of(shape, part.offset)
        assert elements(shape, part) == list(range(begin, begin + part.size))
    whole = elements(shape, rectangle)
    assert [n for part in parts for n in elements(shape, part)] == whole
    assert len(parts) == 1 + sum(after != before + 1 for before, after in zip(whole, whole[1:], strict=False))


@given(st.data(), SHAPES)
def test_cover_by_counting_each_element(data: st.DataObject, shape: tuple[int, ...]) -> None:
    pieces = data.draw(st.lists(rectangles(shape), max_size=6))
    counts = np.zeros(math.prod(shape), dtype=int)
    for piece in pieces:
        counts[elements(shape, piece)] += 1
    problem = cover_problem(shape, pieces)
    assert (problem is None) == bool((counts == 1).all())
    if counts.max() > 1:
        assert problem is not None and "overlap" in problem
    elif problem is not None:
        assert problem.startswith(f"{(counts == 0).sum()} of its {counts.size} elements are in no piece")


@given(st.data(), SHAPES, st.integers(1, 9))
def test_ranges_cover_their_tensor(data: st.DataObject, shape: tuple[int, ...], parts: int) -> None:
    size = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), min_size=parts, max_size=parts)))
    pieces = [r for a, b in zip([0, *cuts], [*cuts, size], strict=True) for r in rectangles_of_range(shape, a, b)]
    assert cover_problem(shape, data.draw(st.permutations(pieces))) is None


def test_pieces_outside_are_named() -> None:
    assert "is not inside [4, 3]" in str(cover_problem((4, 3), [Rectangle((2, 0), (3, 3))]))
    assert "is not inside [4, 3]" in str(cover_problem((4, 3), [Rectangle((0,), (4,))]))
    assert cover_problem((0, 3), []) is None
    assert cover_problem((0, 3), [Rectangle((0, 0), (0, 3))]) is None
    assert cover_problem((), [Rectangle((), ())]) is None
    assert "overlap" in str(cover_problem((), [Rectangle((), ())] * 2))
    assert "1 of its 1" in str(cover_problem((), []))


def test_many_row_pieces_are_checked_quickly() -> None:
    rows = [Rectangle((i, 0), (1, 8)) for i in range(100_000)]
    assert cover_problem((100_000, 8), rows) is None
    assert "overlap" in str(cover_problem((100_000, 8), [*rows, rows[70_000]]))
