"""Attention by PyTorch's kernel and written out, and dropout, against their formulas and what they may keep."""

import math

import pytest
import torch
from torch import Tensor

from megatron.model.dropout import dropout
from megatron.model.kernels import fused_attention, unfused_attention
from tests.harness.closeness import assert_close
from tests.harness.storage import StorageMeter

KERNELS = {"fused": fused_attention, "unfused": unfused_attention}
B, N, S, D = 2, 3, 7, 5


def heads(dtype: torch.dtype = torch.float64, s: int = S, d: int = D) -> tuple[list[Tensor], list[Tensor]]:
    """Queries, keys and values [b, n, s, d] as the model cuts them out of one tensor, and that tensor."""
    fused = torch.randn(s, B, N, 3, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    fused.requires_grad_()
    return [part.permute(1, 2, 0, 3) for part in fused.unbind(3)], [fused]


def formula(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    scores = torch.einsum("bnid,bnjd->bnij", query, key) / math.sqrt(query.shape[-1])
    weights = scores.exp() * (torch.ones(scores.shape[-2:]).tril() if causal else 1.0)
    return torch.einsum("bnij,bnjd->bnid", weights / weights.sum(-1, keepdim=True), value)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_and_its_gradients(kernel: str, causal: bool) -> None:
    parts, leaf = heads()
    actual, expected = KERNELS[kernel](*parts, causal=causal, p=0.0), formula(*parts, causal)
    assert_close(actual, expected, 1e-12)
    scale = torch.linspace(-1, 1, actual.numel(), dtype=torch.float64).view(actual.shape)
    mine, theirs = (torch.autograd.grad((x * scale).sum(), leaf, retain_graph=True) for x in (actual, expected))
    assert_close(mine, theirs, 1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_row_of_16_bit_weights_adds_up_to_one(kernel: str, dtype: torch.dtype) -> None:
    """Equal weights, of which 16 bits could not add up more than 256 (bfloat16) or 2048 (float16)."""
    zeros, ones = torch.zeros(1, 1, 4096, 2, dtype=dtype), torch.ones(1, 1, 4096, 2, dtype=dtype)
    result = KERNELS[kernel](zeros[:, :, :1], zeros, ones, causal=False, p=0.0)
    assert result.dtype == dtype
    assert_close(result, torch.ones(1, 1, 1, 2), 0.01)


@pytest.mark.parametrize(("p", "bytes_each"), [(0.0, 2), (0.1, 5)])
def test_unfused_attention_keeps_five_bytes_of_each_weight(p: float, bytes_each: int) -> None:
    parts, _ = heads(torch.bfloat16, s=64, d=4)
    with StorageMeter() as meter:
        result = unfused_attention(*parts, causal=True, p=p)
        kept = meter.live_bytes() - result.numel() * 2
    assert kept == bytes_each * N * 64 * 64 * B


def test_fused_attention_keeps_no_square() -> None:
    parts, _ = heads(torch.bfloat16, s=64, d=4)
    with StorageMeter() as meter:
        result = fused_attention(*parts, causal=True, p=0.0)
        assert meter.live_bytes() < result.numel() * 2 + 64 * 64 * B * N


def test_fused_attention_with_dropout_keeps_no_float32_square_on_a_cpu() -> None:
    parts, _ = heads(torch.bfloat16, s=64, d=4)
    with StorageMeter() as meter:
        result = fused_attention(*parts, causal=True, p=0.1)
        assert meter.live_bytes() == result.numel() * 2 + 5 * N * 64 * 64 * B


def test_dropout_scales_what_it_keeps_and_its_gradient_alike() -> None:
    x = torch.full((100, 100), 3.0, requires_grad=True)
    torch.manual_seed(0)
    y = dropout(x, 0.25, True)
    y.sum().backward()
    kept = y != 0
    assert x.grad is not None
    assert torch.equal(y, torch.where(kept, 4.0, 0.0))
    assert torch.equal(x.grad, torch.where(kept, 1 / 0.75, 0.0))
    # 10,000 draws: the share dropped is 0.25 with a standard deviation of 0.0043.
    assert abs((~kept).double().mean().item() - 0.25) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_keeps_one_byte_a_value(dtype: torch.dtype) -> None:
    x = torch.ones(100, 100, dtype=dtype, requires_grad=True)
    with StorageMeter() as meter:
        y = dropout(x, 0.25, True)
        assert meter.live_bytes() == 100 * 100 * (1 + y.element_size())


def test_dropping_nothing_and_everything() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    assert dropout(x, 0.0, True) is x
    assert dropout(x, 0.5, False) is x
    y = dropout(x, 1.0, True)
    y.sum().backward()
    assert x.grad is not None
    assert torch.count_nonzero(y) == 0 and torch.count_nonzero(x.grad) == 0
