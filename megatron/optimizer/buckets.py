"""Buckets: parameters in one flat buffer, their gradients in another, and the collectives between data ranks."""

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.mpu.collectives import (
    Pending,
    start_all_gather_first_dim,
    start_all_reduce,
    start_reduce_scatter_first_dim,
)
from megatron.mpu.initialize import GroupInfo
from megatron.optimizer.precision import PrecisionConfig
from megatron.optimizer.segments import Entry, Layout, Range, plan


def main_gradient(parameter: Tensor) -> Tensor:
    """`parameter.main_grad`: the view, of the parameter's shape, into which its gradients are added."""
    return cast(Any, parameter).main_grad


class Bucket:
    """Parameters of one dtype and device, and their gradients, each in one contiguous buffer.

    Each parameter becomes a view of the first buffer, its values kept; its attribute `main_grad` is a view of the
    second. Padding is zero in both and stays so.

    Attributes:
        layout: which parameter lies where.
        parameters: by name.
        weights, gradients: the buffers, 1-D, of `layout.size` elements.
        held: the elements that this rank updates: its shard, or all of them where every data rank updates all.

    Args:
        layout: of the parameters, padded for the size of `data`.
        parameters: all of the model's, by name.
        gradient_dtype: at least as wide as the parameters'.
        data: the data-parallel ranks.
        sharded: whether each data rank updates its shard only.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        gradient_dtype: torch.dtype,
        data: GroupInfo,
        sharded: bool,
    ) -> None:
        self.layout = layout
        self.parameters = {slot.name: parameters[slot.name] for slot in layout.slots}
        self.data, self.sharded = data, sharded and data.size > 1
        self.held = layout.shard(data.rank, data.size) if self.sharded else Range(0, layout.size)
        first = next(iter(self.parameters.values()))
        self.weights = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(layout.size, dtype=gradient_dtype, device=first.device)
        for slot in layout.slots:
            self._move_in(self.parameters[slot.name], slot.range)

    def _move_in(self, parameter: nn.Parameter, place: Range) -> None:
        view = self.weights[place.slice].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view  # the same Parameter object: hooks, ties and attributes stay
        cast(Any, parameter).main_grad = self.gradients[place.slice].view(parameter.shape)

    def check_views(self) -> None:
        """ValueError where a parameter is not the view of the buffer any more that it was made."""
        begin, width = self.weights.data_ptr(), self.weights.element_size()
        for slot in self.layout.slots:
            if slot.range.size and self.parameters[slot.name].data_ptr() != begin + slot.range.begin * width:
                raise ValueError(
                    f"parameter {slot.name} was given other memory after its optimizer was made: move, cast or assign "
                    "parameters before that"
                )

    def start_reduction(self) -> Pending:
        """Begin to sum the gradients over the data ranks, in place.

        One all-reduce; sharded, one reduce-scatter, after which only the elements `held` mean anything.
        """
        if self.sharded:
            own = self.gradients[self.held.slice]
            return start_reduce_scatter_first_dim(self.gradients, self.data, out=own)
        return start_all_reduce(self.gradients, self.data)

    def start_gathering(self) -> Pending:
        """Begin to fetch what the other data ranks have updated. One all-gather, in place; nothing if not sharded."""
        if self.sharded:
            return start_all_gather_first_dim(self.weights[self.held.slice], self.data, out=self.weights)
        return Pending(self.weights)


def make_buckets(
    parameters: Mapping[str, nn.Parameter],
    precision: PrecisionConfig,
    size: int,
    own: Collection[str],
    *,
    data: GroupInfo,
    sharded: bool,
    parts: Mapping[str, int] | None = None,
) -> list[Bucket]:
    """Move parameters, by name in the model's order, into buckets; `plan` says how, `Bucket` what comes of it.

    Without `parts` all parameters are of one part. Raises ValueError for a parameter that is not in `parts`.
    """
    lost = [] if parts is None else [name for name in parameters if name not in parts]
    if lost:
        raise ValueError(f"parts: they do not say to which part of the model {', '.join(lost)} belong")
    entries = [
        Entry(name, p.numel(), (p.dtype, p.device), 0 if parts is None else parts[name])
        for name, p in parameters.items()
    ]
    buckets = []
    for layout in plan(entries, size, data.size, own):
        dtype = parameters[layout.slots[0].name].dtype
        buckets.append(Bucket(layout, parameters, _gradient_dtype(dtype, precision), data, sharded))
    return buckets


def _gradient_dtype(dtype: torch.dtype, precision: PrecisionConfig) -> torch.dtype:
    """Of the gradients of parameters of `dtype`: what is asked for, or else float32 at least."""
    return precision.gradient_dtype if dtype == precision.dtype else torch.promote_types(dtype, torch.float32)
