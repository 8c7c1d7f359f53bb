"""A run's whole state out of a checkpoint."""

from collections.abc import Mapping, Sequence

from megatron import mpu
from megatron.base.complaints import raise_joined
from megatron.checkpointing import iteration_to_load, load_checkpoint, read_state
from megatron.training.config import RunConfig
from megatron.training.setup import World
from megatron.training.state import Trainee, layout, model_signature
from megatron.training.stored import PROGRESS, changes, check_complete, format_differences, model_differences


def restore(trainee: Trainee, config: RunConfig, world: World) -> list[str]:
    """Go on from the checkpoint that `--load` names, if any; returns sentences about it.

    At the layout of the checkpoint the random generators and buffers of each rank go on too, so that the run is the
    uninterrupted one bit for bit. Elsewhere generators begin anew, from a seed of this iteration, and all ranks get the
    buffers of the first. Collective: all ranks agree on how the load went.
    Raises `ValueError` where the checkpoint is damaged or of another model.
    """
    iteration = iteration_to_load(config.checkpoint)
    directory = config.checkpoint.load
    if directory is None:
        return []
    if iteration is None:
        return [f"there is no checkpoint in {directory} yet: the run starts afresh"]
    stored = read_state(directory, iteration)
    check_complete(stored, directory)
    differences = model_differences(stored["model"], model_signature(trainee.model), directory)
    raise_joined(differences or format_differences(stored["config"], config, directory))
    loaded = load_checkpoint(
        directory,
        trainee.tensors(),
        rank=world.rank,
        layout=layout(),
        iteration=iteration,
        world_size=world.size,
    )
    trainee.optimizer.load_state(stored["optimizer"])
    trainee.optimizer.after_load(masters=True)
    for name in PROGRESS:
        setattr(trainee.state, name, stored["run"][name])
    trainee.state.loaded_iteration = iteration
    messages = [f"loaded iteration {iteration} of {directory}", *changes(stored["config"], config)]
    if loaded.rank_tensors is not None:
        trainee.load_own_tensors(loaded.rank_tensors)
        return messages
    mpu.model_parallel_manual_seed(mpu.derive_seed(config.training.seed, "resumed", iteration))
    return [*messages, _elsewhere(loaded.layout, list(trainee.buffers()))]


def _elsewhere(layout: Mapping[str, int], buffers: Sequence[str]) -> str:
    """A sentence on what goes on in another way at another layout than that of the checkpoint."""
    before = ", ".join(f"{name} {size}" for name, size in layout.items())
    sentence = f"it was saved at another layout ({before}), so dropout goes on with other random numbers"
    if not buffers:
        return sentence
    return f"{sentence}, and every rank with the first data and tensor rank's values of {', '.join(buffers)}"
