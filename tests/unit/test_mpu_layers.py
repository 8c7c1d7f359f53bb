"""Parallel layers in one process: what is drawn, dtypes, devices, what is refused; a linear layer and an embedding."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron import mpu
from tests.harness.closeness import assert_close

FLOATS = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    mpu.destroy_model_parallel()
    mpu.get_rng_tracker().reset()


def pretend(rank: int, size: int) -> None:
    mpu.set_tensor_model_parallel_world_size(size)
    mpu.set_tensor_model_parallel_rank(rank)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("make", [mpu.ColumnParallelLinear, mpu.RowParallelLinear])
def test_alone_a_layer_is_nn_linear(make: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    layer, twin = make(6, 4, dtype=dtype), nn.Linear(6, 4).double()
    nn.init.normal_(layer.bias)
    twin.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn(5, 3, 6, dtype=dtype, requires_grad=True)
    y = x.detach().double().requires_grad_()
    output, output_bias = layer(x)
    assert output_bias is None
    assert output.dtype == dtype
    output.to(torch.promote_types(dtype, torch.float32)).square().sum().backward()
    expected = twin(y)
    expected.square().sum().backward()
    assert_close(output, expected, FLOATS[dtype])
    assert_close(x.grad, y.grad, FLOATS[dtype])
    assert_close([layer.weight.grad, layer.bias.grad], [twin.weight.grad, twin.bias.grad], FLOATS[dtype])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_alone_the_embedding_is_nn_embedding(dtype: torch.dtype) -> None:
    layer = mpu.VocabParallelEmbedding(12, 4, real_num_embeddings=10, dtype=dtype)
    ids = torch.tensor([[0, 9], [3, 3]])
    output = layer(ids)
    output.to(torch.promote_types(dtype, torch.float32)).square().sum().backward()
    weight = layer.weight.detach().double().requires_grad_()
    expected = F.embedding(ids, weight)
    expected.square().sum().backward()
    assert_close([output, layer.weight.grad], [expected, weight.grad], FLOATS[dtype])


@pytest.mark.parametrize("make", [mpu.ColumnParallelLinear, mpu.RowParallelLinear])
def test_a_skipped_bias_is_handed_back(make: Callable[..., nn.Module]) -> None:
    layer = make(6, 4, skip_bias_add=True)
    nn.init.normal_(layer.bias)
    x = torch.randn(3, 6)
    output, output_bias = layer(x)
    assert output_bias is layer.bias
    assert_close(output, x @ layer.weight.T, 1e-6)
    output, output_bias = make(6, 4, bias=False, skip_bias_add=True)(x)
    assert output_bias is None


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_each_rank_keeps_its_part_of_the_same_draw(size: int, stride: int) -> None:
    """Parts cut by hand out of what one rank alone draws; the layers know where theirs lie."""
    shape = (24, 36)

    def draw() -> list[nn.Module]:
        mpu.model_parallel_manual_seed(11)
        return [
            mpu.ColumnParallelLinear(36, 24, stride=stride, keep_master_weight_for_test=True),
            mpu.RowParallelLinear(24, 36, stride=stride, keep_master_weight_for_test=True, init_method=nn.init.normal_),
            mpu.VocabParallelEmbedding(24, 36, real_num_embeddings=19),
        ]

    column, row, embedding = (layer.weight.detach() for layer in draw())
    assert column.shape == shape
    assert column.std() > 0.1
    assert torch.equal(embedding[19:], torch.zeros(5, 36))
    for rank in range(size):
        pretend(rank, size)
        mine = draw()
        chunks = column.chunk(stride * size)[rank::size]
        assert torch.equal(mine[0].weight, torch.cat(chunks))
        assert torch.equal(mine[1].weight, torch.cat(row.chunk(stride * size, dim=1)[rank::size], dim=1))
        assert torch.equal(mine[2].weight, embedding.chunk(size)[rank])
        assert torch.equal(mine[0].master_weight, column)
        assert torch.equal(mine[1].master_weight, row)
        assert mine[0].bias.shape == (24 // size,)
        assert not mine[0].bias.any()
        mpu.destroy_model_parallel()


def test_fan_in_and_fan_out_are_the_whole_matrixs() -> None:
    pretend(1, 4)
    seen: list[torch.Size] = []
    mpu.ColumnParallelLinear(8, 16, init_method=lambda whole: seen.append(whole.shape))
    mpu.RowParallelLinear(16, 8, init_method=lambda whole: seen.append(whole.shape))
    mpu.VocabParallelEmbedding(16, 8, init_method=lambda whole: seen.append(whole.shape), real_num_embeddings=13)
    assert seen == [(16, 8), (8, 16), (13, 8)]


def test_drawing_leaves_dropout_where_it_was() -> None:
    mpu.model_parallel_manual_seed(5)
    before = torch.get_rng_state()
    first = mpu.ColumnParallelLinear(4, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first.weight, mpu.ColumnParallelLinear(4, 4).weight)


def test_on_meta_nothing_is_drawn() -> None:
    def refuse(whole: torch.Tensor) -> None:
        raise AssertionError("drawn")

    for made in (
        mpu.ColumnParallelLinear(4, 4, init_method=refuse, device="meta", keep_master_weight_for_test=True),
        mpu.RowParallelLinear(4, 4, init_method=refuse, device="meta"),
        mpu.VocabParallelEmbedding(4, 4, init_method=refuse, device="meta"),
    ):
        assert made.weight.is_meta
        assert made.initializers["weight"] is refuse
        assert made.weight.tensor_model_parallel is True  # type: ignore[attr-defined]
    with torch.device("meta"):
        assert mpu.ColumnParallelLinear(4, 4, init_method=refuse).weight.is_meta


def test_copies_keep_their_place_and_group() -> None:
    pretend(1, 2)
    layer = mpu.ColumnParallelLinear(4, 8)
    other = copy.deepcopy(layer)
    assert other.sharding == layer.sharding
    assert other.group is layer.group
    assert torch.equal(other.weight, layer.weight)


def test_sizes_that_do_not_divide() -> None:
    pretend(0, 4)
    for make, words in (
        (lambda: mpu.ColumnParallelLinear(8, 10), "ColumnParallelLinear: output_size 10 .* parallel size 4"),
        (lambda: mpu.ColumnParallelLinear(8, 12, stride=2), "output_size 12 .* parallel size 4 times stride 2"),
        (lambda: mpu.RowParallelLinear(10, 8), "RowParallelLinear: input_size 10 .* parallel size 4"),
        (lambda: mpu.VocabParallelEmbedding(10, 8), "VocabParallelEmbedding: num_embeddings 10 .* parallel size 4"),
        (lambda: mpu.VocabParallelEmbedding(8, 8, real_num_embeddings=9), "real_num_embeddings 9"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_sizes_below_one() -> None:
    for make, words in (
        (lambda: mpu.ColumnParallelLinear(4, 8, stride=0), "ColumnParallelLinear: stride 0: it must be at least 1"),
        (lambda: mpu.RowParallelLinear(4, 8, stride=-1), "RowParallelLinear: stride -1"),
        (lambda: mpu.ColumnParallelLinear(0, 8), "ColumnParallelLinear: input_size 0"),
        (lambda: mpu.ColumnParallelLinear(4, -8), "ColumnParallelLinear: output_size -8"),
        (lambda: mpu.RowParallelLinear(-4, 8), "RowParallelLinear: input_size -4"),
        (lambda: mpu.RowParallelLinear(4, 0), "RowParallelLinear: output_size 0"),
        (lambda: mpu.VocabParallelEmbedding(0, 4), "VocabParallelEmbedding: num_embeddings 0"),
        (lambda: mpu.VocabParallelEmbedding(8, -4), "VocabParallelEmbedding: embedding_dim -4"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.uint64], ids=str)
def test_ids_that_are_no_integers(dtype: torch.dtype) -> None:
    layer = mpu.VocabParallelEmbedding(8, 4)
    with pytest.raises(ValueError, match=f"token ids of {dtype}: ids must be integers"):
        layer(torch.ones(3).to(dtype))


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32], ids=str
)
def test_ids_of_any_integer_type(dtype: torch.dtype) -> None:
    layer = mpu.VocabParallelEmbedding(8, 4)
    assert torch.equal(layer(torch.tensor([0, 7, 3]).to(dtype)), layer.weight[[0, 7, 3]])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("bad", [-1, 7, 8, 100])
def test_ids_outside_the_vocabulary_are_named(size: int, bad: int) -> None:
    for rank in range(size):
        pretend(rank, size)
        layer = mpu.VocabParallelEmbedding(8, 4, real_num_embeddings=7)
        with pytest.raises(ValueError, match=f"token id {bad}: .* vocabulary size 7"):
            layer(torch.tensor([0, bad, 3]))


def test_where_the_host_may_not_look_the_lookup_itself_fails() -> None:
    """On CUDA: every rank looks for a row that it does not have, wherever the bad id lies."""
    ids = torch.tensor([-3, 0, 3, 4, 6, 7, 8])
    for first in (0, 4):
        rows, elsewhere = mpu.utils.local_rows(ids, first, 4, vocab_size=7)
        assert rows[[0, 5, 6]].tolist() == [4, 4, 4]  # one past the last
        held = ~elsewhere[1:5]
        assert torch.equal(rows[1:5][held], ids[1:5][held] - first)
        assert rows[1:5][~held].eq(0).all()


def test_autocast_computes_in_the_dtype_asked_for() -> None:
    column, row = mpu.ColumnParallelLinear(4, 8, gather_output=False), mpu.RowParallelLinear(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        output = row(column(torch.randn(3, 4))[0])[0]
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert column.weight.grad is not None
    assert column.weight.grad.dtype == torch.float32


def test_they_say_what_they_are() -> None:
    assert "4, 8, ranks=1, gather_output=True" in repr(mpu.ColumnParallelLinear(4, 8))
    assert "4, 8, ranks=1, input_is_parallel=False" in repr(mpu.RowParallelLinear(4, 8))
    assert "8, 4, ranks=1, real=7" in repr(mpu.VocabParallelEmbedding(8, 4, real_num_embeddings=7))
