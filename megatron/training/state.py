"""How far a run has come, and how its whole state goes into a checkpoint and comes back."""

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.base.complaints import raise_joined
from megatron.checkpointing import iteration_to_load, load_checkpoint, read_state, save_checkpoint
from megatron.checkpointing.placed import Place, Placed
from megatron.optimizer import Optimizer
from megatron.training.config import RunConfig
from megatron.training.setup import World
from megatron.training.stored import PROGRESS, changes, check_complete, format_differences, model_differences

# What a buffer of the model is called among the tensors of one rank, before its name.
_BUFFER = "buffer:"


@dataclasses.dataclass
class RunState:
    """The part of a run that moves."""

    iteration: int = 0
    consumed_samples: int = 0
    # Those of iterations that were not skipped: the learning rate goes by them.
    scheduled_samples: int = 0
    skipped_iterations: int = 0
    # Of this process alone, not part of a checkpoint: what `--save` holds already, and what was evaluated last.
    saved_iteration: int | None = None
    evaluated_iteration: int | None = None


@dataclasses.dataclass(frozen=True)
class Trainee:
    """What a checkpoint holds of a run: model, optimizer and progress."""

    model: nn.Module
    optimizer: Optimizer
    state: RunState

    def tensors(self) -> Placed:
        """Weights, buffers and optimizer state by global name, each with its place in the global tensor."""
        return {**self._of_model(), **self.optimizer.state_tensors()}

    def _of_model(self) -> Placed:
        shardings = mpu.parameter_shardings(self.model)
        parameters = dict(self.model.named_parameters())
        placed: dict[str, tuple[Tensor, Place]] = {
            name: (parameters[name].detach(), s) for name, s in shardings.items()
        }
        return placed | {name: (buffer, mpu.replicated(name, buffer)) for name, buffer in self.buffers().items()}

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers of the model by name."""
        kept = self.model.state_dict().keys()
        return {name: buffer.detach() for name, buffer in self.model.named_buffers() if name in kept}

    def own_tensors(self) -> dict[str, Tensor]:
        """What belongs to this rank alone: the states of its generators, and its values of the buffers."""
        return mpu.rng_state() | {_BUFFER + name: buffer for name, buffer in self.buffers().items()}

    def load_own_tensors(self, own: Mapping[str, Tensor]) -> None:
        """Put back what `own_tensors` gave."""
        mpu.set_rng_state({name: state for name, state in own.items() if not name.startswith(_BUFFER)})
        for name, buffer in self.buffers().items():
            buffer.copy_(own[_BUFFER + name])

    def written(self) -> Placed:
        """Those of the tensors that this rank writes: every one of a replica, or its own share of optimizer state.

        What is a copy of another stage's is left to that stage.
        """
        first, copies = mpu.get_data_parallel_rank() == 0, duplicate_parameters(self.model)
        state = self.optimizer.state_tensors(duplicates=False) if first or self.optimizer.sharded else {}
        return {name: held for name, held in self._of_model().items() if name not in copies} | state if first else state


def library_versions() -> dict[str, str]:
    """Versions that matter when a checkpoint is looked into later."""
    packages = ("megatron", "torch", "numpy")
    found = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"] in packages}
    return {"python": platform.python_version(), "torch": torch.__version__, **found}


def duplicate_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that are copies of another stage's, by the model's own word."""
    names: list[str] = getattr(model, "duplicate_parameters", list)()
    return names


def layout() -> dict[str, int]:
    """The degrees of parallelism; per-rank state is restored only where they are equal."""
    virtual = mpu.get_virtual_pipeline_model_parallel_world_size()
    return {
        "tensor": mpu.get_tensor_model_parallel_world_size(),
        "pipeline": mpu.get_pipeline_model_parallel_world_size(),
        **({} if virtual is None else {"virtual": virtual}),
        "data": mpu.get_data_parallel_world_size(),
    }


def model_signature(model: nn.Module) -> dict[str, Any]:
    """What the model says of itself by `signature()`: equal signatures mean that weights mean the same."""
    signature = getattr(model, "signature", None)
    return {} if signature is None else signature()


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
    if config.checkpoint.save is not None and os.path.realpath(config.checkpoint.save) == os.path.realpath(directory):
        trainee.state.saved_iteration = iteration
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
