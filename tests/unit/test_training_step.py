"""The loss divided once: sums, counts and what is done where nothing is counted."""

import math

import pytest
import torch
from torch import nn

from megatron import mpu
from megatron.optimizer import Optimizer, OptimizerConfig
from megatron.training.losses import Losses, LossRanks, LossSum, NonFiniteLoss, normalized, scaled
from megatron.training.pipeline import Pipeline
from megatron.training.step import train_step

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


def test_an_infinite_loss_has_no_finite_gradient() -> None:
    """Of a token whose logit is minus infinity the loss is infinite, and its own gradient is finite."""
    for lowest, finite in ((-1.0, True), (-math.inf, False)):
        logits = torch.tensor([[0.0, lowest, 1.0]], dtype=torch.float16, requires_grad=True)
        loss = nn.functional.cross_entropy(logits.float(), torch.tensor([1]))
        assert loss.isfinite() == finite
        (plain,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert plain.isfinite().all()
        (gradient,) = torch.autograd.grad(scaled(loss, 8.0), logits)
        assert gradient.isfinite().any() == finite
        if finite:
            assert torch.equal(gradient, plain * 8)


def test_the_first_loss_that_is_not_finite_is_named() -> None:
    losses = Losses("tokens", LossRanks(), torch.device("cpu"))
    for number in (1.0, 2.0):
        losses.add(torch.tensor(number), torch.tensor(1.0))
    losses.check()
    for number in (math.inf, math.nan):
        losses.add(torch.tensor(number), torch.tensor(1.0))
    with pytest.raises(NonFiniteLoss, match="micro-batch 2 of data-parallel rank 0") as caught:
        losses.check()
    assert (caught.value.data_rank, caught.value.micro_batch) == (0, 2)
