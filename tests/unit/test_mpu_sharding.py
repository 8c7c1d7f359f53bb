"""Shardings: the pieces of all ranks together are the whole, exactly once; the attributes mirror them."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron import mpu
from megatron.mpu.sharding import Sharding


def shards(whole: torch.Tensor, dim: int, ranks: int, stride: int) -> list[torch.Tensor]:
    """What each rank holds by the rule: of `stride * ranks` chunks it takes every `ranks`-th."""
    chunks = whole.chunk(stride * ranks, dim)
    return [torch.cat(chunks[rank::ranks], dim) for rank in range(ranks)]


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1), st.integers(0, 20)
)
def test_pieces_rebuild_the_whole(ranks: int, stride: int, chunk: int, other: int, dim: int, padding: int) -> None:
    size = ranks * stride * chunk
    real = max(1, size - padding)
    shape = (size, other) if dim == 0 else (other, size)
    whole = torch.arange(size * other).view(shape)
    clipped = (real, other) if dim == 0 else (other, real)
    rebuilt, times = torch.zeros(clipped, dtype=torch.int64), torch.zeros(clipped)
    for rank, local in enumerate(shards(whole, dim, ranks, stride)):
        sharding = Sharding("w", clipped, dim, rank * chunk, stride, ranks)
        for piece in sharding.pieces(tuple(local.shape)):
            assert local[piece.local].shape == piece.shape
            rebuilt[piece.region] = local[piece.local]
            times[piece.region] += 1
    assert torch.equal(rebuilt, whole[: clipped[0], : clipped[1]])
    assert times.eq(1).all()


def test_a_rank_of_padding_alone_has_no_piece() -> None:
    assert Sharding("weight", (5, 3), 0, offset=6, partitions=4).pieces((2, 3)) == []
    (piece,) = Sharding("weight", (5, 3), 0, offset=4, partitions=4).pieces((2, 3))
    assert (piece.local, piece.offset, piece.shape) == ((slice(0, 1), slice(0, 3)), (4, 0), (1, 3))


def test_one_rank_has_one_piece_whatever_the_stride() -> None:
    assert len(Sharding("weight", (12, 3), 0, 0, stride=3).pieces((12, 3))) == 1


class Model(nn.Module):
    """A tied embedding, a norm that says nothing, and a head that borrows the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8, bias=False)
        self.embedding = mpu.VocabParallelEmbedding(8, 4, real_num_embeddings=7)
        self.head.weight = self.embedding.weight
        self.norm = nn.LayerNorm(4)
        self.row = mpu.RowParallelLinear(4, 4, stride=2)
        self.scale = nn.Parameter(torch.ones(()))


def test_shardings_of_a_model() -> None:
    found = mpu.parameter_shardings(Model())
    assert list(found) == ["scale", "head.weight", "norm.weight", "norm.bias", "row.weight", "row.bias"]
    assert found["head.weight"] == Sharding("head.weight", (7, 4), 0, 0)
    assert found["row.weight"] == Sharding("row.weight", (4, 4), 1, 0, stride=2)
    for name, shape in (("norm.weight", (4,)), ("row.bias", (4,)), ("scale", ())):
        assert found[name] == Sharding(name, shape, None, 0)
        (piece,) = found[name].pieces(shape)
        assert piece.shape == shape


def test_gradients_of_a_sequence_shard_are_partial_also_under_full_names() -> None:
    model = nn.ModuleDict({"row": mpu.RowParallelLinear(4, 4, sequence_parallel=True), "norm": nn.LayerNorm(4)})
    norm = model["norm"]
    norm.sharding = {"weight": mpu.replicated("weight", model.get_parameter("norm.weight"), partial_gradient=True)}  # type: ignore[assignment]
    found = mpu.parameter_shardings(model)
    assert found["row.bias"] == Sharding("row.bias", (4,), None, 0, partial_gradient=True)
    assert {name for name, sharding in found.items() if sharding.partial_gradient} == {"row.bias", "norm.weight"}


def marks(parameter: torch.Tensor) -> tuple[object, ...]:
    return tuple(getattr(parameter, n, None) for n in ("tensor_model_parallel", "partition_dim", "partition_stride"))


def test_attributes_mirror_the_shardings_again_after_they_are_lost() -> None:
    with torch.device("meta"):
        model = Model()
    expected = {"head.weight": (True, 0, 1), "row.weight": (True, 1, 2), "row.bias": (False, -1, 1)}
    assert marks(model.row.weight) == (True, 1, 2)
    model.to_empty(device="cpu")
    model = copy.deepcopy(model)
    model.load_state_dict(Model().state_dict(), assign=True)
    model.head.weight = model.embedding.weight  # what assigning unties
    mpu.mirror_attributes(model)
    found = {name: marks(parameter) for name, parameter in model.named_parameters()}
    assert {name: found[name] for name in expected} == expected
    assert found["norm.weight"] == (False, -1, 1)


def test_attribute_helpers() -> None:
    marked, plain, other = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    mpu.set_tensor_model_parallel_attributes(marked, True, 0, 1)
    mpu.set_defaults_if_not_set_tensor_model_parallel_attributes(marked)
    mpu.set_defaults_if_not_set_tensor_model_parallel_attributes(plain)
    mpu.copy_tensor_model_parallel_attributes(other, marked)
    assert marks(marked) == marks(other) == (True, 0, 1)
    assert marks(plain) == (False, -1, 1)


def test_replicated_parameters_count_once_on_the_first_rank() -> None:
    marked, plain = torch.zeros(2), torch.zeros(2)
    mpu.set_tensor_model_parallel_attributes(marked, True, 0, 1)
    try:
        for rank, counts in ((0, True), (1, False)):
            mpu.set_tensor_model_parallel_rank(rank)
            assert mpu.param_is_not_tensor_parallel_duplicate(marked)
            assert mpu.param_is_not_tensor_parallel_duplicate(plain) is counts
    finally:
        mpu.destroy_model_parallel()


def test_a_sharding_that_does_not_fit_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="is not the whole"):
        Sharding("w", (4, 4), None, 0).pieces((2, 4))
