"""Precision: formats that follow from the flags, complaints, and the loss scale against a table made by hand."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.base.complaints import ConfigError
from megatron.checkpointing.values import from_json, to_json
from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.loss_scaler import DynamicLossScaler, make_loss_scaler
from megatron.optimizer.precision import PrecisionConfig

FORMATS = [  # given, then parameters, gradients, master weights
    ({}, "float32", "float32", "float32"),
    ({"params_dtype": "float64"}, "float64", "float64", "float64"),
    ({"fp16": True}, "float16", "float16", "float32"),
    ({"fp16": True, "accumulate_allreduce_grads_in_fp32": True}, "float16", "float32", "float32"),
    ({"bf16": True}, "bfloat16", "float32", "float32"),
    ({"accumulate_allreduce_grads_in_fp32": True}, "float32", "float32", "float32"),
]


@pytest.mark.parametrize(("given", "parameters", "gradients", "masters"), FORMATS)
def test_formats(given: dict[str, Any], parameters: str, gradients: str, masters: str) -> None:
    config = PrecisionConfig(**given)
    found = (config.dtype, config.gradient_dtype, config.main_dtype)
    assert found == tuple(getattr(torch, name) for name in (parameters, gradients, masters))
    assert config.is_mixed == (config.dtype.itemsize == 2)


WRONG = [
    ({"fp16": True, "bf16": True}, "--fp16 and --bf16"),
    ({"fp16": True, "params_dtype": "float64"}, "--fp16 and --params-dtype float64"),
    ({"bf16": True, "params_dtype": "float64"}, "--bf16 and --params-dtype float64"),
    (
        {"accumulate_allreduce_grads_in_fp32": True, "params_dtype": "float64"},
        "--accumulate-allreduce-grads-in-fp32 and --params-dtype float64",
    ),
    ({"bf16": True, "accumulate_allreduce_grads_in_fp32": False}, "--no-accumulate-allreduce-grads-in-fp32"),
    ({"params_dtype": "float16"}, "--params-dtype float16: accepted are float32, float64"),
    ({"loss_scale": 128.0}, "--loss-scale 128.0: only --fp16"),
    ({"fp16": True, "loss_scale": 0.0}, "--loss-scale 0.0"),
    ({"initial_loss_scale": math.inf}, "--initial-loss-scale inf"),
    ({"initial_loss_scale": math.nan}, "--initial-loss-scale nan"),
    ({"min_loss_scale": -1.0}, "--min-loss-scale -1.0"),
    ({"initial_loss_scale": 2.0, "min_loss_scale": 4.0}, "--min-loss-scale 4.0"),
    ({"loss_scale_window": 0}, "--loss-scale-window 0"),
    ({"hysteresis": 0}, "--hysteresis 0"),
    ({"max_skipped_steps": 0}, "--max-skipped-steps 0"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_complaints_name_the_flags(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PrecisionConfig(**wrong)
    (problem,) = caught.value.problems
    assert problem.startswith(words)


def test_bfloat16_needs_a_device_that_has_it() -> None:
    bf16 = PrecisionConfig(bf16=True)
    (problem,) = bf16.device_problems("Tesla V100-SXM3-32GB", (7, 0))
    assert problem.startswith("--bf16: Tesla V100-SXM3-32GB") and "--fp16" in problem
    assert bf16.device_problems("NVIDIA A100-SXM4-80GB", (8, 0)) == []
    assert bf16.device_problems("cpu", None) == []
    assert PrecisionConfig(fp16=True).device_problems("Tesla V100-SXM3-32GB", (7, 0)) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"optimizer": "lamb"}, "--optimizer lamb: accepted are adam, sgd"),
        ({"overlap_param_gather": True}, "--overlap-param-gather: it needs --use-distributed-optimizer"),
        ({"ddp_bucket_size": 0}, "--ddp-bucket-size 0"),
        ({"sgd_momentum": 1.0}, "--sgd-momentum 1.0"),
        ({"adam_beta2": -0.1}, "--adam-beta2 -0.1"),
    ],
)
def test_complaints_of_the_optimizer(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(**wrong)
    (problem,) = caught.value.problems
    assert problem.startswith(words)


# --- the loss scale ---------------------------------------------------------------------------------------------------


def fp16(**changes: Any) -> PrecisionConfig:
    return PrecisionConfig(**{"fp16": True, "initial_loss_scale": 16.0, "loss_scale_window": 3, **changes})


def scales(config: PrecisionConfig, steps: str) -> list[float]:
    """The scale after each step; `x` is one that overflows, `.` a clean one."""
    scaler, found = make_loss_scaler(config), []
    for step in steps:
        scaler.update(step == "x")
        found.append(scaler.scale)
    return found


TABLE = [
    # The first overflow is let pass, the second one and each after it halve.
    ({}, "xxxx", [16, 8, 4, 2]),
    # Clean steps alone do not give the patience back ...
    ({}, "x.x..x", [16, 16, 8, 8, 8, 4]),
    # ... but a full window does, and doubles.
    ({}, "xx...xx", [16, 8, 8, 8, 16, 16, 8]),
    # The window begins anew after an overflow and after each doubling.
    ({}, "..x......", [16, 16, 16, 16, 16, 32, 32, 32, 64]),
    ({"hysteresis": 1}, "x...x", [8, 8, 8, 16, 8]),
    ({"hysteresis": 3}, "xxxx", [16, 16, 8, 4]),
    ({"min_loss_scale": 5.0}, "xxxx", [16, 8, 5, 5]),
    ({"loss_scale_window": 1}, "..xx.", [32, 64, 64, 32, 64]),
    ({"loss_scale": 128.0}, "xx....", [128] * 6),
]


@pytest.mark.parametrize(("changes", "steps", "expected"), TABLE)
def test_the_rule(changes: dict[str, Any], steps: str, expected: list[float]) -> None:
    assert scales(fp16(**changes), steps) == expected


def test_the_default_falls_from_its_start_to_what_float16_can_hold_within_the_steps_that_may_be_skipped() -> None:
    config = PrecisionConfig(fp16=True)
    assert min(scales(config, "x" * (config.max_skipped_steps - 1))) == 1.0


def test_no_scale_but_for_float16() -> None:
    for config in (PrecisionConfig(), PrecisionConfig(bf16=True)):
        scaler = make_loss_scaler(config)
        scaler.update(True)
        assert scaler.scale == 1.0


CONFIGS = st.builds(
    fp16,
    initial_loss_scale=st.integers(0, 40).map(lambda n: 2.0**n),
    min_loss_scale=st.sampled_from([1.0, 0.25, 0.7]),
    loss_scale_window=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
)
STEPS = st.lists(st.booleans(), max_size=60)


@given(CONFIGS, STEPS, STEPS)
def test_bounds_and_exact_resumption(config: PrecisionConfig, before: list[bool], after: list[bool]) -> None:
    scaler = DynamicLossScaler(config)
    for overflow in before:
        last = scaler.scale
        scaler.update(overflow)
        assert scaler.scale >= config.min_loss_scale
        assert scaler.scale <= last if overflow else scaler.scale in (last, 2 * last)
    resumed = DynamicLossScaler(config)
    resumed.load_state(from_json(to_json(scaler.state())))
    for overflow in after:
        scaler.update(overflow)
        resumed.update(overflow)
        assert resumed.state() == scaler.state()


def test_a_state_meets_other_flags() -> None:
    former = DynamicLossScaler(fp16(hysteresis=4))
    former.update(True)
    former.update(False)
    present = DynamicLossScaler(fp16(min_loss_scale=1.0, hysteresis=2, initial_loss_scale=64.0))
    present.load_state(former.state())
    assert present.state() == {"scale": 16.0, "clean_steps": 1, "patience": 2}
    floor = DynamicLossScaler(fp16(min_loss_scale=32.0, initial_loss_scale=64.0))
    floor.load_state(former.state())
    assert floor.scale == 32.0
    static = make_loss_scaler(fp16(loss_scale=8.0))
    static.load_state(former.state())
    assert static.scale == 8.0
    present.load_state(static.state())
    assert present.scale == 16.0
