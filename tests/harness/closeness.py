"""Asserts that things are equal, by the rule of `megatron.parity.closeness`."""

from typing import Any

import torch

from megatron.parity.closeness import as_float64, difference


def assert_close(actual: Any, expected: Any, tol: float, floor: float = 0.0) -> None:
    """Assert that `max|actual - expected| <= tol * max(max|expected|, floor)`.

    Elementwise relative comparison is not used: where exact arithmetic gives zero, rounding leaves noise.

    Args:
        actual: a tensor, array or number; a dict, list or tuple of such is compared entry by entry.
        expected: the same structure; it may be of a wider dtype.
        tol: the accepted difference relative to the largest expected value.
        floor: scale below which the largest expected value does not count, such as the model's largest gradient.
    """
    _compare(actual, expected, tol, floor, "value")


def _compare(actual: Any, expected: Any, tol: float, floor: float, where: str) -> None:
    if isinstance(expected, dict):
        assert isinstance(actual, dict) and actual.keys() == expected.keys(), (
            f"{where}: the keys are {sorted(actual)}, expected {sorted(expected)}"
        )
        for key in expected:
            _compare(actual[key], expected[key], tol, floor, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{where}: {len(actual)} entries, expected {len(expected)}"
        for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            _compare(mine, theirs, tol, floor, f"{where}[{index}]")
    else:
        _compare_tensors(actual, expected, tol, floor, where)


def _compare_tensors(actual: Any, expected: Any, tol: float, floor: float, where: str) -> None:
    mine, theirs = as_float64(actual), as_float64(expected)
    assert mine.shape == theirs.shape, f"{where}: shape {tuple(mine.shape)}, expected {tuple(theirs.shape)}"
    assert torch.isfinite(theirs).all(), f"{where}: the expected values are not all finite"
    assert torch.isfinite(mine).all(), f"{where}: not all finite"
    found = difference(mine, theirs, floor)
    assert found.within(tol), (
        f"{where}: off by {found.worst:.3e} at {found.position} ({found.actual:.9g} against "
        f"{found.expected:.9g}); accepted is {tol:g} x {found.scale:.3e} = {tol * found.scale:.3e}"
    )
