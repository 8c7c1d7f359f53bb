"""Layer norm over the hidden dimension; by NVIDIA apex's kernel on a device where that works.

The only file that tries apex's norm.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron import mpu
from megatron.base.apex import load_from_apex
from megatron.model.config import TransformerConfig
from megatron.model.placement import Placement

_APEX = ("normalization.fused_layer_norm", "fused_layer_norm_affine")


class LayerNorm(nn.LayerNorm):
    """A norm over h, replicated on the tensor ranks. weight, bias: [h].

    With sequence parallelism it works on a shard of the sequence, so that each rank has a term of its gradients.
    """

    def __init__(self, config: TransformerConfig, **where: Unpack[Placement]) -> None:
        dtype, device = where.get("dtype"), where.get("device")
        super().__init__(config.hidden_size, eps=config.layernorm_epsilon, dtype=dtype, device=device)
        self.sharding = {
            name: dataclasses.replace(
                mpu.replicated(name, parameter), partial_gradient=where.get("sequence_parallel", False)
            )
            for name, parameter in self.named_parameters()
        }

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]; mean and variance are computed and kept in float32 or wider."""
        return layer_norm(x, self.weight, self.bias, self.eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """The norm of `x` [..., h] over its last dimension with `weight` and `bias` [h], in the dtype of `x`.

    Raises `ConfigError` on an accelerator where the package called apex is not NVIDIA's.
    """
    fused = _fused_norm(x.device)
    if fused is not None:
        return fused(input=x, weight=weight, bias=bias, normalized_shape=weight.shape, eps=epsilon)
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        return mpu.mappings.apply(_WideNorm, x, weight, bias, epsilon)
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


class _WideNorm(torch.autograd.Function):
    """The norm of 16-bit numbers in float32, of which only 16-bit ones and the statistics are kept.

    For CPUs, whose own kernel keeps the statistics of 16-bit numbers in 16 bits, and sums up the gradient of the weight
    over the tokens in 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        y, mean, scale = torch.native_layer_norm(x.float(), weight.shape, weight.float(), bias.float(), epsilon)
        ctx.save_for_backward(x, weight, mean, scale)
        return y.to(x.dtype)

    @staticmethod
    @mpu.mappings.backward_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        dtypes = (x.dtype, weight.dtype, weight.dtype)
        weight, wants = weight.float(), list(ctx.needs_input_grad[:3])
        wide = torch.ops.aten.native_layer_norm_backward(
            grad.float(), x.float(), weight.shape, mean, scale, weight, weight, wants
        )  # of the bias, here the second weight, it wants the shape alone
        return *(part.to(dtype) if want else None for part, dtype, want in zip(wide, dtypes, wants, strict=True)), None


@functools.cache
def _fused_norm(device: torch.device) -> Callable[..., Any] | None:
    """apex's norm where it is installed and right on `device`; None elsewhere, as on the CPU."""
    if device.type in ("cpu", "meta"):
        return None
    return load_from_apex(*_APEX, lambda found: trial_problem(found, device))


def trial_problem(fused: Callable[..., Any], device: torch.device) -> str | None:
    """What is wrong with apex's norm, as the norm of four numbers on `device` and its gradient show; None if nothing.

    An apex that was built without its kernels can be imported, and raises something when it is called. The first call
    of a model may come in any surroundings, and the answer must not depend on them.
    """
    with _plain_surroundings(device):
        return _trial_problem(fused, device)


@contextlib.contextmanager
def _plain_surroundings(device: torch.device) -> Iterator[None]:
    """With gradients and without autocast, and without the hooks by which recomputation keeps tensors."""
    hooks = saved_tensors_hooks(lambda x: x, lambda kept: kept)  # the innermost are used alone
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), hooks:
        yield


def _trial_problem(fused: Callable[..., Any], device: torch.device) -> str | None:
    x = torch.tensor([[1.0, 2.0, 4.0, 8.0]], device=device, requires_grad=True)
    weight, bias, out = (torch.tensor(row, device=device) for row in ([1.0, 2, 3, 4], [1.0, 1, 0, 0], [1.0, 0, 2, 1]))
    y = fused(input=x, weight=weight, bias=bias, normalized_shape=weight.shape, eps=1e-5)
    expected = F.layer_norm(x, weight.shape, weight, bias, 1e-5)
    mine, theirs = ((value, *torch.autograd.grad(value, x, out.expand_as(x))) for value in (y, expected))
    worst = max(float((a - b).detach().abs().max()) for a, b in zip(mine, theirs, strict=True))
    return None if worst < 1e-3 else f"it is off by {worst:.3g} from PyTorch's norm"
