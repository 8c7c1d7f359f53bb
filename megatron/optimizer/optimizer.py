"""The optimizer of a run: gradient buffers, reduction, clipping by the global norm, AdamW."""

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.mpu.sharding import Sharding
from megatron.optimizer.adamw import make_adamw
from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.gradients import GradientBuffers, main_gradient
from megatron.optimizer.norm import global_gradient_norm

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW for a model that is split over tensor ranks and replicated over data ranks.

    One iteration: `zero_grad()`, a backward pass for each micro-batch, `reduce_gradients(divisor)`, `step(lr)`.

    Args:
        model: its parameters with `requires_grad` are trained; gradients are collected from now on.
        shardings: where each parameter belongs, by the names of `model.named_parameters()`. One-dimensional parameters
            (biases, norms) are not decayed.
        config: AdamW's constants and the clipping.
        data_group: ranks with the same weights and other samples; None for this rank alone.
        tensor_group: ranks that share the model's layers; None for this rank alone.
        tensor_rank: this rank's place in `tensor_group`.

    Raises ValueError where nothing is trained or a parameter has no sharding.
    """

    def __init__(
        self,
        model: nn.Module,
        shardings: Mapping[str, Sharding],
        config: OptimizerConfig,
        *,
        data_group: ProcessGroup | None = None,
        tensor_group: ProcessGroup | None = None,
        tensor_rank: int = 0,
    ) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ValueError("the model has no parameter with requires_grad: there is nothing to train")
        homeless = [name for name in self._parameters if name not in shardings]
        if homeless:
            raise ValueError(f"no sharding is given for the parameters {', '.join(homeless)}")
        self._shardings = {name: shardings[name] for name in self._parameters}
        self._config = config
        self._data_group, self._tensor_group, self._tensor_rank = data_group, tensor_group, tensor_rank
        self.buffers = GradientBuffers(self._parameters.values())
        decayed = [p for name, p in self._parameters.items() if self._is_decayed(name)]
        not_decayed = [p for name, p in self._parameters.items() if not self._is_decayed(name)]
        self._adam = make_adamw(decayed, not_decayed, config)
        self._step_count = 0

    def _is_decayed(self, name: str) -> bool:
        return len(self._shardings[name].global_shape) > 1

    def zero_grad(self) -> None:
        """Forget the gradients of the last iteration."""
        self.buffers.zero()

    def reduce_gradients(self, divisor: float) -> None:
        """Sum the gradients over the data group and divide them, once, by `divisor`.

        `divisor` is what the summed loss is divided by over the whole global batch, usually its counted tokens. One
        all-reduce for each buffer over the data group. Raises ValueError where `divisor` is not above 0.
        """
        if not divisor > 0:
            raise ValueError(f"gradients cannot be divided by {divisor}: no token of the global batch was counted")
        self.buffers.all_reduce(self._data_group)
        self.buffers.scale(1.0 / divisor)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's collected gradients by parameter name: views of the buffers."""
        return {name: main_gradient(parameter) for name, parameter in self._parameters.items()}

    def gradient_norm(self) -> float:
        """The 2-norm of the whole model's gradient. One all-reduce of one number over the tensor group."""
        return global_gradient_norm(self.gradients(), self._shardings, self._tensor_group, self._tensor_rank)

    def step(self, lr: float) -> float:
        """Clip the gradients, move the weights, and return the gradient norm before clipping.

        Clipping multiplies by `clip_grad / (norm + 1e-6)` where that is below 1. Raises FloatingPointError, on every
        rank of the tensor group, where the norm is not finite; weights and moments are untouched then.
        """
        norm = self.gradient_norm()
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}; {self._words_on_non_finite()}")
        factor = self._config.clip_grad / (norm + 1e-6)
        if self._config.clip_grad > 0 and factor < 1:
            self.buffers.scale(factor)
        self._update(lr)
        return norm

    def _update(self, lr: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = lr
        for parameter in self._parameters.values():
            parameter.grad = main_gradient(parameter)
        self._adam.step()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._step_count += 1

    def _words_on_non_finite(self) -> str:
        names = [name for name, gradient in self.gradients().items() if not torch.isfinite(gradient).all()]
        if not names:
            return "all gradients of this rank are finite"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"not finite on this rank: the gradients of {', '.join(names[:3])}{more}"

    @property
    def step_count(self) -> int:
        """Steps taken, which Adam's bias correction needs; part of a checkpoint, to be set when one is loaded."""
        return self._step_count

    @step_count.setter
    def step_count(self, steps: int) -> None:
        self._step_count = steps
        for state in self._adam.state.values():
            state["step"].fill_(steps)

    def state_tensors(self) -> dict[str, tuple[Tensor, Sharding]]:
        """Adam's moments and where they belong, as `optimizer.exp_avg.NAME` and `optimizer.exp_avg_sq.NAME`.

        They have the parameter's shape, exist before the first step (zeros) and are filled in place by a load.
        """
        tensors = {}
        for name, parameter in self._parameters.items():
            for moment in _MOMENTS:
                full_name = f"optimizer.{moment}.{name}"
                sharding = dataclasses.replace(self._shardings[name], name=full_name)
                tensors[full_name] = (self._adam.state[parameter][moment], sharding)
        return tensors
