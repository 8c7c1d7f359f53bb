"""What those who watch a run write: the same numbers under the same names everywhere."""

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.training.losses import LossSum
from megatron.training.observers import Audience, Console, JsonLines, LoggingConfig, configured_observers
from megatron.training.step import Step
from megatron.training.throughput import Interval, Workload

METRICS = {"iteration": 20, "consumed-samples": 160, "lr": 1e-4, "loss": 2.5, "MFU": 0.5}


def test_every_observer_gets_the_same_numbers_by_the_same_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board, lines = tmp_path / "board", tmp_path / "logs" / "metrics.jsonl"
    audience = Audience(configured_observers(LoggingConfig(tensorboard_dir=str(board), metrics_file=str(lines))))
    audience.on_start("a run")
    audience.on_log(METRICS)
    audience.on_evaluation("validation", {"iteration": 20, "loss": 2.75})
    audience.on_end()
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "a run",
        "iteration 20 | consumed-samples 160 | lr 0.0001 | loss 2.5 | MFU 0.5",
        "validation | iteration 20 | loss 2.75",
    ]
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert records == [{"split": "train", **METRICS}, {"split": "validation", "iteration": 20, "loss": 2.75}]
    events = EventAccumulator(str(board))
    events.Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert set(scalars) == {"consumed-samples", "lr", "loss", "MFU", "validation/loss"}
    assert scalars["loss"] == [(20, 2.5)]
    assert scalars["validation/loss"] == [(20, 2.75)]


def test_a_metrics_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        observer = JsonLines(str(path))
        observer.on_log(METRICS)
        observer.on_end()
    assert len(path.read_text().splitlines()) == 2


def test_only_the_console_is_there_by_default() -> None:
    assert [type(o) for o in configured_observers(LoggingConfig())] == [Console]


def test_an_interval_counts_what_was_training() -> None:
    """Four iterations in 12 s, of which 4 s were an evaluation: 2 s each."""
    now = [0.0]
    work = Workload(tokens=100, flops=8e11, hardware_flops=9e11, world_size=4, peak=2e12)
    interval = Interval(work, clock=lambda: now[0])
    for total, count in ((10.0, 4.0), (20.0, 4.0), (30.0, 8.0), (0.0, 0.0)):
        now[0] += 2.0
        interval.add(Step(LossSum(total, count), grad_norm=total), samples=10)
        if total == 20.0:
            with interval.paused():
                now[0] += 4.0
    report = interval.report()
    assert report == pytest.approx(
        {
            "loss": 60 / 16,
            "grad-norm": 0.0,
            "ms-per-iteration": 2000.0,
            "tokens-per-second": 500.0,
            "TFLOPs-per-device": 1.0,
            "MFU": 0.5,
            "HFU": 0.5625,
        }
    )
    now[0] += 1.0
    interval.add(Step(LossSum(3.0, 1.0), 1.0), samples=10)
    assert interval.report()["ms-per-iteration"] == pytest.approx(1000.0)


@pytest.mark.parametrize(
    ("flops", "executed", "peak", "names"),
    [
        (1.0, 2.0, None, {"TFLOPs-per-device"}),  # the peak of the device is not known
        (1.0, 1.0, 1.0, {"TFLOPs-per-device", "MFU"}),  # nothing is recomputed
        (1.0, 2.0, 1.0, {"TFLOPs-per-device", "MFU", "HFU"}),
        (None, None, 1.0, set()),
    ],
)
def test_what_is_known_of_the_work_is_told(
    flops: float | None, executed: float | None, peak: float | None, names: set[str]
) -> None:
    interval = Interval(Workload(1, flops, executed, 1, peak))
    interval.add(Step(LossSum(1.0, 1.0), 1.0), samples=1)
    assert interval.report().keys() - {"loss", "grad-norm", "ms-per-iteration", "tokens-per-second"} == names


def test_skipped_steps_have_no_share_in_the_loss() -> None:
    now = [0.0]
    interval = Interval(Workload(100, None, None, 1, None), clock=lambda: now[0])
    taken, skipped = Step(LossSum(6.0, 2.0), 1.5), Step(LossSum(math.inf, 2.0), math.inf, skipped=True)
    for step in (skipped, taken, skipped):
        now[0] += 1.0
        interval.add(step, samples=10)
    report = interval.report()
    assert report == {"loss": 3.0, "grad-norm": 1.5, "ms-per-iteration": 1000.0, "tokens-per-second": 1000.0}
    now[0] += 1.0
    interval.add(skipped, samples=10)
    assert interval.report().keys() == {"ms-per-iteration", "tokens-per-second"}
