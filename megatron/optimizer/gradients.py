"""Gradients in flat buffers: one contiguous buffer for each dtype and device, a view of it for each parameter."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.mpu.collectives import all_reduce


def main_gradient(parameter: Tensor) -> Tensor:
    """`parameter.main_grad`: the view, of the parameter's shape, into which its gradients are added."""
    return cast(Any, parameter).main_grad


class GradientBuffers:
    """Flat buffers that collect the gradients of parameters over the micro-batches of an iteration.

    Each parameter gets an attribute `main_grad`, a view of its buffer with its own shape and dtype. Autograd's gradient
    is added there as soon as it is complete for one backward pass, and `grad` is None again: a parameter that is used
    twice (tied) is counted once with both contributions, one that is not used stays zero. A layer may also add to
    `main_grad` itself and give None to autograd.

    Attributes:
        parameters: those with `requires_grad`, each once, in the order given.
        flats: the buffers, 1-D.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        kinds = dict.fromkeys((p.dtype, p.device) for p in self.parameters)
        self.flats = [_buffer([p for p in self.parameters if (p.dtype, p.device) == kind]) for kind in kinds]
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(_take_gradient)

    def zero(self) -> None:
        """Start an iteration: all gradients are zero."""
        for flat in self.flats:
            flat.zero_()

    def all_reduce(self, group: ProcessGroup | None) -> None:
        """Sum over the ranks of `group` (None: this rank alone). One all-reduce for each buffer."""
        if group is not None:
            for flat in self.flats:
                all_reduce(flat, group)

    def scale(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        for flat in self.flats:
            flat.mul_(factor)


def _buffer(parameters: list[nn.Parameter]) -> Tensor:
    """A zero buffer for parameters of one dtype and device, which get their views of it."""
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, part in zip(parameters, flat.split(sizes), strict=True):
        cast(Any, parameter).main_grad = part.view(parameter.shape)
    return flat


def _take_gradient(parameter: Tensor) -> None:
    """Move the gradient that autograd has just completed into `main_grad`."""
    if parameter.grad is not None:
        main_gradient(parameter).add_(parameter.grad)
        parameter.grad = None
