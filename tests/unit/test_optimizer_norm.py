"""The global gradient norm against NumPy in float64."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.mpu.sharding import parameter_shardings
from megatron.optimizer import Optimizer, OptimizerConfig
from megatron.optimizer.norm import BLOCK, ShardNorms, squares_of_blocks


def reference(tensor: torch.Tensor) -> float:
    """The sum of squares in float64, by NumPy's pairwise summation."""
    return float(np.square(tensor.detach().double().numpy().ravel()).sum())


def squared_norm(tensor: torch.Tensor) -> float:
    """Of the squares of blocks, with zeros behind the end as in a bucket."""
    flat = torch.nn.functional.pad(tensor.ravel(), (0, -tensor.numel() % BLOCK))
    return squares_of_blocks(flat).sum().item()


@pytest.mark.parametrize("elements", [10_000_000, 30_000_001])
def test_large_tensors_against_float64(elements: int) -> None:
    # Values with a mean: the sum grows steadily, which is where a running float32 sum goes astray.
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(1)).mul_(0.3).add_(1.0)
    assert squared_norm(tensor) == pytest.approx(reference(tensor), rel=1e-7)


@pytest.mark.parametrize(
    ("dtype", "rel"),
    [(torch.float16, 1e-6), (torch.bfloat16, 1e-6), (torch.float32, 1e-6), (torch.float64, 1e-13)],
)
def test_dtypes(dtype: torch.dtype, rel: float) -> None:
    tensor = torch.randn(3, 5003).to(dtype)
    assert squares_of_blocks(tensor[:2, :4992].ravel()).dtype == torch.float64
    assert squared_norm(tensor) == pytest.approx(reference(tensor), rel=rel)


def test_float16_squares_do_not_overflow() -> None:
    assert squared_norm(torch.full((10,), 60000.0, dtype=torch.float16)) == pytest.approx(10 * 59999.99**2)


def optimizer_of(sizes: Sequence[int], bucket_size: int = 40_000_000) -> Optimizer:
    """With gradients that are drawn, of parameters of these sizes."""
    model = torch.nn.ParameterList(torch.zeros(size) for size in sizes)
    config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, ddp_bucket_size=bucket_size)
    optimizer = Optimizer(model, parameter_shardings(model), config)
    generator = torch.Generator().manual_seed(2)
    for gradient in optimizer.gradients().values():
        gradient.normal_(1.0, 0.3, generator=generator)
    return optimizer


@settings(deadline=None)
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=5), st.integers(1, 10000))
def test_any_sizes_in_any_buckets(sizes: list[int], bucket_size: int) -> None:
    optimizer = optimizer_of(sizes, bucket_size)
    expected = math.sqrt(sum(map(reference, optimizer.gradients().values())))
    assert optimizer.gradient_norm() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 4095, 4096, 4100])
def test_one_bad_element_shows_counted_or_not(bad: float, position: int) -> None:
    optimizer = optimizer_of([4101])
    optimizer.gradients()["0"][position] = bad
    assert not math.isfinite(optimizer.gradient_norm())
    for counted in ((), ("0",)):
        assert not ShardNorms(optimizer._buckets, counted, 1, torch.device("cpu")).squared().isfinite().any()


def test_only_what_is_counted_adds() -> None:
    optimizer = optimizer_of([1, 63, 700, 64, 5000], 800)
    for counted in (["0"], ["1", "3"], ["2", "4"], ["0", "1", "2", "3", "4"], []):
        expected = sum(reference(optimizer.gradients()[name]) for name in counted)
        (actual,) = ShardNorms(optimizer._buckets, counted, 1, torch.device("cpu")).squared().tolist()
        assert actual == pytest.approx(expected, rel=1e-6)


class Operations(TorchDispatchMode):
    """Counts what PyTorch is asked to do."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_many_parameters_take_no_more_operations_than_one() -> None:
    counts = []
    for sizes in ([6400], [64] * 100):
        optimizer = optimizer_of(sizes)
        norms = ShardNorms(optimizer._buckets, ["0", "50"], 1, torch.device("cpu"))
        with Operations() as operations:
            norms.squared()
        counts.append(operations.count)
    assert counts[1] <= counts[0] + 1  # what is not counted is taken away
    assert counts[0] < 15


def test_gradients_of_10_million_parameters() -> None:
    """Through the optimizer's buffer, with the parameters' ends and the padding between them."""
    optimizer = optimizer_of((1, 63, 6_000_001, 4_000_003))
    optimizer.reduce_gradients(3.0)
    expected = math.sqrt(sum(map(reference, optimizer.gradients().values()))) / 3
    assert optimizer.gradient_norm() == pytest.approx(expected, rel=1e-7)
