"""Checkpointing room: what a checkpoint holds, how it is stored, saved and loaded at any layout."""

from megatron.checkpointing.config import CheckpointConfig, iteration_to_load
from megatron.checkpointing.errors import DamageError, SaveError
from megatron.checkpointing.load import LoadedState, load_checkpoint, read_state
from megatron.checkpointing.placed import Place, Placed
from megatron.checkpointing.save import save_checkpoint

__all__ = [
    "CheckpointConfig",
    "DamageError",
    "LoadedState",
    "Place",
    "Placed",
    "SaveError",
    "iteration_to_load",
    "load_checkpoint",
    "read_state",
    "save_checkpoint",
]
