"""How far a run has come, and what a checkpoint holds of it."""

import dataclasses
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.checkpointing.placed import Place, Placed
from megatron.optimizer import Optimizer

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
    # Of this process alone, not part of a checkpoint: that of the checkpoint it goes on from, None where it began at 0,
    # and what was evaluated last.
    loaded_iteration: int | None = None
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

    def load_own_tensors(self, own: Mapping[str, Tensor], *, generators: bool = True) -> None:
        """Put back what `own_tensors` gave, or of it the buffers alone."""
        if generators:
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
