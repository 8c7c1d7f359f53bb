"""A run's whole state into a checkpoint."""

import dataclasses

from megatron import mpu
from megatron.checkpointing import save_checkpoint
from megatron.training.config import RunConfig
from megatron.training.setup import World
from megatron.training.state import Trainee, layout, library_versions, model_signature
from megatron.training.stored import PROGRESS


def save(trainee: Trainee, config: RunConfig, world: World) -> None:
    """Write a checkpoint of `trainee` below `--save`. Collective: every rank takes part and writes what is its own."""
    assert config.checkpoint.save is not None
    trainee.optimizer.wait_for_parameters()
    state = {
        "run": {name: getattr(trainee.state, name) for name in PROGRESS},
        "model": model_signature(trainee.model),
        "optimizer": trainee.optimizer.state(),
        "config": dataclasses.asdict(config),
        "versions": library_versions(),
    }
    save_checkpoint(
        config.checkpoint.save,
        trainee.state.iteration,
        trainee.written(),
        state,
        trainee.own_tensors(),
        rank=world.rank,
        world_size=world.size,
        layout=layout(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
    )
