"""AdamW and SGD for lists of tensors, in the fastest form that the device has: apex's, or else PyTorch's fused."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.base.apex import load_from_apex, refuse_unrelated_apex
from megatron.optimizer.config import OptimizerConfig

# What is kept for each parameter, by the names that checkpoints use.
STATE_NAMES = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}

_Groups = list[dict[str, Any]]


class Updater:
    """Moves some tensors by their gradients.

    Attributes:
        parameters: the tensors, those that are decayed first; changed in place.
        state: by name (`STATE_NAMES`), a tensor of each parameter's shape and dtype, in the same order. Zeros from the
            start, so that a checkpoint has the same tensors at any step; changed in place, by a load too.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer | None, names: Sequence[str]):
        self.parameters = list(parameters)
        self._optimizer = optimizer
        self.state = {name: [torch.zeros_like(p) for p in self.parameters] for name in names}
        if optimizer is not None:
            for i, parameter in enumerate(self.parameters):
                optimizer.state[parameter].update({name: tensors[i] for name, tensors in self.state.items()})

    def step(self, lr: float, gradients: Sequence[Tensor]) -> None:
        """Take one step at learning rate `lr`; `gradients` are of the parameters' shapes and dtypes, in their order."""
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None

    def set_step_count(self, steps: int) -> None:
        """Go on as after `steps` steps: Adam's bias correction depends on their number."""
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            if "step" in group:  # apex counts by groups
                group["step"] = steps
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)


def make_updater(decayed: Sequence[Tensor], not_decayed: Sequence[Tensor], config: OptimizerConfig) -> Updater:
    """The updater of tensors of one dtype and device: AdamW, or SGD with momentum.

    Args:
        decayed: tensors that weight decay draws towards zero: at each step by `lr * weight_decay` of their value with
            AdamW; with SGD `weight_decay` of their value is added to their gradient, before the momentum.
        not_decayed: tensors that it leaves alone.
        config: which optimizer, and its constants.

    Both lists may be empty. Raises `ConfigError` where the package called apex is not NVIDIA's.
    """
    refuse_unrelated_apex()
    parameters = [*decayed, *not_decayed]
    groups: _Groups = [
        {"params": list(group), "weight_decay": decay}
        for group, decay in ((decayed, config.weight_decay), (not_decayed, 0.0))
        if group
    ]
    names = [] if config.optimizer == "sgd" and not config.sgd_momentum else STATE_NAMES[config.optimizer]
    if not parameters:
        return Updater([], None, names)
    make = _adam if config.optimizer == "adam" else _sgd
    return Updater(parameters, make(groups, config, parameters[0]), names)


def _sgd(groups: _Groups, config: OptimizerConfig, like: Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)


def _adam(groups: _Groups, config: OptimizerConfig, like: Tensor) -> torch.optim.Optimizer:
    """AdamW for parameters of the dtype and device of `like`, with its step counts at 0."""
    options: dict[str, Any] = {"lr": 0.0, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    apex = _fused_adam(like.device) if like.dtype == torch.float32 else None
    if apex is not None:
        made = apex(groups, adam_w_mode=True, **options)
        for group in made.param_groups:
            group["step"] = 0
        return made
    optimizer = torch.optim.AdamW(groups, fused=True, **options)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return optimizer


@functools.cache
def _fused_adam(device: torch.device) -> Callable[..., Any] | None:
    """apex's FusedAdam where it is installed and gives AdamW's step on `device`; None elsewhere, as on the CPU."""
    if device.type == "cpu":
        return None
    return load_from_apex("optimizers", "FusedAdam", lambda found: trial_problem(found, device))


def trial_problem(fused_adam: Callable[..., Any], device: torch.device) -> str | None:
    """What is wrong with a FusedAdam, as one step of one number on `device` shows; None where it is right.

    A FusedAdam without its kernels raises something.
    """
    weight = torch.full((1,), 2.0, device=device)
    adam = fused_adam([{"params": [weight], "weight_decay": 1.0}], lr=0.125, adam_w_mode=True)
    weight.grad = torch.full((1,), -3.0, device=device)
    adam.step()
    value = weight.item()
    # 2 (1 - 0.125) + 0.125: beside the decay the first step of Adam is by the learning rate, whatever the gradient.
    return None if abs(value - 1.875) < 1e-5 else f"a step of it went to {value} and not to 1.875"
