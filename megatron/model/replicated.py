"""Small parts of a model that every tensor rank has whole: a linear map, and vectors that are looked up."""

from dataclasses import replace
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.model.init import Fill
from megatron.model.placement import Placement
from megatron.mpu.sharding import Sharding


class Replicated(nn.Module):
    """Parameters that all tensor ranks hold whole, and what they begin with.

    Those of a module that works on a shard of the sequence (`sequence_parallel` of its placement) have a term of their
    gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sharding: dict[str, Sharding] = {}
        self.initializers: dict[str, Fill] = {}

    def add(self, name: str, shape: tuple[int, ...], fill: Fill, **where: Unpack[Placement]) -> None:
        """Register a parameter, drawn as the layers of mpu do unless it is on "meta": in float32 on the CPU, from the
        stream that all tensor ranks share."""
        parameter = nn.Parameter(torch.empty(shape, dtype=where.get("dtype"), device=where.get("device")))
        self.register_parameter(name, parameter)
        partial = where.get("sequence_parallel", False)
        self.sharding[name] = replace(mpu.replicated(name, parameter), partial_gradient=partial)
        self.initializers[name] = fill
        if parameter.is_meta:
            return
        whole = torch.empty(shape, dtype=torch.float32, device="cpu")
        with torch.no_grad(), mpu.get_rng_tracker().fork(mpu.PARAMETER_STREAM):
            fill(whole)
            parameter.copy_(whole)


class ReplicatedLinear(Replicated):
    """`y = x A^T + b`, the same on every tensor rank. weight: [output, input]; bias: [output]. No collectives."""

    def __init__(self, input_size: int, output_size: int, fill: Fill, **where: Unpack[Placement]) -> None:
        super().__init__()
        self.weight: nn.Parameter
        self.bias: nn.Parameter
        self.add("weight", (output_size, input_size), fill, **where)
        self.add("bias", (output_size,), nn.init.zeros_, **where)

    def forward(self, x: Tensor) -> Tensor:
        """[..., input] -> [..., output]."""
        return F.linear(x, self.weight, self.bias)
