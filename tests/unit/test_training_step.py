"""The loss divided once: sums, counts and what is done where nothing is counted."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from megatron import mpu
from megatron.optimizer import Optimizer, OptimizerConfig, PrecisionConfig
from megatron.training.losses import Losses, LossRanks, LossSum, NonFiniteLoss, normalized
from megatron.training.pipeline import Pipeline
from megatron.training.step import Step, train_step

WEIGHT = torch.tensor([[1.0, -2.0, 3.0]])


def run(scale: float, counts: list[float], normalization: str = "tokens") -> tuple[float, float]:
    """Loss and gradient norm of one step over micro-batches that count `counts`, their losses scaled by `scale`."""
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(WEIGHT)
    optimizer = Optimizer(model, mpu.parameter_shardings(model), OptimizerConfig(clip_grad=0.0))
    batches = iter([{"x": torch.eye(3)[i : i + 1]} for i in range(len(counts))])
    numbers = iter(counts)

    def forward_step(module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return module(batch["x"]).sum() * scale, torch.tensor(next(numbers))

    step = train_step(
        Pipeline(model),
        optimizer,
        batches,
        forward_step,
        num_micro_batches=len(counts),
        lr=0.0,
        normalization=normalization,
    )
    return step.loss.mean, step.grad_norm


@pytest.mark.parametrize("count", [0.5, 1.0, 4.0])
def test_loss_and_gradient_are_divided_by_what_is_counted(count: float) -> None:
    """Also where weighted tokens count for less than one."""
    loss, norm = run(2.0, [count, count, 0.0])
    assert loss == pytest.approx(2.0 * (1 - 2 + 3) / (2 * count))
    assert norm == pytest.approx(2.0 * 3**0.5 / (2 * count))


def test_the_mean_of_micro_batch_means() -> None:
    loss, norm = run(1.0, [0.5, 4.0], "microbatch")
    assert loss == pytest.approx((1 / 0.5 - 2 / 4) / 2)
    assert norm == pytest.approx((0.5**-2 + 4**-2) ** 0.5 / 2)


def test_a_batch_that_counts_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token of the global batch was counted"):
        run(1.0, [0.0, 0.0])
    assert LossSum(0.0, 0.0).mean == 0.0
    assert [float(x) for x in normalized(torch.tensor(0.0), torch.tensor(0.0), "microbatch")] == [0.0, 1.0]


def step_at(bias: float, precision: PrecisionConfig, **asked: Any) -> tuple[Step, nn.Linear]:
    """One step on the cross entropy of a token whose logit is `bias`; of minus infinity it has finite gradients."""
    model = nn.Linear(3, 3, dtype=precision.dtype)
    optimizer = Optimizer(model, mpu.parameter_shardings(model), OptimizerConfig(), precision)

    def forward_step(module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = module(batch["x"]).float() + torch.tensor([0.0, bias, 1.0])
        return nn.functional.cross_entropy(logits, torch.tensor([1])), torch.tensor(1.0)

    batches = iter([{"x": torch.ones(1, 3, dtype=precision.dtype)}])
    loop: dict[str, Any] = {"num_micro_batches": 1, "lr": 0.5, "normalization": "tokens"}
    return train_step(Pipeline(model), optimizer, batches, forward_step, **loop, **asked), model


def test_an_infinite_loss_with_finite_gradients_takes_no_step() -> None:
    wide, narrow = PrecisionConfig(), PrecisionConfig(fp16=True, initial_loss_scale=8.0)
    assert math.isfinite(step_at(-math.inf, wide)[0].grad_norm)
    with pytest.raises(NonFiniteLoss, match="micro-batch 0 of rank 0"):
        step_at(-math.inf, wide, check_loss=True)
    for bias, check_loss in ((-1.0, True), (-math.inf, True), (-math.inf, False)):
        torch.manual_seed(0)
        before = nn.Linear(3, 3, dtype=torch.float16).weight
        torch.manual_seed(0)
        step, model = step_at(bias, narrow, expected_count=1.0, check_loss=check_loss)
        assert step.skipped == (bias == -math.inf)
        assert torch.equal(model.weight, before) == step.skipped


def test_the_first_loss_that_is_not_finite_is_named() -> None:
    losses = Losses("tokens", LossRanks(), torch.device("cpu"))
    for number in (1.0, 2.0):
        losses.add(torch.tensor(number), torch.tensor(1.0))
    losses.check()
    for number in (math.inf, math.nan):
        losses.add(torch.tensor(number), torch.tensor(1.0))
    with pytest.raises(NonFiniteLoss, match="micro-batch 2 of rank 0") as caught:
        losses.check()
    assert (caught.value.rank, caught.value.micro_batch) == (0, 2)
