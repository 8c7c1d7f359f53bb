"""The checks that tests/gpu runs on a GPU, on the CPU: the same code on one gloo rank, in float64 too."""

import pytest
import torch

from megatron import mpu
from tests.harness import device_checks, device_generation
from tests.harness.closeness import assert_close
from tests.harness.ranks import RankError, Ranks

CPU = torch.device("cpu")


def check_layers(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(1)
    for dtype in device_checks.TOLERANCES:
        for chunk_size in (None, 16):
            device_checks.check_layers(CPU, dtype, chunk_size)


def check_the_rest(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(1)
    device_checks.check_streams(CPU)
    device_checks.check_recompute(CPU, torch.float32)
    device_checks.check_collectives(CPU)
    for dtype in device_checks.TOLERANCES:
        device_generation.check_generation(CPU, dtype)


def check_with_a_wrong_layer(rank: int, world_size: int) -> None:
    """The MLP's second bias counted twice, as when every tensor rank adds it before the sum."""
    mpu.initialize_model_parallel(1)
    right = mpu.RowParallelLinear.forward

    def wrong(self: mpu.RowParallelLinear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = right(self, x)
        return output + self.bias, bias

    mpu.RowParallelLinear.forward = wrong  # type: ignore[method-assign]
    try:
        device_checks.check_layers(CPU, torch.bfloat16, None)
    finally:
        mpu.RowParallelLinear.forward = right  # type: ignore[method-assign]


def test_layers_agree_with_float64(ranks: Ranks) -> None:
    ranks(1, check_layers)


def test_streams_recomputation_collectives_and_generation(ranks: Ranks) -> None:
    ranks(1, check_the_rest)


def test_the_widest_tolerance_still_finds_a_wrong_layer(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="AssertionError.*off by"):
        ranks(1, check_with_a_wrong_layer)


def test_closeness_is_relative_to_the_largest_value() -> None:
    assert_close(torch.tensor([1e-9, 100.0]), torch.tensor([0.0, 100.0]), 1e-10)
    assert_close(1.0, 1.0 + 1e-7, 1e-6)
    assert_close({"a": [torch.zeros(2)]}, {"a": [torch.tensor([0.0, 1e-8])]}, 1e-6, floor=0.1)
    with pytest.raises(AssertionError, match=r"off by 1.000e-08 at \(1,\)"):
        assert_close(torch.zeros(2), torch.tensor([0.0, 1e-8], dtype=torch.float64), 1e-6)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2, 1), torch.zeros(2)),
        (torch.tensor([float("nan")]), torch.zeros(1)),
        (torch.tensor([float("inf")]), torch.tensor([float("inf")])),
        ({"a": 1.0}, {"b": 1.0}),
        ([1.0], [1.0, 1.0]),
        (1.0, 1.0 + 2e-6),
    ],
)
def test_what_is_not_close_is_found(actual: object, expected: object) -> None:
    with pytest.raises(AssertionError):
        assert_close(actual, expected, 1e-6)
