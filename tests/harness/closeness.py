"""What "equal" means in the tests: the largest difference against the largest value of a tensor."""

from typing import Any

import torch
from torch import Tensor


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
        _compare_tensors(_as_float64(actual), _as_float64(expected), tol, floor, where)


def _as_float64(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().to("cpu", torch.float64)


def _compare_tensors(actual: Tensor, expected: Tensor, tol: float, floor: float, where: str) -> None:
    assert actual.shape == expected.shape, f"{where}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    assert torch.isfinite(expected).all(), f"{where}: the expected values are not all finite"
    assert torch.isfinite(actual).all(), f"{where}: not all finite"
    difference = (actual - expected).abs()
    scale = max(expected.abs().max().item(), floor)
    worst = difference.max().item()
    position = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    assert worst <= tol * scale, (
        f"{where}: off by {worst:.3e} at {position} ({actual[position].item():.9g} against "
        f"{expected[position].item():.9g}); accepted is {tol:g} x {scale:.3e} = {tol * scale:.3e}"
    )
