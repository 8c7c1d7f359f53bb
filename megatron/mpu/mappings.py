"""The autograd pairs that take a tensor in and out of a tensor-parallel region.

Each is named by what it does forwards and says what it does backwards. The paper's f (arXiv:1909.08053, figure 3) is
`copy_to`, its g is `reduce_from`. All are the identity in a group of one rank.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from megatron.mpu.collectives import all_gather_first_dim, all_reduce, reduce_scatter_first_dim
from megatron.mpu.initialize import Group, GroupInfo, resolve_group

_Backward = TypeVar("_Backward", bound=Callable[..., Any])


def backward_once(function: _Backward) -> _Backward:
    """For a backward pass that autograd cannot see into: a second derivative raises instead of being wrong."""
    return once_differentiable(function)  # type: ignore[return-value]


def apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    """`function.apply(*args)`, for functions of one result."""
    return function.apply(*args)


def _reduced(x: torch.Tensor, info: GroupInfo, in_place: bool) -> torch.Tensor:
    return all_reduce(x if in_place else x.clone(memory_format=torch.contiguous_format), info)


def _check_divisible(x: torch.Tensor, dim: int, parts: int) -> None:
    if x.size(dim) % parts:
        where = "first" if dim == 0 else "last"
        raise ValueError(f"{where} dimension of size {x.size(dim)}: it must be divisible by {parts} to be split")


def _split_last(x: torch.Tensor, info: GroupInfo, stride: int) -> torch.Tensor:
    """This rank's chunks `rank::size` of the `stride * size` chunks of the last dimension; contiguous."""
    _check_divisible(x, -1, stride * info.size)
    chunks = x.unflatten(-1, (stride, info.size, -1))
    return chunks[..., info.rank, :].flatten(-2).contiguous()


def _gather_last(x: torch.Tensor, info: GroupInfo, stride: int) -> torch.Tensor:
    """The opposite of `_split_last`."""
    _check_divisible(x, -1, stride)
    gathered = all_gather_first_dim(x.unsqueeze(0), info)  # [t, ..., n]
    chunks = gathered.unflatten(-1, (stride, -1)).movedim(0, -2)  # [..., stride, t, n / stride]
    return chunks.flatten(-3)


def _split_first(x: torch.Tensor, info: GroupInfo) -> torch.Tensor:
    _check_divisible(x, 0, info.size)
    return x.chunk(info.size, dim=0)[info.rank].clone(memory_format=torch.contiguous_format)


class _Copy(torch.autograd.Function):
    """forward identity, backward all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, info: GroupInfo) -> torch.Tensor:
        ctx.info = info
        return x.view_as(x)

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _reduced(grad, ctx.info, in_place=False), None


class _Reduce(torch.autograd.Function):
    """forward all-reduce, backward identity. `in_place`: `x` is nobody else's and becomes the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, info: GroupInfo, in_place: bool) -> torch.Tensor:
        if in_place:
            ctx.mark_dirty(x)
        return _reduced(x, info, in_place)

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None, None


class _Scatter(torch.autograd.Function):
    """forward split (last dimension), backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, info: GroupInfo, stride: int) -> torch.Tensor:
        ctx.info, ctx.stride = info, stride
        return _split_last(x, info, stride)

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gather_last(grad, ctx.info, ctx.stride), None, None


class _Gather(torch.autograd.Function):
    """forward all-gather (last dimension), backward split."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, info: GroupInfo, stride: int) -> torch.Tensor:
        ctx.info, ctx.stride = info, stride
        return _gather_last(x, info, stride)

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _split_last(grad, ctx.info, ctx.stride), None, None


class _ScatterSequence(torch.autograd.Function):
    """forward split (first dimension), backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, info: GroupInfo) -> torch.Tensor:
        ctx.info = info
        return _split_first(x, info)

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_gather_first_dim(grad, ctx.info), None


class _GatherSequence(torch.autograd.Function):
    """forward all-gather (first dimension), backward reduce-scatter, or split without `sum_gradients`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, info: GroupInfo, sum_gradients: bool) -> torch.Tensor:
        ctx.info, ctx.sum_gradients = info, sum_gradients
        return all_gather_first_dim(x, info)

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        part = reduce_scatter_first_dim if ctx.sum_gradients else _split_first
        return part(grad, ctx.info), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    """forward reduce-scatter (first dimension), backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, info: GroupInfo) -> torch.Tensor:
        ctx.info = info
        return reduce_scatter_first_dim(x, info)

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_gather_first_dim(grad, ctx.info), None


def copy_to_tensor_model_parallel_region(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Forward identity, backward all-reduce: the entrance of a region whose ranks each use all of `x`.

    A linear map has its entrance in it, `parallel_linear`, where the all-reduce runs beside a product.
    """
    info = resolve_group(group)
    return x if info.size == 1 else apply(_Copy, x, info)


def reduce_from_tensor_model_parallel_region(
    x: torch.Tensor, group: Group = None, *, in_place: bool = False
) -> torch.Tensor:
    """Forward all-reduce, backward identity: the exit of a region whose ranks each hold a term of the sum.

    `in_place` lets `x` become the result; without it `x` is left as it is.
    """
    info = resolve_group(group)
    return x if info.size == 1 else apply(_Reduce, x, info, in_place)


def scatter_to_tensor_model_parallel_region(x: torch.Tensor, group: Group = None, *, stride: int = 1) -> torch.Tensor:
    """Forward split, backward all-gather: `[..., n]` -> this rank's `[..., n / t]`.

    With a `stride` the last dimension is cut in `stride * t` chunks and a rank takes every t-th, from its own rank on.
    """
    info = resolve_group(group)
    return x if info.size == 1 else apply(_Scatter, x, info, stride)


def gather_from_tensor_model_parallel_region(x: torch.Tensor, group: Group = None, *, stride: int = 1) -> torch.Tensor:
    """Forward all-gather, backward split: `[..., n / t]` -> `[..., n]`; `stride` as in `scatter_to_...`."""
    info = resolve_group(group)
    return x if info.size == 1 else apply(_Gather, x, info, stride)


def scatter_to_sequence_parallel_region(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Forward split, backward all-gather: `[s, ...]` -> this rank's `[s / t, ...]`."""
    info = resolve_group(group)
    return x if info.size == 1 else apply(_ScatterSequence, x, info)


def gather_from_sequence_parallel_region(
    x: torch.Tensor, tensor_parallel_output_grad: bool = True, group: Group = None
) -> torch.Tensor:
    """Forward all-gather, backward reduce-scatter: `[s / t, ...]` -> `[s, ...]`.

    With `tensor_parallel_output_grad=False`, where what follows computes the same on every rank, backward split.
    """
    info = resolve_group(group)
    return x if info.size == 1 else apply(_GatherSequence, x, info, tensor_parallel_output_grad)


def reduce_scatter_to_sequence_parallel_region(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Forward reduce-scatter, backward all-gather: a term `[s, ...]` on each rank -> the sum's `[s / t, ...]`."""
    info = resolve_group(group)
    return x if info.size == 1 else apply(_ReduceScatterSequence, x, info)
