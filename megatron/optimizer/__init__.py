"""Optimizer room: gradient buffers and their reduction, the global norm, clipping, AdamW, learning-rate schedules."""

from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.gradients import GradientBuffers, main_gradient
from megatron.optimizer.norm import global_gradient_norm, squared_norm
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.schedule import ScheduleConfig, learning_rate

__all__ = [
    "GradientBuffers",
    "Optimizer",
    "OptimizerConfig",
    "ScheduleConfig",
    "global_gradient_norm",
    "learning_rate",
    "main_gradient",
    "squared_norm",
]
