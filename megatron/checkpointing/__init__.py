"""Checkpointing room: what a checkpoint holds, how it is stored, saved and loaded at any layout."""

from megatron.checkpointing.background import BackgroundSaver
from megatron.checkpointing.choice import iterations_to_try, load_first_whole, other_choice
from megatron.checkpointing.config import CheckpointConfig, iterations_to_load
from megatron.checkpointing.errors import DamageError, SaveError
from megatron.checkpointing.load import LoadedState, load_checkpoint, read_state
from megatron.checkpointing.placed import Place, Placed
from megatron.checkpointing.save import save_checkpoint
from megatron.checkpointing.saver import FailedSaves, Saver

__all__ = [
    "BackgroundSaver",
    "CheckpointConfig",
    "DamageError",
    "FailedSaves",
    "LoadedState",
    "Place",
    "Placed",
    "SaveError",
    "Saver",
    "iterations_to_load",
    "iterations_to_try",
    "load_checkpoint",
    "load_first_whole",
    "other_choice",
    "read_state",
    "save_checkpoint",
]
