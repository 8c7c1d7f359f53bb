"""Checkpoints that hold a model alone, as conversion makes them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from megatron import mpu
from megatron.checkpointing import save_checkpoint
from megatron.model import TransformerConfig, initialize_parameters
from megatron.parity.pieces import as_array
from megatron.training.state import layout


def save_model(
    rank: int,
    world_size: int,
    directory: str,
    kind: Any,
    sizes: dict[str, Any],
    vocab_size: int,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """Save a model of that kind, split over all ranks, as iteration 7; returns this rank's weights by name."""
    config = TransformerConfig(**sizes, make_vocab_size_divisible_by=8)
    mpu.initialize_model_parallel(world_size)
    model = kind(config, vocab_size, device="meta", **options)
    initialize_parameters(model, 5, torch.float32, "cpu")
    shardings = mpu.parameter_shardings(model)
    tensors = {name: (p.detach(), shardings[name]) for name, p in model.named_parameters()}
    state = {"model": model.signature(), "config": {}}
    save_checkpoint(directory, 7, tensors, state, {}, rank=rank, world_size=world_size, layout=layout())
    return {name: as_array(tensor) for name, (tensor, _) in tensors.items()}
