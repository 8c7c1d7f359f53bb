"""The global gradient norm against NumPy in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.mpu.sharding import parameter_shardings
from megatron.optimizer import Optimizer, OptimizerConfig
from megatron.optimizer.norm import squared_norm


def reference(tensor: torch.Tensor) -> float:
    """The sum of squares in float64, by NumPy's pairwise summation."""
    return float(np.square(tensor.detach().double().numpy().ravel()).sum())


@pytest.mark.parametrize("elements", [10_000_000, 30_000_001])
def test_large_tensors_against_float64(elements: int) -> None:
    # Values with a mean: the sum grows steadily, which is where a running float32 sum goes astray.
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(1)).mul_(0.3).add_(1.0)
    expected = reference(tensor)
    assert squared_norm([tensor]).item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(
    ("dtype", "rel"),
    [(torch.float16, 1e-6), (torch.bfloat16, 1e-6), (torch.float32, 1e-6), (torch.float64, 1e-13)],
)
def test_dtypes(dtype: torch.dtype, rel: float) -> None:
    tensor = torch.randn(3, 5003).to(dtype)
    result = squared_norm([tensor])
    assert result.dtype == torch.float64 and result.shape == ()
    assert result.item() == pytest.approx(reference(tensor), rel=rel)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9000), max_size=5))
def test_any_sizes_together(sizes: list[int]) -> None:
    tensors = [torch.arange(1.0, n + 1).div(max(n, 1)) for n in sizes]
    assert squared_norm(tensors).item() == pytest.approx(sum(map(reference, tensors)), rel=1e-6)


def test_not_contiguous_and_scalar() -> None:
    matrix = torch.randn(300, 200)
    tensors = [matrix.t(), torch.tensor(3.0)]
    assert squared_norm(tensors).item() == pytest.approx(reference(matrix) + 9.0, rel=1e-6)


def test_float16_squares_do_not_overflow() -> None:
    assert squared_norm([torch.full((10,), 60000.0, dtype=torch.float16)]).item() == pytest.approx(10 * 59999.99**2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 4095, 4096, 4100])
def test_one_bad_element_shows(bad: float, position: int) -> None:
    tensor = torch.ones(4101)
    tensor[position] = bad
    assert not math.isfinite(squared_norm([tensor]).item())


def test_gradients_of_10_million_parameters() -> None:
    """Through the optimizer's buffer, with the parameters' ends and the padding between them."""
    model = torch.nn.ParameterList(torch.zeros(size) for size in (1, 63, 6_000_001, 4_000_003))
    optimizer = Optimizer(model, parameter_shardings(model), OptimizerConfig(optimizer="sgd", sgd_momentum=0.0))
    generator = torch.Generator().manual_seed(2)
    for gradient in optimizer.gradients().values():
        gradient.normal_(1.0, 0.3, generator=generator)
    optimizer.reduce_gradients(3.0)
    expected = math.sqrt(sum(map(reference, optimizer.gradients().values()))) / 3
    assert optimizer.gradient_norm() == pytest.approx(expected, rel=1e-7)
