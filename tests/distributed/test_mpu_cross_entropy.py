"""Vocabulary-parallel cross entropy against PyTorch's on 1, 2 and 4 tensor ranks, plain and with the output layer."""

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
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-12}
PADDED = 24
# All columns real; some padding on the last rank; ranks with nothing but padding; a single real column.
VOCABULARIES = (24, 20, 10, 1)


def part(x: Tensor, dim: int) -> Tensor:
    return x.chunk(mpu.get_tensor_model_parallel_world_size(), dim)[mpu.get_tensor_model_parallel_rank()]


def reduces(n: int) -> Counter[str]:
    return Counter({"all_reduce": n} if n and mpu.get_tensor_model_parallel_world_size() > 1 else {})


def check_plain(dtype: torch.dtype, vocab: int) -> None:
    whole = (torch.randn(4, 3, PADDED, dtype=dtype) * 3).requires_grad_()
    target, use = torch.randint(vocab, (4, 3)), torch.rand(4, 3, dtype=dtype)
    target[1, 1] = -1
    expected = F.cross_entropy(whole[..., :vocab].transpose(1, 2), target, reduction="none", ignore_index=-1)
    (expected * use).sum().backward()
    mine = part(whole.detach(), -1).clone().requires_grad_()
    with CollectiveCounter() as forward:
        loss = mpu.vocab_parallel_cross_entropy(mine, target, vocab_size=vocab)
    with CollectiveCounter() as backward:
        (loss * use).sum().backward()
    assert forward.counts == reduces(2)
    assert not backward.counts
    assert_close(loss, expected, TOLERANCES[dtype])
    assert whole.grad is not None
    assert mine.grad is not None
    assert_close(mine.grad, part(whole.grad, -1), TOLERANCES[dtype], floor=whole.grad.abs().max().item())
    first = mpu.get_tensor_model_parallel_rank() * mine.size(-1)
    assert not mine.grad[..., max(0, vocab - first) :].any(), "padding has a gradient"


def check_fused(dtype: torch.dtype, vocab: int, chunk_size: int | None, biased: bool) -> None:
    hidden, weight = torch.randn(12, 6, dtype=dtype), torch.randn(PADDED, 6, dtype=dtype)
    target, use = torch.randint(vocab, (12,)), torch.rand(12, dtype=dtype)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    b = torch.randn(PADDED, dtype=dtype).requires_grad_() if biased else None
    expected = F.cross_entropy(F.linear(h, w, b)[:, :vocab], target, reduction="none")
    (expected * use).sum().backward()
    x, mine = hidden.clone().requires_grad_(), part(weight, 0).clone().requires_grad_()
    bias = None if b is None else part(b.detach(), 0).clone().requires_grad_()
    sizes = {"chunk_size": chunk_size, "vocab_size": vocab}
    with CollectiveCounter() as forward:
        loss = mpu.vocab_parallel_linear_cross_entropy(x, mine, target, bias=bias, **sizes)
    with CollectiveCounter() as backward:
        (loss * use).sum().backward()
    assert forward.counts == reduces(2)
    assert backward.counts == reduces(1)  # of the gradient of the hidden states
    assert_close(loss, expected, TOLERANCES[dtype])
    assert h.grad is not None
    assert w.grad is not None
    tol, floor = TOLERANCES[dtype], max(h.grad.abs().max().item(), w.grad.abs().max().item())
    assert_close([x.grad, mine.grad], [h.grad, part(w.grad, 0)], tol, floor)
    if bias is not None:
        assert_close(bias.grad, part(b.grad, 0), tol, floor)


def run_all(rank: int, world_size: int) -> None:
    for size in SIZES:
        mpu.initialize_model_parallel(size)
        torch.manual_seed(31)
        for dtype, vocab in itertools.product(TOLERANCES, VOCABULARIES):
            check_plain(dtype, vocab)
            for chunk_size, biased in itertools.product((None, 1, 5, 12), (False, True)):
                check_fused(dtype, vocab, chunk_size, biased)
        mpu.destroy_model_parallel()


def test_losses_equal_their_serial_twins(ranks: Ranks) -> None:
    ranks(4, run_all)


def half_precision(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(2)
    torch.manual_seed(37)
    for dtype, tol in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        whole = (torch.randn(6, 10) * 3).to(dtype)
        target = torch.randint(9, (6,))
        twin = whole.double().requires_grad_()
        expected = F.cross_entropy(twin[:, :9], target, reduction="none")
        expected.sum().backward()
        mine = part(whole, -1).clone().requires_grad_()
        loss = mpu.vocab_parallel_cross_entropy(mine, target, vocab_size=9)
        loss.sum().backward()
        assert loss.dtype == torch.float32
        assert_close(loss, expected, 2e-6)
        assert twin.grad is not None
        assert_close(mine.grad, part(twin.grad, -1), tol)


def refuse(rank: int, world_size: int) -> str:
    mpu.initialize_model_parallel(2)
    try:
        mpu.vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 7]), vocab_size=7)
    except ValueError as error:
        return str(error)
    return ""


def test_sixteen_bits_and_bad_targets(ranks: Ranks) -> None:
    ranks(2, half_precision)
    assert all(message.startswith("target 7:") for message in ranks(2, refuse))


INF = float("inf")
# Rows of 8 logits and a target: on 2 and 4 ranks some ranks have nothing finite, on the first, the last, or every one.
INFINITE: list[tuple[list[float], int]] = [
    ([-INF, 0, 0, -INF, *[-INF] * 4], 1),
    ([*[-INF] * 4, -INF, 2, 3, -INF], 6),
    ([*[-INF] * 6, 1, -INF], 6),
    ([*[-INF] * 4, 0, 1, 2, 3], 2),
    ([0, 1, -INF, 3, 4, 5, 6, 7], 2),
    ([-INF] * 8, 3),
]


def infinite(rank: int, world_size: int) -> None:
    rows, target = (torch.tensor(values) for values in zip(*INFINITE, strict=True))
    for size in SIZES:
        mpu.initialize_model_parallel(size)
        whole = rows.clone().requires_grad_()
        expected = F.cross_entropy(whole, target, reduction="none")
        assert expected[0].item() == pytest.approx(0.6931, abs=1e-4)
        assert expected.isnan().tolist() == [False] * 5 + [True]
        expected.sum().backward()
        assert whole.grad is not None
        mine = part(rows, -1).clone().requires_grad_()
        loss = mpu.vocab_parallel_cross_entropy(mine, target)
        loss.sum().backward()
        assert mine.grad is not None
        assert torch.allclose(loss, expected, 1e-6, equal_nan=True), (size, loss)
        assert torch.allclose(mine.grad, part(whole.grad, -1), 1e-6, equal_nan=True), (size, mine.grad)
        mpu.destroy_model_parallel()


def test_ranks_without_a_finite_logit(ranks: Ranks) -> None:
    ranks(4, infinite)
