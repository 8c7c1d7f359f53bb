"""Optimizer room: gradient buckets, the global norm, mixed precision, AdamW and SGD, sharding, learning rates."""

from megatron.optimizer.buckets import main_gradient
from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.optimizer import Optimizer, StepResult
from megatron.optimizer.precision import PrecisionConfig
from megatron.optimizer.schedule import Schedule, ScheduleConfig

__all__ = [
    "Optimizer",
    "OptimizerConfig",
    "PrecisionConfig",
    "Schedule",
    "ScheduleConfig",
    "StepResult",
    "main_gradient",
]
