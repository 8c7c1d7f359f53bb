"""Cross entropy in one process: against PyTorch's in float64, padding, what does not count, memory, what is refused."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron import mpu
from tests.harness.closeness import assert_close

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation makes inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_it_equals_pytorchs(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 4, 10) * 5).to(dtype).requires_grad_()
    before = logits.detach().clone()
    target = torch.randint(8, (3, 4))
    weights = torch.rand(3, 4)
    loss = mpu.vocab_parallel_cross_entropy(logits, target, vocab_size=8)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (loss * weights).sum().backward()
    twin = before.double().requires_grad_()
    expected = F.cross_entropy(twin[..., :8].transpose(1, 2), target, reduction="none")
    (expected * weights).sum().backward()
    assert_close(loss, expected, 2e-6 if dtype != torch.float64 else 1e-12)
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    assert_close(logits.grad, twin.grad, TOLERANCES[dtype])
    assert torch.equal(logits.grad[..., 8:], torch.zeros(3, 4, 2, dtype=dtype))
    assert torch.equal(logits, before), "the caller's logits were changed"


def test_large_logits_lose_nothing() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]], requires_grad=True)
    loss = mpu.vocab_parallel_cross_entropy(logits, torch.tensor([1, 2]))
    assert_close(list(loss), [6e4, math.log(3.0)], 1e-6)
    loss.sum().backward()
    assert_close(logits.grad, [[1.0, -1.0, 0.0], [1 / 3, 1 / 3, -2 / 3]], 1e-6)


@pytest.mark.parametrize("chunk_size", [None, 1, 4, 5, 12, 100])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_fused_form_equals_the_plain_one(chunk_size: int | None, dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(12, 6).to(dtype).requires_grad_(), torch.randn(10, 6).to(dtype).requires_grad_()
    target, scale = torch.randint(9, (12,)), torch.rand(12)
    target[5] = -1
    loss = mpu.vocab_parallel_linear_cross_entropy(hidden, weight, target, chunk_size=chunk_size, vocab_size=9)
    (loss * scale).sum().backward()
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    expected = F.cross_entropy((h @ w.T)[:, :9], target, reduction="none", ignore_index=-1)
    (expected * scale).sum().backward()
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 5e-3}.get(dtype, TOLERANCES[dtype])
    assert_close(loss, expected, tolerance)
    assert_close([hidden.grad, weight.grad], [h.grad, w.grad], tolerance)
    assert weight.grad is not None
    assert not weight.grad[9].any()
    assert loss[5] == 0
    assert hidden.grad is not None
    assert not hidden.grad[5].any()


def test_only_one_chunk_of_logits_exists_at_a_time() -> None:
    tokens, vocab, h, chunk = 64, 50, 4, 8

    def largest(chunk_size: int | None) -> int:
        hidden, weight = torch.randn(tokens, h, requires_grad=True), torch.randn(vocab, h, requires_grad=True)
        with LargestTensor() as seen:
            target = torch.randint(vocab, (tokens,))
            mpu.vocab_parallel_linear_cross_entropy(hidden, weight, target, chunk_size=chunk_size).sum().backward()
        return seen.elements

    assert largest(chunk) == chunk * vocab
    assert largest(None) == tokens * vocab


@given(st.integers(1, 6), st.integers(1, 7), st.integers(0, 3), st.integers(1, 8), st.data())
def test_any_shape(tokens: int, vocab: int, padding: int, chunk: int, data: st.DataObject) -> None:
    target = torch.tensor(data.draw(st.lists(st.integers(-100, vocab - 1), min_size=tokens, max_size=tokens)))
    hidden, weight = torch.randn(tokens, 3, dtype=torch.float64), torch.randn(vocab + padding, 3, dtype=torch.float64)
    loss = mpu.vocab_parallel_linear_cross_entropy(hidden, weight, target, chunk_size=chunk, vocab_size=vocab)
    expected = F.cross_entropy((hidden @ weight.T)[:, :vocab], target.clamp(min=-1), reduction="none", ignore_index=-1)
    assert_close(loss, expected, 1e-12)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("wants", [w for w in itertools.product((True, False), repeat=3) if any(w)], ids=str)
def test_only_the_gradients_that_are_asked_for(wants: tuple[bool, bool, bool], chunk_size: int | None) -> None:
    """Of hidden states, weight and bias, any of which may be frozen."""
    own = [torch.randn(*shape).requires_grad_(want) for shape, want in zip(((3, 4), (5, 4), (5,)), wants, strict=True)]
    twins = [x.detach().clone().requires_grad_(want) for x, want in zip(own, wants, strict=True)]
    target = torch.tensor([0, 1, 2])
    mpu.vocab_parallel_linear_cross_entropy(own[0], own[1], target, bias=own[2], chunk_size=chunk_size).sum().backward()
    F.cross_entropy(F.linear(*twins), target, reduction="sum").backward()
    for mine, twin in zip(own, twins, strict=True):
        assert (mine.grad is None) == (twin.grad is None)
        if twin.grad is not None:
            assert_close(mine.grad, twin.grad, 1e-6)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_autocast_reaches_both_forms(chunk_size: int | None) -> None:
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    target = torch.randint(8, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = mpu.vocab_parallel_linear_cross_entropy(hidden, weight, target, chunk_size=chunk_size)
    loss.sum().backward()
    h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    F.cross_entropy(h @ w.T, target, reduction="sum").backward()
    assert_close([hidden.grad, weight.grad], [h.grad, w.grad], 3e-2)


def test_a_second_derivative_is_refused() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    loss = mpu.vocab_parallel_cross_entropy(logits, torch.tensor([0, 1])).square().sum()
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint8, torch.uint16, torch.uint32], ids=str)
def test_targets_of_any_integer_type(dtype: torch.dtype) -> None:
    logits, target = torch.randn(3, 8), torch.tensor([0, 7, 2])
    expected = F.cross_entropy(logits, target, reduction="none")
    assert_close(mpu.vocab_parallel_cross_entropy(logits, target.to(dtype)), expected, 1e-6)
    hidden, weight = torch.randn(3, 4), torch.randn(8, 4)
    expected = F.cross_entropy(hidden @ weight.T, target, reduction="none")
    assert_close(
        mpu.vocab_parallel_linear_cross_entropy(hidden, weight, target.to(dtype), chunk_size=2), expected, 1e-6
    )


def test_what_is_refused() -> None:
    logits, hidden, weight = torch.zeros(2, 8), torch.zeros(2, 3), torch.zeros(8, 3)
    target = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="target 7: .* vocabulary size 7"):
        mpu.vocab_parallel_cross_entropy(logits, torch.tensor([7, 0]), vocab_size=7)
    with pytest.raises(ValueError, match="target 8: .* vocabulary size 8"):
        mpu.vocab_parallel_linear_cross_entropy(hidden, weight, torch.tensor([0, 8]), chunk_size=1)
    with pytest.raises(ValueError, match=r"target of shape \(3,\)"):
        mpu.vocab_parallel_cross_entropy(logits, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"target of shape \(1,\)"):
        mpu.vocab_parallel_linear_cross_entropy(hidden, weight, target[:1], chunk_size=1)
    with pytest.raises(ValueError, match=r"targets of torch\.float32: ids must be integers"):
        mpu.vocab_parallel_cross_entropy(logits, torch.tensor([1.5, 0.0]))
    with pytest.raises(ValueError, match=r"targets of torch\.bool"):
        mpu.vocab_parallel_linear_cross_entropy(hidden, weight, torch.tensor([True, False]), chunk_size=1)
    with pytest.raises(ValueError, match="vocab_size 9: .* at most 8"):
        mpu.vocab_parallel_cross_entropy(logits, target, vocab_size=9)
    with pytest.raises(ValueError, match="chunk_size 0"):
        mpu.vocab_parallel_linear_cross_entropy(hidden, weight, target, chunk_size=0)
    with pytest.raises(ValueError, match="tokens, h"):
        mpu.vocab_parallel_linear_cross_entropy(hidden[None], weight, target[None])
