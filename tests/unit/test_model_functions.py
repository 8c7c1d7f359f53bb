"""The pure functions of a layer against their formulas."""

import math

import pytest
import torch

from megatron.model.functions import ACTIVATIONS, bias_dropout_add
from tests.harness.closeness import assert_close

SHAPE = (5, 3, 64)  # [s, b, h]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ["gelu_tanh", "gelu_erf"])
def test_gelu_and_its_gradient(name: str) -> None:
    x = drawn(*SHAPE).requires_grad_()
    if name == "gelu_erf":
        expected = x * (1 + torch.erf(x / math.sqrt(2))) / 2
    else:
        expected = x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    actual = ACTIVATIONS[name](x)
    weights = drawn(*SHAPE, seed=2)
    assert_close(actual, expected, 1e-12)
    mine, theirs = (torch.autograd.grad((y * weights).sum(), x) for y in (actual, expected))
    assert_close(mine, theirs, 1e-12)


def test_the_two_gelus_differ() -> None:
    x = drawn(*SHAPE)
    assert (ACTIVATIONS["gelu_tanh"](x) - ACTIVATIONS["gelu_erf"](x)).abs().max() > 1e-4


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_nothing_is_dropped_without_dropout(p: float, training: bool) -> None:
    x, bias, residual = drawn(*SHAPE), drawn(64, seed=1), drawn(*SHAPE, seed=2)
    before = torch.get_rng_state()
    assert torch.equal(bias_dropout_add(x, bias, residual, p, training), residual + (x + bias))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_takes_x_and_bias_and_spares_the_residual() -> None:
    x, bias, residual = torch.ones(100, 100), torch.ones(100), torch.full((100, 100), 7.0)
    torch.manual_seed(0)
    result = bias_dropout_add(x, bias, residual, 0.2, True)
    dropped = result == 7.0
    assert torch.equal(result[~dropped], torch.full_like(result[~dropped], 7.0 + 2 / 0.8))
    # 10,000 draws: the share dropped is 0.2 with a standard deviation of 0.004.
    assert abs(dropped.double().mean().item() - 0.2) < 0.02


def test_the_functions_compile_to_one_graph() -> None:
    x, bias, residual = drawn(*SHAPE), drawn(64, seed=1), drawn(*SHAPE, seed=2)
    for name, function in ACTIVATIONS.items():
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), function(x)), name
    compiled_add = torch.compile(bias_dropout_add, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    expected = bias_dropout_add(x, bias, residual, 0.1, True)
    torch.manual_seed(0)
    assert torch.equal(compiled_add(x, bias, residual, 0.1, True), expected)
