"""Activation checkpointing: forget what a function computed and compute it again, with the same random numbers."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from megatron.mpu.random import get_rng_tracker


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, keeping only `args`; the rest is computed again in the backward pass.

    The default generators and the tracker's streams are set back for the second run and put right after it, so that
    dropout draws the same masks and gradients are equal bit for bit. The second run repeats the collectives of the
    first up to the last tensor that the backward pass needs; what comes after it is left out.
    """
    as_before = _AsBefore()
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), as_before)
    )


class _AsBefore:
    """Inside `with`, the tracker's streams are where they were when this was made. May be entered again and again."""

    def __init__(self) -> None:
        self._tracker = get_rng_tracker()
        self._before = self._tracker.snapshot()

    def __enter__(self) -> None:
        self._now = self._tracker.snapshot()
        self._tracker.restore(self._before)

    def __exit__(self, *error: object) -> None:
        self._tracker.restore(self._now)


def init_checkpointed_activations_memory_buffer(*args: Any, **kwargs: Any) -> None:
    """Does nothing, with a `DeprecationWarning`. Megatron-LM 2.5 kept saved inputs in one buffer of its own against
    fragmentation; PyTorch's allocator made that unnecessary, and there is no buffer here."""
    _warn_no_buffer("init_checkpointed_activations_memory_buffer")


def reset_checkpointed_activations_memory_buffer() -> None:
    """Does nothing, with a `DeprecationWarning`: there is no buffer, as said at `init_...` of the same name."""
    _warn_no_buffer("reset_checkpointed_activations_memory_buffer")


def _warn_no_buffer(name: str) -> None:
    warnings.warn(
        f"{name} does nothing: PyTorch's caching allocator made a buffer for saved activations unnecessary",
        DeprecationWarning,
        stacklevel=3,
    )
