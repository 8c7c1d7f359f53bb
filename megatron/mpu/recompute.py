"""Activation checkpointing: forget what a function computed and compute it again, with the same random numbers."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks

from megatron.mpu.collectives import all_gather_first_dim
from megatron.mpu.initialize import SERIAL_GROUP, Group, GroupInfo, resolve_group
from megatron.mpu.random import get_rng_tracker


def checkpoint(function: Callable[..., Any], *args: Any, distribute: bool = False, group: Group = None) -> Any:
    """`function(*args)`, keeping only `args`; the rest is computed again in the backward pass.

    The default generators and the tracker's streams are set back for the second run and put right after it, so that
    dropout draws the same masks and gradients are equal bit for bit. The second run repeats the collectives of the
    first up to the last tensor that the backward pass needs; what comes after it is left out.

    Args:
        distribute: of each floating-point tensor among `args` keep only this rank's share, 1/t of the elements. They
            must be equal on the ranks of `group`, and are gathered before the second run: backward an all-gather each.
        group: the ranks for `distribute`; None is the current tensor group.
    """
    as_before = _AsBefore()
    info = resolve_group(group) if distribute else SERIAL_GROUP
    hooks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if info.size > 1:  # what PyTorch saves in `checkpoint` itself, outside of `function`, are the arguments
        hooks = saved_tensors_hooks(lambda x: _share(x, info), lambda kept: _whole(kept, info))
        args = tuple(x.contiguous() if isinstance(x, torch.Tensor) else x for x in args)  # as they are when gathered
    with hooks:
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), as_before)
        )


class _Share(NamedTuple):
    """A rank's equal part of a flattened tensor, with zeros behind its end, and the shape of the tensor."""

    part: torch.Tensor
    shape: torch.Size


def _share(x: torch.Tensor, info: GroupInfo) -> torch.Tensor | _Share:
    if not x.is_floating_point() or x.numel() == 0:
        return x
    length = -(-x.numel() // info.size)
    mine = x.detach().view(-1)[info.rank * length : (info.rank + 1) * length]
    part = x.new_zeros(length)
    part[: mine.numel()] = mine
    return _Share(part, x.shape)


def _whole(kept: torch.Tensor | _Share, info: GroupInfo) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    return all_gather_first_dim(kept.part, info)[: kept.shape.numel()].view(kept.shape)


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
