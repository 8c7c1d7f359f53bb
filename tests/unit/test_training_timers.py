"""Timers: what is measured, and begun anew at each report."""

import pytest
import torch

from megatron.training.timers import TIMERS, Timers


def test_times_are_those_of_one_iteration() -> None:
    now = [0.0]
    timers = Timers(torch.device("cpu"), clock=lambda: now[0])
    with timers.measure("optimizer-step"):
        now[0] += 3.0
    timers.add("forward-compute", 1.0)
    timers.add("forward-compute", 0.5)
    report = timers.report(2)
    assert report.keys() == {f"{name}-{kind}-ms" for name in TIMERS for kind in ("min", "max")}
    assert {name: value for name, value in report.items() if value} == pytest.approx(
        {
            "optimizer-step-min-ms": 1500.0,
            "optimizer-step-max-ms": 1500.0,
            "forward-compute-min-ms": 750.0,
            "forward-compute-max-ms": 750.0,
        }
    )
    assert not any(timers.report(1).values())
