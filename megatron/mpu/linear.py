"""A linear map in a tensor-parallel region: collectives run beside its products, and its weight gradient goes home.

Backward there are two products, of the input's gradient and of the weight's. The sum of the input's gradient over the
ranks begins when the first is there and runs during the second. With sequence parallelism (arXiv:2205.05198, section
4.2.2) only this rank's shard of the input is kept; it is gathered again during the first.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron.mpu.collectives import (
    Pending,
    all_gather_first_dim,
    start_all_gather_first_dim,
    start_all_reduce,
    start_reduce_scatter_first_dim,
)
from megatron.mpu.initialize import Group, GroupInfo, resolve_group
from megatron.mpu.mappings import apply, backward_once


@dataclass(frozen=True)
class Entrance:
    """How an input enters the region, and how its gradient leaves it.

    Attributes:
        info: the ranks, each of which uses all of the input.
        sequence_parallel: each rank has a shard of the first dimension, else all of it.
        reduce_gradient: sum the gradient over the ranks; else the input is this rank's own.
    """

    info: GroupInfo
    sequence_parallel: bool = False
    reduce_gradient: bool = True

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All of the input."""
        return all_gather_first_dim(x, self.info) if self.sequence_parallel else x

    def start_gather(self, x: torch.Tensor) -> Pending:
        """Begin `gather`."""
        return start_all_gather_first_dim(x, self.info) if self.sequence_parallel else Pending(x)

    def start_sum(self, grad: torch.Tensor) -> Pending:
        """Begin to sum the gradient of all of the input, which becomes the result or is lost: that of the shard."""
        if self.sequence_parallel:
            return start_reduce_scatter_first_dim(grad, self.info)
        return start_all_reduce(grad, self.info) if self.reduce_gradient else Pending(grad)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast turns the operands of a product with `x` into; None where it leaves them alone."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Where the gradients of `weight` are summed up, if it is a leaf that has such a place."""
    return getattr(weight, "main_grad", None) if weight.is_leaf else None


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`total += a @ b`, in one kernel where the dtypes are equal."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _weight_gradient(weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """`grad^T x` over all tokens: added to the weight's `main_grad`, or returned where it has none."""
    rows, columns = grad.reshape(-1, grad.size(-1)).t(), x.reshape(-1, x.size(-1))
    total = main_grad(weight)
    if total is None:
        return (rows @ columns).to(weight.dtype)
    add_product(total, rows, columns)
    return None


class _ParallelLinear(torch.autograd.Function):
    """forward nothing, backward all-reduce; with sequence parallelism forward all-gather, backward all-gather and
    reduce-scatter. Keeps the input as it came."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        entrance: Entrance,
    ) -> torch.Tensor:
        ctx.entrance, ctx.bias_dtype = entrance, None if bias is None else bias.dtype
        ctx.weight = weight  # itself: what `saved_tensors` gives back may be another object, without `main_grad`
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return F.linear(entrance.gather(x), weight.to(dtype), bias)

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        gathered = ctx.entrance.start_gather(x) if wants_weight else None
        grad_input = grad @ weight.to(grad.dtype) if wants_input else None
        whole = None if gathered is None else gathered.wait()  # collectives of a group come one after another anyway
        summed = None if grad_input is None else ctx.entrance.start_sum(grad_input)
        grad_weight = None if whole is None else _weight_gradient(ctx.weight, grad, whole)
        grad_bias = grad.reshape(-1, grad.size(-1)).sum(0).to(ctx.bias_dtype) if wants_bias else None
        return None if summed is None else summed.wait(), grad_weight, grad_bias, None, None


def parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = None,
    sequence_parallel: bool = False,
    reduce_gradient: bool = True,
) -> torch.Tensor:
    """`x weight^T + bias` with this rank's rows of the weight: `[..., input]` -> `[..., output/t]`.

    Forward nothing, backward all-reduce of the input's gradient, which runs while the weight's gradient is computed.
    With `sequence_parallel`, where `x` is this rank's `[s/t, ..., input]` and the result `[s, ..., output/t]`: forward
    all-gather, backward all-gather of the input again and reduce-scatter of its gradient.

    A leaf `weight` that has a tensor `main_grad`, of its shape and perhaps of a wider dtype, gets its gradient added
    there and not to `grad`; the hooks of `register_post_accumulate_grad_hook` run all the same, once for all uses in
    one backward pass. The input is kept as it is given; a strided view is not copied for that. A second derivative
    raises.

    Args:
        x: the input, equal on all ranks, or a shard of it with `sequence_parallel`.
        weight, bias: `[output/t, input]` and `[output/t]`, of the dtype of `x` (or any that autocast casts).
        group: the ranks; None is the current tensor group.
        reduce_gradient: False where `x` is not the same on all ranks but this rank's own part: no collective then.

    Raises:
        ValueError: `sequence_parallel` without `reduce_gradient`: the gradient of a gathered input has to be summed.
    """
    if sequence_parallel and not reduce_gradient:
        raise ValueError("reduce_gradient False: with sequence_parallel the input's gradient is always summed")
    dtype = autocast_dtype(x)
    if dtype is not None:
        x = x.to(dtype)
    entrance = Entrance(resolve_group(group), sequence_parallel, reduce_gradient)
    return apply(_ParallelLinear, x, weight, bias, weight.dtype if dtype is None else dtype, entrance)
