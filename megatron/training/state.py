"""How far a run has come, and how its whole state goes into a checkpoint and comes back."""

import dataclasses
import platform
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.base.complaints import raise_joined
from megatron.base.config import flag_name
from megatron.checkpointing import iteration_to_load, load_checkpoint, read_state, save_checkpoint
from megatron.optimizer import Optimizer
from megatron.training.config import RunConfig
from megatron.training.setup import World

Placed = dict[str, tuple[Tensor, mpu.Sharding]]


@dataclasses.dataclass
class RunState:
    """The part of a run that moves."""

    iteration: int = 0
    consumed_samples: int = 0
    saved_iteration: int | None = None  # of this process; not part of a checkpoint


@dataclasses.dataclass(frozen=True)
class Trainee:
    """What a checkpoint holds of a run: model, optimizer and progress."""

    model: nn.Module
    optimizer: Optimizer
    state: RunState

    def tensors(self) -> Placed:
        """Weights and optimizer state by global name, each with its place in the global tensor."""
        shardings = mpu.parameter_shardings(self.model)
        parameters = dict(self.model.named_parameters())
        weights = {name: (parameters[name].detach(), sharding) for name, sharding in shardings.items()}
        return {**weights, **self.optimizer.state_tensors()}


def library_versions() -> dict[str, str]:
    """Versions that matter when a checkpoint is looked into later."""
    packages = ("megatron", "torch", "numpy")
    found = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"] in packages}
    return {"python": platform.python_version(), "torch": torch.__version__, **found}


def layout() -> dict[str, int]:
    """The degrees of parallelism; per-rank state is restored only where they are equal."""
    return {
        "tensor": mpu.get_tensor_model_parallel_world_size(),
        "pipeline": mpu.get_pipeline_model_parallel_world_size(),
        "data": mpu.get_data_parallel_world_size(),
    }


def model_signature(model: nn.Module) -> dict[str, Any]:
    """What the model says of itself by `signature()`: equal signatures mean that weights mean the same."""
    signature = getattr(model, "signature", None)
    return {} if signature is None else signature()


def save(trainee: Trainee, config: RunConfig, world: World) -> None:
    """Write a checkpoint of `trainee` below `--save`. Collective: every rank takes part, one replica writes tensors."""
    assert config.checkpoint.save is not None
    progress = trainee.state
    state = {
        "run": {"iteration": progress.iteration, "consumed_samples": progress.consumed_samples},
        "model": model_signature(trainee.model),
        "optimizer": {"step_count": trainee.optimizer.step_count},
        "config": dataclasses.asdict(config),
        "versions": library_versions(),
    }
    save_checkpoint(
        config.checkpoint.save,
        progress.iteration,
        trainee.tensors(),
        state,
        mpu.rng_state(),
        writer=mpu.get_data_parallel_rank() == 0,
        rank=world.rank,
        world_size=world.size,
        layout=layout(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
    )


def restore(trainee: Trainee, config: RunConfig, world: World) -> list[str]:
    """Go on from the checkpoint that `--load` names, if any; returns sentences about it.

    At the layout of the checkpoint the random generators go on too, so that the run is the uninterrupted one bit for
    bit. Elsewhere they begin anew, from a seed of this iteration. Collective: all ranks agree on how the load went.
    Raises `ValueError` where the checkpoint is damaged or of another model.
    """
    iteration = iteration_to_load(config.checkpoint)
    directory = config.checkpoint.load
    if directory is None:
        return []
    if iteration is None:
        return [f"there is no checkpoint in {directory} yet: the run starts afresh"]
    stored = read_state(directory, iteration)
    raise_joined(model_differences(stored["model"], model_signature(trainee.model), directory))
    loaded = load_checkpoint(
        directory,
        trainee.tensors(),
        rank=world.rank,
        layout=layout(),
        iteration=iteration,
        world_size=world.size,
    )
    trainee.optimizer.step_count = stored["optimizer"]["step_count"]
    trainee.state.iteration = trainee.state.saved_iteration = iteration
    trainee.state.consumed_samples = stored["run"]["consumed_samples"]
    messages = [f"loaded iteration {iteration} of {directory}", *schedule_changes(stored["config"], config)]
    if loaded.rank_tensors is not None:
        mpu.set_rng_state(loaded.rank_tensors)
        return messages
    mpu.model_parallel_manual_seed(mpu.derive_seed(config.training.seed, "resumed", iteration))
    before = ", ".join(f"{name} {size}" for name, size in loaded.layout.items())
    return [*messages, f"it was saved at another layout ({before}), so dropout goes on with other random numbers"]


def schedule_changes(stored: dict[str, Any], config: RunConfig) -> list[str]:
    """A sentence where the flags that shape the learning rate are not those that the checkpoint was trained with."""
    before = {**stored["schedule"], "train_iters": stored["training"]["train_iters"]}
    now = {**dataclasses.asdict(config.schedule), "train_iters": config.training.train_iters}
    changed = [
        f"{flag_name(name)} {now[name]} (was {before.get(name)})" for name in now if now[name] != before.get(name)
    ]
    return [f"the learning-rate schedule is not the checkpoint's: {', '.join(changed)}"] if changed else []


def model_differences(stored: dict[str, Any], present: dict[str, Any], directory: str) -> list[str]:
    """A sentence for each choice in which the model of the checkpoint in `directory` differs from the present one."""
    if bool(stored) != bool(present) or stored.get("model") != present.get("model"):
        kinds = [signature.get("model", "a model of another kind") for signature in (stored, present)]
        return [f"--load {directory}: its checkpoint is of {kinds[0]}, this run trains {kinds[1]}"]
    return [
        f"{flag_name(name)} {present.get(name)}: the model of the checkpoint in {directory} has {stored.get(name)}"
        for name in sorted(stored.keys() | present.keys())
        if stored.get(name) != present.get(name)
    ]
