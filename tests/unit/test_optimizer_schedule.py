"""The learning-rate schedule against Megatron-LM 2.5's own log, closed forms and what must always hold."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.base.complaints import ConfigError
from megatron.optimizer.schedule import Schedule, ScheduleConfig


def rates(config: ScheduleConfig, iterations: int, batch: int = 8, train_iters: int = 10) -> list[float]:
    """The learning rates of iterations 1, 2, ..."""
    schedule = config.resolve(batch, train_iters)
    return [schedule.rate(i * batch) for i in range(iterations)]


@pytest.mark.parametrize(("name", "style"), [("gpt_tp2", "cosine"), ("bert_tp2", "linear")])
def test_equals_the_log_of_megatron_lm(shared: Path, name: str, style: str) -> None:
    curve = json.loads((shared / "data/megatron_2_5" / f"{name}_curve.json").read_text())
    flags = dict(zip(curve["flags"], curve["flags"][1:] + [""], strict=True))
    assert flags["--lr-decay-style"] == style
    config = ScheduleConfig(
        lr=float(flags["--lr"]),
        min_lr=float(flags["--min-lr"]),
        lr_decay_style=style,
        lr_decay_iters=int(flags["--lr-decay-iters"]),
        lr_warmup_fraction=float(flags["--lr-warmup-fraction"]),
    )
    batch = int(flags["--global-batch-size"])
    assert len(curve["train"]) == 10
    for entry in curve["train"]:
        # It logs the rate after the iteration has been counted, with four digits.
        rate = config.resolve(batch, train_iters=10).rate(entry["iteration"] * batch)
        assert float(f"{rate:.3E}") == entry["learning_rate"]


def test_warmup_rises_from_zero_by_equal_steps() -> None:
    config = ScheduleConfig(lr=4.0, lr_decay_style="constant", lr_warmup_iters=4)
    assert rates(config, 7) == pytest.approx([0, 1, 2, 3, 4, 4, 4])


def test_linear_decay_after_warmup() -> None:
    config = ScheduleConfig(lr=1.0, min_lr=0.2, lr_decay_style="linear", lr_warmup_iters=2, lr_decay_iters=10)
    expected = [0, 0.5, *(1 - 0.8 * i / 8 for i in range(8)), 0.2, 0.2]
    assert rates(config, 12) == pytest.approx(expected)


def test_cosine_decay_over_all_training() -> None:
    config = ScheduleConfig(lr=3.0, min_lr=1.0, lr_decay_style="cosine")
    expected = [1 + math.cos(math.pi * i / 10) + 1 for i in range(10)]
    assert rates(config, 11) == pytest.approx([*expected, 1.0])


def test_warmup_fraction_is_of_the_decay() -> None:
    by_fraction = ScheduleConfig(lr=1.0, lr_decay_iters=40, lr_warmup_fraction=0.25)
    by_iterations = ScheduleConfig(lr=1.0, lr_decay_iters=40, lr_warmup_iters=10)
    assert rates(by_fraction, 50) == rates(by_iterations, 50)


def test_samples_are_iterations_times_their_batch() -> None:
    """Also beside each other, and with training given in samples."""
    by_iterations = ScheduleConfig(lr=1.0, lr_decay_iters=40, lr_warmup_iters=10)
    expected = rates(by_iterations, 50)
    for changes in (
        {"lr_decay_samples": 320, "lr_warmup_samples": 80},
        {"lr_decay_iters": 40, "lr_warmup_samples": 80},
        {"lr_decay_samples": 320, "lr_warmup_iters": 10},
        {"lr_decay_samples": 320, "lr_warmup_fraction": 0.25},
    ):
        assert rates(ScheduleConfig(lr=1.0, **changes), 50) == expected
    config = ScheduleConfig(lr=1.0, lr_warmup_iters=10)
    given = [config.resolve(8, train_samples=320).rate(i * 8) for i in range(50)]
    assert given == expected


def test_inverse_square_root() -> None:
    config = ScheduleConfig(lr=1.0, min_lr=0.4, lr_decay_style="inverse-square-root", lr_warmup_iters=2)
    expected = [
        0,
        0.5,
        1,
        (2 / 3) ** 0.5,
        0.5**0.5,
        (2 / 5) ** 0.5,
        (2 / 6) ** 0.5,
        (2 / 7) ** 0.5,
        0.5,
        (2 / 9) ** 0.5,
    ]
    assert rates(config, 11) == pytest.approx([*expected, 0.4])
    at_once = ScheduleConfig(lr=1.0, lr_decay_style="inverse-square-root")
    assert rates(at_once, 5) == pytest.approx([1, 1, 0.5**0.5, (1 / 3) ** 0.5, 0.5])


@given(
    style=st.sampled_from(["constant", "linear", "cosine", "inverse-square-root"]),
    decay=st.integers(1, 50),
    warmup=st.floats(0, 1),
    floor=st.floats(0, 1),
    batch=st.integers(1, 64),
)
def test_rises_to_the_peak_and_falls_to_the_floor(
    style: str, decay: int, warmup: float, floor: float, batch: int
) -> None:
    config = ScheduleConfig(lr=1.0, min_lr=floor, lr_decay_style=style, lr_decay_iters=decay, lr_warmup_fraction=warmup)
    values = rates(config, decay + 3, batch, train_iters=1)
    turn = math.ceil(warmup * decay)
    assert all(a < b for a, b in zip(values[:turn], values[1:turn], strict=False))
    assert all(a >= b - 1e-12 for a, b in zip(values[turn:], values[turn + 1 :], strict=False))
    assert all(0 <= value <= 1 for value in values)
    assert values[-1] == (1.0 if style == "constant" else floor)


SCHEDULES = st.builds(
    lambda style, warmup, decay, batch, rates: Schedule(
        max(rates), min(rates), style, min(warmup, decay), decay, batch
    ),
    st.sampled_from(["constant", "linear", "cosine", "inverse-square-root"]),
    st.sampled_from([0, 2, 4]),
    st.sampled_from([4, 8]),
    st.sampled_from([1, 3]),
    st.tuples(st.sampled_from([0.5, 1.0]), st.sampled_from([0.5, 1.0])),
)


@given(SCHEDULES, SCHEDULES)
def test_schedules_without_a_difference_are_one_function(one: Schedule, other: Schedule) -> None:
    curves = [[schedule.rate(n) for n in range(12)] for schedule in (one, other)]
    if not one.differences(other):
        assert curves[0] == curves[1]
    assert bool(one.differences(other)) == bool(other.differences(one))
    assert one.differences(one) == []


def test_differences_are_of_what_the_flags_come_to() -> None:
    """Not of the flags, and in their numbers."""
    now = ScheduleConfig(lr=1.0, lr_warmup_iters=10, lr_decay_samples=400).resolve(8)
    assert now.differences(ScheduleConfig(lr=1.0, lr_warmup_fraction=0.2, lr_decay_iters=100).resolve(4)) == []
    assert now.differences(ScheduleConfig(lr=0.5, lr_warmup_iters=9).resolve(8, train_iters=40)) == [
        "the largest learning rate is 1.0 and was 0.5",
        "the warm-up in samples is 80 and was 72",
        "the end of the decay in samples is 400 and was 320",
    ]
    constant = ScheduleConfig(lr=1.0, lr_decay_style="constant")
    assert constant.resolve(8, train_iters=40).differences(constant.resolve(8, train_iters=80)) == []


@pytest.mark.parametrize(
    ("wrong", "flags"),
    [
        ({"min_lr": 2.0}, ["--min-lr 2.0", "--lr 1.0"]),
        ({"lr": -1.0}, ["--lr -1.0"]),
        ({"lr": math.nan}, ["--lr nan"]),
        ({"lr_decay_style": "square"}, ["--lr-decay-style square", "constant, linear, cosine, inverse-square-root"]),
        ({"lr_warmup_iters": 11, "lr_decay_iters": 10}, ["--lr-warmup-iters 11", "--lr-decay-iters 10"]),
        ({"lr_warmup_iters": 1, "lr_warmup_fraction": 0.1}, ["--lr-warmup-fraction 0.1", "--lr-warmup-iters 1"]),
        ({"lr_warmup_iters": 1, "lr_warmup_samples": 8}, ["--lr-warmup-iters 1 and --lr-warmup-samples 8"]),
        ({"lr_warmup_fraction": 0.0, "lr_warmup_samples": 8}, ["--lr-warmup-fraction 0.0 and --lr-warmup-samples 8"]),
        ({"lr_decay_iters": 1, "lr_decay_samples": 8}, ["--lr-decay-iters 1 and --lr-decay-samples 8"]),
        ({"lr_warmup_samples": 11, "lr_decay_samples": 10}, ["--lr-warmup-samples 11", "--lr-decay-samples 10"]),
        ({"lr_decay_samples": 0}, ["--lr-decay-samples 0"]),
        ({"lr_warmup_samples": -1}, ["--lr-warmup-samples -1"]),
        ({"lr_warmup_fraction": 1.5}, ["--lr-warmup-fraction 1.5"]),
        ({"lr_warmup_iters": -1}, ["--lr-warmup-iters -1"]),
        ({"lr_decay_iters": 0}, ["--lr-decay-iters 0"]),
        (
            {"override_lr_scheduler": True, "use_checkpoint_lr_scheduler": True},
            ["--override-lr-scheduler and --use-checkpoint-lr-scheduler: give one of them"],
        ),
    ],
)
def test_complaints_name_the_flags(wrong: dict[str, object], flags: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ScheduleConfig(**{"lr": 1.0, **wrong})  # type: ignore[arg-type]
    assert all(any(flag in problem for problem in caught.value.problems) for flag in flags)


def test_all_complaints_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ScheduleConfig(lr=1.0, min_lr=2.0, lr_decay_style="square", lr_warmup_iters=-3)
    assert len(caught.value.problems) == 3


def test_warmup_longer_than_training() -> None:
    config = ScheduleConfig(lr=1.0, lr_warmup_iters=11)
    assert config.training_problems(11) == []
    (problem,) = config.training_problems(10)
    assert "--lr-warmup-iters 11" in problem and "--train-iters 10" in problem
    assert ScheduleConfig(lr=1.0, lr_warmup_iters=11, lr_decay_iters=20).training_problems(10) == []


def test_warmup_and_training_in_different_units() -> None:
    config = ScheduleConfig(lr=1.0, lr_warmup_samples=81)
    assert config.training_problems(10, global_batch_size=9) == []
    (problem,) = config.training_problems(10, global_batch_size=8)
    assert problem == "--lr-warmup-samples 81: it must not be above --train-iters 10 at 8 samples an iteration"
    (problem,) = config.training_problems(None, train_samples=80)
    assert problem == "--lr-warmup-samples 81: it must not be above --train-samples 80"
    mixed = ScheduleConfig(lr=1.0, lr_warmup_iters=11, lr_decay_samples=80)
    assert mixed.training_problems(100, global_batch_size=7) == []
    (problem,) = mixed.training_problems(100, global_batch_size=8)
    assert problem == "--lr-warmup-iters 11: it must not be above --lr-decay-samples 80 at 8 samples an iteration"
