"""Sixteen-bit parameters in one process: master weights against loops written by hand, skipped steps, loading."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.mpu.sharding import parameter_shardings
from megatron.optimizer import Optimizer, OptimizerConfig, PrecisionConfig, main_gradient

BETAS, EPS, DECAY, CLIP, LR = (0.8, 0.95), 1e-6, 0.1, 0.05, 0.05
CONFIG = OptimizerConfig(
    weight_decay=DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=EPS, clip_grad=CLIP, ddp_bucket_size=20
)


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).to(dtype)


def make_optimizer(model: nn.Module, precision: PrecisionConfig, config: OptimizerConfig = CONFIG) -> Optimizer:
    return Optimizer(model, parameter_shardings(model), config, precision)


def batch(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step)).to(dtype)


def losses(model: nn.Module, step: int, scale: float) -> list[Tensor]:
    dtype = next(model.parameters()).dtype
    return [model(part).float().square().sum() * scale for part in batch(step, dtype).split(2)]


def by_hand(model: nn.Module, precision: PrecisionConfig, scale: float, steps: int) -> list[Tensor]:
    """The master weights after some steps; `model` follows them."""
    parameters = list(model.parameters())
    masters = [p.detach().float() for p in parameters]
    first, second = [torch.zeros_like(w) for w in masters], [torch.zeros_like(w) for w in masters]
    for step in range(1, steps + 1):
        total = [torch.zeros_like(w, dtype=precision.gradient_dtype) for w in masters]
        for loss in losses(model, step, scale):
            for sum_, gradient in zip(total, torch.autograd.grad(loss, parameters), strict=True):
                sum_ += gradient
        gradients = [g.double() / (scale * 4.0) for g in total]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        assert norm > CLIP  # so that clipping is part of it
        for p, w, g, m, v in zip(parameters, masters, gradients, first, second, strict=True):
            g = (g * (CLIP / (norm + 1e-6))).float()
            m.mul_(BETAS[0]).add_(g * (1 - BETAS[0]))
            v.mul_(BETAS[1]).add_(g * g * (1 - BETAS[1]))
            w.mul_(1 - LR * (DECAY if w.dim() > 1 else 0.0))
            w.sub_(LR * m / (1 - BETAS[0] ** step) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS))
            p.data.copy_(w)
    return masters


@pytest.mark.parametrize(
    "precision",
    [
        PrecisionConfig(fp16=True, loss_scale=64.0),
        PrecisionConfig(fp16=True, loss_scale=64.0, accumulate_allreduce_grads_in_fp32=True),
        PrecisionConfig(bf16=True),
    ],
    ids=["fp16", "fp16 with float32 gradients", "bf16"],
)
def test_master_weights_follow_a_float32_loop(precision: PrecisionConfig) -> None:
    model = make_model(precision.dtype)
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(model, precision)
    scale = 64.0 if precision.fp16 else 1.0
    assert optimizer.loss_scale == scale
    for step in range(1, 7):
        optimizer.zero_grad()
        for loss in losses(model, step, optimizer.loss_scale):
            loss.backward()
        assert main_gradient(model[0].weight).dtype == precision.gradient_dtype
        optimizer.reduce_gradients(4.0)
        assert not optimizer.step(LR).skipped
    masters = by_hand(twin, precision, scale, 6)
    state = optimizer.state_tensors()
    for (name, parameter), expected, weight in zip(model.named_parameters(), masters, twin.parameters(), strict=True):
        master = state[f"optimizer.master_weight.{name}"][0]
        assert master.dtype == torch.float32 and parameter.dtype == precision.dtype
        torch.testing.assert_close(master, expected, rtol=2e-6, atol=2e-6)
        assert torch.equal(parameter, master.to(parameter.dtype))
        torch.testing.assert_close(parameter, weight, rtol=1e-2, atol=1e-3)


def snapshot(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    return [t.detach().clone() for t in [*model.parameters(), *(t for t, _ in optimizer.state_tensors().values())]]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def one_step(model: nn.Module, optimizer: Optimizer, value: float) -> Any:
    optimizer.zero_grad()
    for parameter in model.parameters():
        main_gradient(parameter).fill_(0.5)
    main_gradient(model[0].weight)[2, 1] = value
    optimizer.reduce_gradients(1.0)
    return optimizer.step(LR)


def test_overflow_skips_the_step_and_lowers_the_scale() -> None:
    model = make_model(torch.float16)
    precision = PrecisionConfig(fp16=True, initial_loss_scale=64.0, hysteresis=2, loss_scale_window=2)
    optimizer = make_optimizer(model, precision)
    assert not one_step(model, optimizer, 1.0).skipped
    before = snapshot(model, optimizer)
    scales = []
    for bad in (math.inf, math.nan, -math.inf):
        result = one_step(model, optimizer, bad)
        assert result.skipped and not math.isfinite(result.grad_norm)
        scales.append(optimizer.loss_scale)
    assert scales == [64.0, 32.0, 16.0]
    assert same(before, snapshot(model, optimizer))
    assert optimizer.step_count == 1
    # The steps after it are as if it had not been: the bias correction does not count it.
    twin = make_model(torch.float16)
    other = make_optimizer(twin, PrecisionConfig(fp16=True, initial_loss_scale=64.0, loss_scale_window=2))
    one_step(twin, other, 1.0)
    other.load_state({"step_count": 1, "loss_scaler": optimizer.state()["loss_scaler"]})
    for expected_scale in (16.0, 32.0):
        assert one_step(model, optimizer, 1.0) == one_step(twin, other, 1.0)
        assert optimizer.loss_scale == other.loss_scale == expected_scale
    assert same(snapshot(model, optimizer), snapshot(twin, other))
    assert optimizer.step_count == 3


def test_too_many_skipped_steps_in_a_row_end_the_run() -> None:
    model = make_model(torch.float16)
    optimizer = make_optimizer(model, PrecisionConfig(fp16=True, loss_scale=8.0, max_skipped_steps=3))
    for value in (math.inf, math.inf, 1.0, math.inf, math.inf):  # a good step between begins the count anew
        assert one_step(model, optimizer, value).skipped == math.isinf(value)
    assert optimizer.loss_scale == 8.0
    assert optimizer.state()["skipped_in_a_row"] == 2
    with pytest.raises(FloatingPointError, match=r"--max-skipped-steps 3.*0\.weight"):
        one_step(model, optimizer, math.nan)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bfloat16_does_not_skip_but_stops(bad: float) -> None:
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model, PrecisionConfig(bf16=True))
    one_step(model, optimizer, 1.0)
    before = snapshot(model, optimizer)
    with pytest.raises(FloatingPointError, match=r"0\.weight"):
        one_step(model, optimizer, bad)
    assert same(before, snapshot(model, optimizer)) and optimizer.step_count == 1


def test_after_a_load_weights_and_masters_agree() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model, PrecisionConfig(bf16=True))
    values = torch.randn(5, 3)
    master = optimizer.state_tensors()["optimizer.master_weight.0.weight"][0]
    master.copy_(values)
    optimizer.after_load(masters=True)
    assert torch.equal(model[0].weight, values.bfloat16())
    with torch.no_grad():
        model[0].weight.copy_(2 * values)
    optimizer.after_load(masters=False)
    assert torch.equal(master, (2 * values).bfloat16().float())


def test_state_of_a_run_continues_bit_for_bit() -> None:
    precision = PrecisionConfig(fp16=True, initial_loss_scale=64.0, hysteresis=1, loss_scale_window=3)
    values = [1.0, math.inf, 2.0, 0.5, 0.1, 0.7, math.inf, 1.0]
    whole = make_model(torch.float16)
    uninterrupted = make_optimizer(whole, precision)
    results = [one_step(whole, uninterrupted, value) for value in values]
    first = make_model(torch.float16)
    optimizer = make_optimizer(first, precision)
    for value in values[:4]:
        one_step(first, optimizer, value)
    second = make_model(torch.float16)
    resumed = make_optimizer(second, precision)
    for name, (tensor, _) in resumed.state_tensors().items():
        tensor.copy_(optimizer.state_tensors()[name][0])
    resumed.after_load(masters=True)
    resumed.load_state(optimizer.state())
    assert [one_step(second, resumed, value).skipped for value in values[4:]] == [r.skipped for r in results[4:]]
    assert same(snapshot(whole, uninterrupted), snapshot(second, resumed))
    assert resumed.state() == uninterrupted.state()


def test_parameters_of_several_dtypes_each_keep_their_own() -> None:
    model = nn.Sequential(nn.Linear(3, 3).half(), nn.LayerNorm(3), nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16())
    optimizer = make_optimizer(model, PrecisionConfig(fp16=True, loss_scale=4.0))
    one_step(model, optimizer, 0.5)
    gradients = [main_gradient(layer.weight).dtype for layer in model]
    assert gradients == [torch.float16, torch.float32, torch.float64, torch.float32]
    masters = {n: t.dtype for n, (t, _) in optimizer.state_tensors().items() if "master_weight" in n}
    assert set(masters) == {f"optimizer.master_weight.{i}.{n}" for i in (0, 3) for n in ("weight", "bias")}
    assert set(masters.values()) == {torch.float32}
    assert optimizer.state_tensors()["optimizer.exp_avg.2.weight"][0].dtype == torch.float64
