"""Every layer against its serial twin on 1, 2 and 4 tensor ranks: outputs, gradients, number and kind of collectives.

The twins are PyTorch's own functions on whole matrices, which the layers' parts are cut from by hand.
"""

import itertools
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from tests.harness.closeness import assert_close
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks

SIZES = (1, 2, 4)
BIASES = ((True, False), (True, True), (False, False))  # there is one, it is skipped
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-12}


def part(x: Tensor, dim: int, stride: int = 1) -> Tensor:
    """This rank's chunks of `x`: of `stride * t` it takes every t-th."""
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    return torch.cat(x.chunk(stride * size, dim)[rank::size], dim)


def times(**kinds: int) -> Counter[str]:
    """The collectives expected: none on one rank, and none is not counted as a kind."""
    alone = mpu.get_tensor_model_parallel_world_size() == 1
    return Counter({} if alone else {kind: n for kind, n in kinds.items() if n})


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape, dtype=dtype) / 2).requires_grad_()


def set_parameter(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def check_column(dtype: torch.dtype, bias: bool, gather: bool, skip: bool, stride: int) -> None:
    w, b, x = leaf(24, 8, dtype=dtype), leaf(24, dtype=dtype), leaf(5, 2, 8, dtype=dtype)
    use = torch.randn(5, 2, 24, dtype=dtype)
    expected = F.linear(x, w, b if bias else None)
    (expected.tanh() * use).sum().backward()

    layer = mpu.ColumnParallelLinear(8, 24, bias, gather, stride=stride, skip_bias_add=skip, dtype=dtype)
    set_parameter(layer.weight, part(w, 0, stride))
    if layer.bias is not None:
        set_parameter(layer.bias, part(b, 0, stride))
    mine = x.detach().clone().requires_grad_()
    with CollectiveCounter() as forward:
        output, output_bias = layer(mine)
    assert (output_bias is not None) is (bias and skip)
    if output_bias is not None:
        output = output + output_bias
    used = use if gather else part(use, -1, stride)
    with CollectiveCounter() as backward:
        (output.tanh() * used).sum().backward()
    tol = TOLERANCES[dtype]
    assert forward.counts == times(all_gather=(1 + (bias and skip)) * gather)
    assert backward.counts == times(all_reduce=1)
    assert_close(output, expected if gather else part(expected, -1, stride), tol)
    assert x.grad is not None
    assert w.grad is not None
    assert_close([mine.grad, layer.weight.grad], [x.grad, part(w.grad, 0, stride)], tol)
    if layer.bias is not None:
        assert b.grad is not None
        assert_close(layer.bias.grad, part(b.grad, 0, stride), tol)


def check_row(dtype: torch.dtype, bias: bool, parallel: bool, skip: bool, stride: int) -> None:
    w, b, x = leaf(8, 24, dtype=dtype), leaf(8, dtype=dtype), leaf(5, 2, 24, dtype=dtype)
    use = torch.randn(5, 2, 8, dtype=dtype)
    expected = F.linear(x, w, b if bias else None)
    (expected.tanh() * use).sum().backward()

    layer = mpu.RowParallelLinear(24, 8, bias, parallel, stride=stride, skip_bias_add=skip, dtype=dtype)
    set_parameter(layer.weight, part(w, 1, stride))
    if layer.bias is not None:
        set_parameter(layer.bias, b)
    mine = (part(x, -1, stride) if parallel else x).detach().clone().requires_grad_()
    with CollectiveCounter() as forward:
        output, output_bias = layer(mine)
    assert output_bias is (layer.bias if skip else None)
    if output_bias is not None:
        output = output + output_bias
    with CollectiveCounter() as backward:
        (output.tanh() * use).sum().backward()
    tol = TOLERANCES[dtype]
    assert forward.counts == times(all_reduce=1)
    assert backward.counts == times(all_gather=0 if parallel else 1)
    assert_close(output, expected, tol)
    assert x.grad is not None
    assert w.grad is not None
    assert_close(mine.grad, part(x.grad, -1, stride) if parallel else x.grad, tol)
    assert_close(layer.weight.grad, part(w.grad, 1, stride), tol)
    if layer.bias is not None:
        assert_close(layer.bias.grad, b.grad, tol)


def check_embedding(dtype: torch.dtype, real: int) -> None:
    w = torch.randn(24, 6, dtype=dtype)
    w[real:] = 0
    w.requires_grad_()
    ids = torch.randint(real, (7, 3))
    use = torch.randn(7, 3, 6, dtype=dtype)
    expected = F.embedding(ids, w)
    (expected.tanh() * use).sum().backward()

    layer = mpu.VocabParallelEmbedding(24, 6, real_num_embeddings=real, dtype=dtype)
    set_parameter(layer.weight, part(w, 0))
    with CollectiveCounter() as forward:
        output = layer(ids)
    with CollectiveCounter() as backward:
        (output.tanh() * use).sum().backward()
    assert forward.counts == times(all_reduce=1)
    assert backward.counts == times()
    assert torch.equal(output, expected)  # one rank's row and zeros
    assert w.grad is not None
    assert_close(layer.weight.grad, part(w.grad, 0), TOLERANCES[dtype], floor=w.grad.abs().max().item())


def run_all(rank: int, world_size: int) -> None:
    for size in SIZES:
        mpu.initialize_model_parallel(size)
        mpu.model_parallel_manual_seed(3)
        torch.manual_seed(17)  # the same whole tensors on every rank
        for dtype in TOLERANCES:
            for (bias, skip), second, stride in itertools.product(BIASES, (True, False), (1, 3)):
                check_column(dtype, bias, second, skip, stride)
                check_row(dtype, bias, second, skip, stride)
            for real in (24, 19, 5):
                check_embedding(dtype, real)
        mpu.destroy_model_parallel()


def test_layers_equal_their_serial_twins(ranks: Ranks) -> None:
    ranks(4, run_all)


def two_layers(rank: int, world_size: int) -> None:
    """An MLP of the paper: one all-reduce each way, and every gradient of the whole."""
    for size, dtype in itertools.product(SIZES, TOLERANCES):
        mpu.initialize_model_parallel(size)
        mpu.model_parallel_manual_seed(3)
        torch.manual_seed(23)
        x, w1, w2 = leaf(9, 8, dtype=dtype), leaf(32, 8, dtype=dtype), leaf(8, 32, dtype=dtype)
        expected = F.linear(F.gelu(F.linear(x, w1)), w2)
        expected.square().sum().backward()
        first = mpu.ColumnParallelLinear(8, 32, gather_output=False, dtype=dtype)
        second = mpu.RowParallelLinear(32, 8, input_is_parallel=True, dtype=dtype)
        set_parameter(first.weight, part(w1, 0))
        set_parameter(second.weight, part(w2, 1))
        mine = x.detach().clone().requires_grad_()
        with CollectiveCounter() as forward:
            output = second(F.gelu(first(mine)[0]))[0]
        with CollectiveCounter() as backward:
            output.square().sum().backward()
        assert forward.counts == backward.counts == times(all_reduce=1)
        assert_close(output, expected, TOLERANCES[dtype])
        assert x.grad is not None
        assert w1.grad is not None
        assert w2.grad is not None
        assert_close(
            [mine.grad, first.weight.grad, second.weight.grad],
            [x.grad, part(w1.grad, 0), part(w2.grad, 1)],
            TOLERANCES[dtype],
        )
        mpu.destroy_model_parallel()


def test_a_column_and_a_row_make_two_all_reduces(ranks: Ranks) -> None:
    ranks(4, two_layers)


def draw(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """The whole parameters of a small model at each size, put together from the pieces of all ranks."""
    found = []
    for size in SIZES:
        mpu.initialize_model_parallel(size)
        mpu.model_parallel_manual_seed(7)
        model = torch.nn.ModuleDict(
            {
                "embedding": mpu.VocabParallelEmbedding(24, 8, real_num_embeddings=19),
                "fused": mpu.ColumnParallelLinear(8, 24, stride=3),
                "row": mpu.RowParallelLinear(24, 8),
            }
        )
        wholes = {}
        for name, sharding in mpu.parameter_shardings(model).items():
            local = model.get_parameter(name).detach()
            whole = torch.zeros(sharding.global_shape)
            if sharding.split_dim is not None or mpu.get_tensor_model_parallel_rank() == 0:
                for piece in sharding.pieces(tuple(local.shape)):
                    whole[piece.region] = local[piece.local]
            wholes[name] = mpu.all_reduce(whole)
        found.append(wholes)
        mpu.destroy_model_parallel()
    return found


def test_initial_weights_do_not_depend_on_the_number_of_ranks(ranks: Ranks) -> None:
    drawn = [sizes for per_rank in ranks(4, draw) for sizes in per_rank]
    assert drawn[0]["embedding.weight"].shape == (19, 8)
    assert drawn[0]["fused.weight"].std() > 0.1
    for other in drawn[1:]:
        assert all(torch.equal(other[name], whole) for name, whole in drawn[0].items())


def half_precision(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(2)
    for dtype, tol in ((torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        mpu.model_parallel_manual_seed(3)
        torch.manual_seed(29)
        w, ids = torch.randn(16, 8, dtype=dtype), torch.randint(16, (6,))
        embedding = mpu.VocabParallelEmbedding(16, 8, dtype=dtype)
        first = mpu.ColumnParallelLinear(8, 16, dtype=dtype, keep_master_weight_for_test=True)
        second = mpu.RowParallelLinear(16, 8, dtype=dtype, keep_master_weight_for_test=True)
        set_parameter(embedding.weight, part(w, 0))
        output = second(first(embedding(ids))[0])[0]
        assert first.master_weight is not None
        assert second.master_weight is not None
        expected = w[ids].double() @ first.master_weight.double().T @ second.master_weight.double().T
        assert output.dtype == dtype
        assert_close(output, expected, tol)
        output.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in (first.weight, embedding.weight))


def test_sixteen_bits(ranks: Ranks) -> None:
    ranks(2, half_precision)


def in_a_group_of_its_own(rank: int, world_size: int) -> None:
    """A layer that is handed a group needs no initialisation of ours."""
    group = torch.distributed.new_group([0, 1]) if rank < 2 else torch.distributed.new_group([0, 1])
    if rank >= 2:
        return
    layer = mpu.ColumnParallelLinear(4, 6, group=group)
    assert layer.weight.shape == (3, 4)
    assert layer(torch.ones(2, 4))[0].shape == (2, 6)
    twin = mpu.ColumnParallelLinear(4, 6, group=mpu.SERIAL_GROUP)
    assert twin.weight.shape == (6, 4)


def refuse(rank: int, world_size: int) -> list[str]:
    """An id that no rank holds is an error on all of them, so that none waits for another."""
    mpu.initialize_model_parallel(2)
    layer = mpu.VocabParallelEmbedding(8, 4, real_num_embeddings=7)
    found = []
    for bad in (-1, 7, 9):
        try:
            layer(torch.tensor([bad]))
        except ValueError as error:
            found.append(str(error))
    return found


def test_groups_and_bad_ids(ranks: Ranks) -> None:
    ranks(3, in_a_group_of_its_own)
    for messages in ranks(2, refuse):
        assert [message.split(":")[0] for message in messages] == ["token id -1", "token id 7", "token id 9"]
