"""Comparing two runs: the rule of closeness, which iteration is shown, what is called a fault."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from megatron.parity.closeness import difference
from megatron.parity.compare import TOLERANCES, Outcome, Tolerance, compare
from megatron.parity.pieces import Piece, assemble

EXACT = TOLERANCES["float64"]


def outcome(*gradients: dict[str, list[float]], losses: tuple[float, ...] = (1.0, 2.0)) -> Outcome:
    """A run whose weights at the end are 1, with these gradients in each of its iterations."""
    steps = [[Piece(n, (len(v),), (0,), np.array(v)) for n, v in step.items()] for step in gradients]
    weights = [Piece(name, (2,), (0,), np.ones(2)) for name in gradients[0]]
    return Outcome(list(losses), [3.0, 3.0], [4.0], [assemble(step) for step in steps], assemble(weights))


GOOD = {"a": [1.0, -8.0], "b": [0.5, 0.0]}


def test_a_difference_is_relative_to_the_largest_value() -> None:
    found = difference([1.0, 4.5, -2.0], torch.tensor([1.0, 4.0, -10.0]).double())
    assert (found.worst, found.scale, found.position) == (8.0, 10.0, (2,))
    assert (found.actual, found.expected, found.relative) == (-2.0, -10.0, 0.8)
    assert difference(1e-9, 0.0).relative == math.inf and difference(1e-9, 0.0, floor=1.0).within(1e-9)
    assert difference(1.0 + 1e-12, 1.0).worst > 0  # not rounded to float32
    for one, other in ((math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf)):
        assert difference([one, 0.0], [other, 1.0]).worst == math.inf
    with pytest.raises(ValueError, match=r"shape \(2,\), expected \(3,\)"):
        difference([1.0, 2.0], [1.0, 2.0, 3.0])


def test_equal_runs_have_no_faults() -> None:
    comparison = compare(outcome(GOOD, GOOD), outcome(GOOD, GOOD), EXACT)
    assert comparison.faults() == []
    assert sorted(comparison.numbers) == ["loss 1", "loss 2", "norm 1", "norm 2", "validation 1"]


def test_the_first_wrong_iteration_is_shown_with_what_is_wrong_in_it() -> None:
    """Behind it everything is off, and more."""
    slightly, widely = {"a": [1.0, -8.0], "b": [0.5, 1e-6]}, {"a": [5.0, 5.0], "b": [5.0, 5.0]}
    comparison = compare(outcome(GOOD, slightly, widely), outcome(GOOD, GOOD, GOOD), EXACT)
    assert comparison.iteration == 2
    assert [row.name for row in comparison.rows] == ["b", "a"]
    assert comparison.rows[0].gradient.relative == pytest.approx(1e-6 / 8)  # of the largest of the whole model
    assert comparison.faults() == ["b: its gradient differs"]


def test_losses_and_lost_parameters_are_faults() -> None:
    comparison = compare(outcome(GOOD, GOOD, losses=(1.0, 2.1)), outcome(GOOD, GOOD), EXACT)
    assert comparison.faults() == ["loss 2: 2.1, in one process 2"]
    without = {"a": GOOD["a"]}
    assert compare(outcome(without), outcome(GOOD), EXACT).lost == ["b"]
    half = dataclasses.replace(outcome(GOOD), weights=assemble([Piece("a", (4,), (0,), np.ones(2))]))
    assert half.weights.missing == ["a"]


def test_copies_that_differ_are_a_fault() -> None:
    run = outcome(GOOD)
    twice = assemble([Piece("a", (2,), (0,), np.array(v)) for v in ([1.0, 1.0], [1.0, 1.5])])
    assert twice.apart == {"a": 0.5}
    weights = dataclasses.replace(run.weights, apart={"a": 0.5, "b": 0.0})
    expected = ["a: ranks have different weights of it"]
    for tolerance in (EXACT, Tolerance(1.0, 1.0, 1.0, None)):
        assert compare(dataclasses.replace(run, weights=weights), run, tolerance).faults() == expected
    gradients = dataclasses.replace(run.gradients[0], apart={"a": 0.0, "b": 0.8})
    comparison = compare(dataclasses.replace(run, gradients=[gradients]), run, EXACT)
    assert comparison.faults() == ["b: ranks have different gradients of it"]
    assert comparison.rows[0].gradient_copies == pytest.approx(0.1)


def test_weights_are_not_judged_where_there_is_no_tolerance() -> None:
    run = outcome(GOOD)
    other = dataclasses.replace(run, weights=assemble([Piece(n, (2,), (0,), np.zeros(2)) for n in GOOD]))
    assert compare(other, run, TOLERANCES["float32"]).faults() == []
    assert len(compare(other, run, EXACT).faults()) == 2
