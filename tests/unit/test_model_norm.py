"""apex's norm is trusted only after a trial, here of functions that stand for it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model import norm
from megatron.model.norm import layer_norm, trial_problem


def right(input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float) -> Tensor:
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def without_bias(input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float) -> Tensor:
    return right(input, weight, torch.zeros_like(bias), normalized_shape, eps)


def wrong_gradient(input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float) -> Tensor:
    return right(input, weight, bias, normalized_shape, eps).detach() + input - input.detach()


def test_the_trial() -> None:
    cpu = torch.device("cpu")
    assert trial_problem(right, cpu) is None
    assert trial_problem(without_bias, cpu) == "it is off by 1 from PyTorch's norm"
    assert "from PyTorch's norm" in str(trial_problem(wrong_gradient, cpu))


def test_what_passes_is_used_with_the_right_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(5, 8), torch.randn(8), torch.randn(8)
    expected = layer_norm(x, weight, bias, 0.1)
    monkeypatch.setattr(norm, "_fused_norm", lambda device: without_bias)
    assert torch.allclose(layer_norm(x, weight, bias, 0.1) + bias, expected, atol=1e-6)
