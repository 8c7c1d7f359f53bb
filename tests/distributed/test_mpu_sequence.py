"""Layers and loss with sequence parallelism against serial twins on 1, 2 and 4 ranks; number and bytes of collectives.

Each rank has s/t of the sequence outside of the parallel region; the twins are PyTorch's functions on whole tensors.
"""

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from tests.harness.closeness import assert_close
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks

SIZES = (1, 2, 4)
TOLERANCES = {torch.float32: 4e-6, torch.float64: 1e-12}
BIASES = ((True, False), (True, True), (False, False))  # there is one, it is skipped
S, B, H, INNER = 8, 2, 8, 24


def part(x: Tensor, dim: int, stride: int = 1) -> Tensor:
    """This rank's chunks of `x`: of `stride * t` it takes every t-th."""
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    return torch.cat(x.chunk(stride * size, dim)[rank::size], dim)


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape, dtype=dtype) / 2).requires_grad_()


def copy_of(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def grad_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def set_parameter(parameter: Tensor | None, value: Tensor) -> None:
    if parameter is not None:
        with torch.no_grad():
            parameter.copy_(value)


def moved(dtype: torch.dtype, elements: int, **kinds: int) -> tuple[Counter[str], Counter[str]]:
    """Number and bytes of collectives that each move a tensor of that many elements; none on one rank."""
    counts = Counter({} if mpu.get_tensor_model_parallel_world_size() == 1 else kinds)
    return counts, Counter({kind: n * elements * dtype.itemsize for kind, n in counts.items()})


def seen(counter: CollectiveCounter) -> tuple[Counter[str], Counter[str]]:
    return counter.counts, counter.bytes


def check_column(dtype: torch.dtype, bias: bool, skip: bool, stride: int) -> None:
    w, b, x = leaf(INNER, H, dtype=dtype), leaf(INNER, dtype=dtype), leaf(S, B, H, dtype=dtype)
    use = torch.randn(S, B, INNER, dtype=dtype)
    expected = F.linear(x, w, b if bias else None)
    (expected.tanh() * use).sum().backward()
    layer = mpu.ColumnParallelLinear(
        H, INNER, bias, False, stride=stride, skip_bias_add=skip, sequence_parallel=True, dtype=dtype
    )
    set_parameter(layer.weight, part(w, 0, stride))
    set_parameter(layer.bias, part(b, 0, stride))
    mine = copy_of(part(x, 0))
    with CollectiveCounter() as forward:
        output, output_bias = layer(mine)
    output = output if output_bias is None else output + output_bias
    with CollectiveCounter() as backward:
        (output.tanh() * part(use, -1, stride)).sum().backward()
    assert seen(forward) == moved(dtype, S * B * H, all_gather=1)
    assert seen(backward) == moved(dtype, S * B * H, all_gather=1, reduce_scatter=1)
    tol = TOLERANCES[dtype]
    assert_close(output, part(expected, -1, stride), tol)
    assert_close([mine.grad, layer.weight.grad], [part(grad_of(x), 0), part(grad_of(w), 0, stride)], tol)
    if layer.bias is not None:
        assert_close(layer.bias.grad, part(grad_of(b), 0, stride), tol)
        assert not layer.sharding["bias"].partial_gradient
    assert not layer.sharding["weight"].partial_gradient


def check_row(dtype: torch.dtype, bias: bool, skip: bool, stride: int, parallel: bool) -> None:
    w, b, x = leaf(H, INNER, dtype=dtype), leaf(H, dtype=dtype), leaf(S, B, INNER, dtype=dtype)
    use = torch.randn(S, B, H, dtype=dtype)
    expected = F.linear(x, w, b if bias else None)
    (expected.tanh() * use).sum().backward()
    layer = mpu.RowParallelLinear(
        INNER, H, bias, parallel, stride=stride, skip_bias_add=skip, sequence_parallel=True, dtype=dtype
    )
    set_parameter(layer.weight, part(w, 1, stride))
    set_parameter(layer.bias, b)
    mine = copy_of(part(x, -1, stride) if parallel else x)
    with CollectiveCounter() as forward:
        output, output_bias = layer(mine)
    assert output_bias is (layer.bias if skip else None)
    output = output if output_bias is None else output + output_bias
    with CollectiveCounter() as backward:
        (output.tanh() * part(use, 0)).sum().backward()
    assert seen(forward) == moved(dtype, S * B * H, reduce_scatter=1)
    if parallel:
        assert seen(backward) == moved(dtype, S * B * H, all_gather=1)
    tol = TOLERANCES[dtype]
    assert_close(output, part(expected, 0), tol)
    assert_close(mine.grad, part(grad_of(x), -1, stride) if parallel else x.grad, tol)
    assert_close(layer.weight.grad, part(grad_of(w), 1, stride), tol)
    if layer.bias is not None:  # one term of a sum, as its sharding says
        assert layer.sharding["bias"].partial_gradient
        assert_close(mpu.all_reduce(grad_of(layer.bias)), b.grad, tol)


def check_embedding(dtype: torch.dtype, real: int) -> None:
    w = torch.randn(24, H, dtype=dtype)
    w[real:] = 0
    w.requires_grad_()
    ids, use = torch.randint(real, (S, B)), torch.randn(S, B, H, dtype=dtype)
    expected = F.embedding(ids, w)
    (expected.tanh() * use).sum().backward()
    layer = mpu.VocabParallelEmbedding(24, H, real_num_embeddings=real, sequence_parallel=True, dtype=dtype)
    set_parameter(layer.weight, part(w, 0))
    with CollectiveCounter() as forward:
        output = layer(ids)
    with CollectiveCounter() as backward:
        (output.tanh() * part(use, 0)).sum().backward()
    assert seen(forward) == moved(dtype, S * B * H, reduce_scatter=1)
    assert seen(backward) == moved(dtype, S * B * H, all_gather=1)
    assert torch.equal(output, part(expected, 0))  # one rank's row and zeros
    tol, floor = TOLERANCES[dtype], grad_of(w).abs().max().item()
    assert_close(layer.weight.grad, part(grad_of(w), 0), tol, floor)


def check_loss(dtype: torch.dtype, vocab: int, chunk_size: int | None) -> None:
    tokens = S * B
    h, w = leaf(tokens, H, dtype=dtype), leaf(24, H, dtype=dtype)
    target, use = torch.randint(vocab, (tokens,)), torch.rand(tokens, dtype=dtype)
    expected = F.cross_entropy(F.linear(h, w)[:, :vocab], target, reduction="none")
    (expected * use).sum().backward()
    mine, weight = copy_of(part(h, 0)), copy_of(part(w, 0))
    with CollectiveCounter() as forward:
        loss = mpu.vocab_parallel_linear_cross_entropy(
            mine, weight, target, chunk_size=chunk_size, vocab_size=vocab, sequence_parallel=True
        )
    with CollectiveCounter() as backward:
        (loss * use).sum().backward()
    if mpu.get_tensor_model_parallel_world_size() > 1:
        assert forward.counts == {"all_gather": 1, "all_reduce": 2}
        assert forward.bytes["all_reduce"] == 3 * tokens * dtype.itemsize
    assert seen(backward) == moved(dtype, tokens * H, all_gather=1, reduce_scatter=1)
    assert_close(loss, expected, TOLERANCES[dtype])
    floor = max(grad_of(h).abs().max().item(), grad_of(w).abs().max().item())
    assert_close([mine.grad, weight.grad], [part(grad_of(h), 0), part(grad_of(w), 0)], TOLERANCES[dtype], floor)


def run_all(rank: int, world_size: int) -> None:
    for size in SIZES:
        mpu.initialize_model_parallel(size)
        mpu.model_parallel_manual_seed(3)
        torch.manual_seed(17)  # the same whole tensors on every rank
        for dtype in TOLERANCES:
            thorough = dtype == torch.float64
            for (bias, skip), stride in itertools.product(BIASES if thorough else BIASES[:1], (1, 3)):
                check_column(dtype, bias, skip, stride)
                check_row(dtype, bias, skip, stride, parallel=True)
                check_row(dtype, bias, skip, stride, parallel=False)
            for real in (24, 19, 5):
                check_embedding(dtype, real)
            for vocab, chunk_size in itertools.product((24, 10), (None, 1, 5, 16) if thorough else (None, 5)):
                check_loss(dtype, vocab, chunk_size)
        mpu.destroy_model_parallel()


def test_layers_and_loss_equal_their_serial_twins(ranks: Ranks) -> None:
    ranks(4, run_all)


def half_precision(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(2)
    for dtype, tol in ((torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        mpu.model_parallel_manual_seed(3)
        torch.manual_seed(29)
        x, ids = (torch.randn(4, 8) / 2).to(dtype), torch.randint(16, (4,))
        embedding = mpu.VocabParallelEmbedding(16, 8, sequence_parallel=True, dtype=dtype)
        layer = mpu.ColumnParallelLinear(
            8, 16, False, False, sequence_parallel=True, keep_master_weight_for_test=True, dtype=dtype
        )
        mine = copy_of(part(x, 0))
        output = layer(mine + embedding(ids))[0]
        words = mpu.all_gather_first_dim(embedding(ids).detach())
        assert layer.master_weight is not None
        whole = (x + words).double().requires_grad_()
        expected = F.linear(whole, layer.master_weight.double())
        expected.sum().backward()
        output.sum().backward()
        assert output.dtype == mine.grad.dtype == dtype  # type: ignore[union-attr]
        assert_close([output, mine.grad], [part(expected, -1), part(grad_of(whole), 0)], tol)


def autocast(rank: int, world_size: int) -> None:
    """What is gathered and scattered is in the dtype of the products; gradients are in the parameters'."""
    mpu.initialize_model_parallel(2)
    mpu.model_parallel_manual_seed(3)
    column = mpu.ColumnParallelLinear(H, INNER, False, False, sequence_parallel=True)
    row = mpu.RowParallelLinear(INNER, H, False, True, sequence_parallel=True)
    x = torch.randn(S // 2, B, H, requires_grad=True)
    with CollectiveCounter() as counter:
        with torch.autocast("cpu", torch.bfloat16):
            output = row(column(x)[0])[0]
        output.float().square().sum().backward()
    assert seen(counter) == moved(torch.bfloat16, S * B * H, all_gather=3, reduce_scatter=2)
    column_weight = mpu.all_gather_first_dim(column.weight.detach())
    row_weight = mpu.all_gather_first_dim(row.weight.detach().t().contiguous()).t()
    twin = copy_of(x)
    expected = F.linear(F.linear(twin, column_weight), row_weight)
    expected.square().sum().backward()
    assert output.dtype == torch.bfloat16
    assert grad_of(x).dtype == grad_of(column.weight).dtype == torch.float32
    assert_close([output, x.grad], [expected, twin.grad], 3e-2)


def refuse(rank: int, world_size: int) -> list[str]:
    mpu.initialize_model_parallel(2)
    row = mpu.RowParallelLinear(4, 4, input_is_parallel=True, sequence_parallel=True)
    embedding = mpu.VocabParallelEmbedding(4, 4, sequence_parallel=True)
    loss = mpu.vocab_parallel_linear_cross_entropy
    ids = torch.zeros(5, dtype=torch.int64)
    found = []
    for call in (
        lambda: row(torch.ones(5, 3, 2)),
        lambda: embedding(ids),
        lambda: loss(torch.ones(2, 4), torch.ones(2, 4), ids, chunk_size=1, sequence_parallel=True),
    ):
        with pytest.raises(ValueError, match="5") as caught:
            call()
        found.append(str(caught.value))
    return found


def test_sixteen_bits_autocast_and_sequences_that_do_not_divide(ranks: Ranks) -> None:
    ranks(2, half_precision)
    ranks(2, autocast)
    for row, embedding, loss in ranks(2, refuse):
        assert row == embedding == "first dimension of size 5: it must be divisible by the group's 2 ranks"
        assert loss == "target of shape (5,): with an input of shape (2, 4) on each of 2 ranks it must be (4,)"
