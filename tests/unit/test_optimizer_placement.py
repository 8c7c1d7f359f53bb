"""Ranges of flattened parameters, of all tensor ranks together, hold each element of the global tensor exactly once."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.base.rectangles import Rectangle, cover_problem
from megatron.mpu.sharding import Piece, Sharding
from megatron.optimizer.placement import FlatSharding


def parts_of(
    shape: tuple[int, ...], dim: int, partitions: int, stride: int, chunk: int
) -> list[tuple[Tensor, Sharding]]:
    """What each tensor rank holds of the tensor of its elements' numbers; padding is -1. Cut by torch alone."""
    whole = torch.arange(math.prod(shape)).view(shape)
    padding = [*shape]
    padding[dim] = partitions * stride * chunk - shape[dim]
    chunks = torch.cat([whole, torch.full(padding, -1)], dim).split(chunk, dim)
    return [
        (torch.cat(chunks[rank::partitions], dim), Sharding("w", shape, dim, rank * chunk, stride, partitions))
        for rank in range(partitions)
    ]


@st.composite
def cut_tensors(draw: st.DrawFn) -> list[tuple[Tensor, Sharding]]:
    """A global tensor over tensor ranks: by any dimension, in strides, and padded where it does not divide."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    dim, partitions, stride = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    chunk = math.ceil(shape[dim] / (partitions * stride)) + draw(st.integers(0, 1))
    return parts_of(shape, dim, partitions, stride, chunk)


@settings(deadline=None)
@given(st.data(), cut_tensors(), st.integers(1, 5))
def test_each_element_is_in_one_range(data: st.DataObject, ranks: list[tuple[Tensor, Sharding]], shards: int) -> None:
    shape = ranks[0][1].global_shape
    whole = torch.full(shape, -1)
    rectangles = []
    for local, sharding in ranks:
        cuts = sorted(data.draw(st.lists(st.integers(0, local.numel()), min_size=shards - 1, max_size=shards - 1)))
        for begin, end in pairwise([0, *cuts, local.numel()]):
            place = FlatSharding(sharding, tuple(local.shape), begin, end)
            flat = local.reshape(-1)[begin:end]
            for piece in place.pieces((end - begin,)):
                rectangles.append(Rectangle(piece.offset, piece.shape))
                whole[piece.region] = flat[piece.local].view(piece.shape)
    assert cover_problem(shape, rectangles) is None
    assert torch.equal(whole, torch.arange(whole.numel()).view(shape))


def test_replicated_and_empty() -> None:
    matrix = Sharding("w", (4, 3), None, 0)
    assert FlatSharding(matrix, (4, 3), 5, 5).pieces((0,)) == []
    assert FlatSharding(matrix, (4, 3), 2, 11).pieces((9,)) == [
        Piece((slice(0, 1),), (0, 2), (1, 1)),
        Piece((slice(1, 7),), (1, 0), (2, 3)),
        Piece((slice(7, 9),), (3, 0), (1, 2)),
    ]
    assert FlatSharding(Sharding("c", (), None, 0), (), 0, 1).pieces((1,)) == [Piece((slice(0, 1),), (), ())]


def test_it_says_of_itself_what_its_sharding_says() -> None:
    place = FlatSharding(Sharding("w", (5, 3), 0, 4, 1, 2), (4, 3), 0, 12)
    assert (place.name, place.global_shape, place.split_dim) == ("w", (5, 3), 0)
    assert place.pieces((12,)) == [Piece((slice(0, 3),), (4, 0), (1, 3))]  # 3 of its 4 rows are padding
    with pytest.raises(AssertionError):
        place.pieces((11,))
