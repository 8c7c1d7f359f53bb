"""apex's norm is trusted only after a trial, here of functions that stand for it."""

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from megatron.model import norm
from megatron.model.norm import layer_norm, trial_problem
from tests.harness.closeness import assert_close


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


@pytest.mark.parametrize("around", ["recomputation", "autocast", "inference"])
def test_the_trial_does_not_depend_on_where_the_first_call_comes(around: str) -> None:
    began: list[str] = []
    found: list[str | None] = []

    def call(x: Tensor) -> Tensor:
        began.append(around)
        found.append(trial_problem(in_the_dtype_of_autocast, torch.device("cpu")))
        return x * x

    x = torch.ones(2, requires_grad=True)
    if around == "recomputation":
        mpu.checkpoint(call, x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=around == "autocast")
    with mixed, torch.inference_mode(around == "inference"):
        call(x)
    assert len(began) == len(found) == (3 if around == "recomputation" else 1)
    assert not any(found)


def in_the_dtype_of_autocast(
    *, input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float
) -> Tensor:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input.dtype
    return right(*(x.to(dtype) for x in (input, weight, bias)), normalized_shape, eps)


def test_what_passes_is_used_with_the_right_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(5, 8), torch.randn(8), torch.randn(8)
    expected = layer_norm(x, weight, bias, 0.1)
    monkeypatch.setattr(norm, "_fused_norm", lambda device: without_bias)
    assert torch.allclose(layer_norm(x, weight, bias, 0.1) + bias, expected, atol=1e-6)


FAKE = {
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": "",
    "apex/optimizers/fused_adam.py": "",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": """
from torch.nn import functional
calls = []
def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    calls.append(tuple(input.shape))
    return functional.layer_norm(input, normalized_shape, weight, bias, eps)
""",
}


def test_the_package_is_used_on_an_accelerator_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in FAKE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    cpu, on_cpu = torch.device("cpu"), functools.partial(trial_problem, device=torch.device("cpu"))
    monkeypatch.setattr(norm, "trial_problem", lambda found, device: on_cpu(found))
    choose = norm._fused_norm.__wrapped__
    assert choose(cpu) is None
    chosen = choose(torch.device("cuda", 0))
    module = sys.modules["apex.normalization.fused_layer_norm"]
    assert chosen is module.fused_layer_norm_affine
    monkeypatch.setattr(norm, "_fused_norm", lambda device: chosen)
    before = len(module.calls)
    layer_norm(torch.randn(5, 8), torch.randn(8), torch.randn(8), 1e-5)
    assert module.calls[before:] == [(5, 8)]
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_on_a_cpu_do_not_suffer_from_16_bit_statistics(dtype: torch.dtype) -> None:
    """Far from zero a mean in 16 bits would be off by a good part of the deviation."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 256, generator=generator) + 20).to(dtype).requires_grad_()
    scale = torch.randn(64, 256, generator=generator).to(dtype)
    weight, bias = (torch.full((256,), value, dtype=dtype, requires_grad=True) for value in (1.0, 0.0))
    mine = torch.autograd.grad(layer_norm(x, weight, bias, 1e-5), (x, weight), scale)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    theirs = torch.autograd.grad(F.layer_norm(wide[0], (256,), wide[1], bias.double()), wide, scale.double())
    assert_close(mine, theirs, 0.01)
