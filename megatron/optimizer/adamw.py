"""Makes PyTorch's AdamW in its fastest form that the device has."""

from typing import Any

import torch
from torch import nn

from megatron.optimizer.config import OptimizerConfig


def make_adamw(
    decayed: list[nn.Parameter], not_decayed: list[nn.Parameter], config: OptimizerConfig
) -> torch.optim.AdamW:
    """AdamW with one group that is decayed and one that is not; fused, or else `foreach`.

    Its state exists from the start (zeros), so that a checkpoint has the same tensors at any iteration. The learning
    rate is set before each step.
    """
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    options: dict[str, Any] = {"lr": 0.0, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    try:
        adam = torch.optim.AdamW(groups, fused=True, **options)
    except RuntimeError:  # PyTorch's way of saying that this device has no fused kernel
        adam = torch.optim.AdamW(groups, foreach=True, **options)
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return adam
