"""How far a run has come, and how its whole state goes into a checkpoint and comes back."""

import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.base.complaints import raise_joined
from megatron.base.compose import make_section, section_types
from megatron.base.config import flag_name
from megatron.checkpointing import iteration_to_load, load_checkpoint, read_state, save_checkpoint
from megatron.checkpointing.placed import Place, Placed
from megatron.optimizer import Optimizer, PrecisionConfig
from megatron.training.config import RunConfig
from megatron.training.setup import World

# What a checkpoint keeps of `RunState`.
_PROGRESS = ("iteration", "consumed_samples", "scheduled_samples", "skipped_iterations")

# What a buffer of the model is called among the tensors of one rank, before its name.
_BUFFER = "buffer:"

# What the order of the samples depends on beside the seed and the number of samples.
_ORDERING = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "split", "seq_length")


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
        "run": {name: getattr(trainee.state, name) for name in _PROGRESS},
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
    for name in _PROGRESS:
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


def check_complete(stored: dict[str, Any], directory: str) -> None:
    """Raise ValueError where the checkpoint in `directory` is not one of a training run, by what `stored` lacks."""
    wanted = {"run": _PROGRESS, "model": (), "optimizer": ("step_count",), "config": ()}
    missing = [part for part in wanted if part not in stored]
    there = [part for part in wanted if part in stored]
    missing += [f"{part}.{name}" for part in there for name in wanted[part] if name not in stored[part]]
    if missing:
        raise ValueError(f"--load {directory}: its checkpoint is not one to go on from, it lacks {', '.join(missing)}")


def stored_section(stored: dict[str, Any], section: str) -> dict[str, Any]:
    """A section of the config `stored` in a checkpoint; what an older one does not have is as it is by default."""
    fields = dataclasses.fields(section_types(RunConfig)[section])
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return {**json.loads(json.dumps(defaults)), **stored.get(section, {})}


def changes(stored: dict[str, Any], config: RunConfig) -> list[str]:
    """Sentences where flags that shape the learning rate or the order of the samples are not the checkpoint's.

    `stored` is the config in the checkpoint. The order depends on the number of samples that the whole run asks for.
    """
    now = json.loads(json.dumps(dataclasses.asdict(config)))  # as it would be stored: tuples are lists
    run = ("training", ("train_iters", "train_samples", "global_batch_size", "rampup_batch_size"))
    shaping = {
        "learning-rate schedule": [("schedule", tuple(now["schedule"])), run],
        "order of the samples": [("data", _ORDERING), run, ("training", ("seed",))],
    }
    differences = {
        what: [
            f"{flag_name(name)} is {now[section][name]} and was {before.get(name)}"
            for section, names in parts
            for before in [stored_section(stored, section)]
            for name in names
            if now[section][name] != before.get(name)
        ]
        for what, parts in shaping.items()
    }
    return [f"the {what} is not the checkpoint's: {', '.join(found)}" for what, found in differences.items() if found]


def stored_precision(stored: dict[str, Any]) -> PrecisionConfig:
    """The number formats of the run that saved the config `stored` in its checkpoint."""
    return make_section(PrecisionConfig, stored.get("precision", {}))


def format_differences(stored: dict[str, Any], config: RunConfig, directory: str) -> list[str]:
    """A sentence for each choice that makes the optimizer's state another than that of the checkpoint in `directory`.

    `stored` is the config in the checkpoint.
    """
    before, now = stored_precision(stored).format_flag, config.precision.format_flag
    mine, theirs = config.optimizer, stored_section(stored, "optimizer")
    choices = {now: before, f"--optimizer {mine.optimizer}": f"--optimizer {theirs['optimizer']}"}
    without_momentum = [not momentum for momentum in (mine.sgd_momentum, theirs["sgd_momentum"])]
    if mine.optimizer == theirs["optimizer"] == "sgd" and any(without_momentum) and not all(without_momentum):
        choices[f"--sgd-momentum {mine.sgd_momentum}"] = f"--sgd-momentum {theirs['sgd_momentum']}"
    return [
        f"{chosen}: the checkpoint in {directory} is of a run with {was}"
        for chosen, was in choices.items()
        if chosen != was
    ]


def model_differences(stored: dict[str, Any], present: dict[str, Any], directory: str) -> list[str]:
    """A sentence for each choice in which the model of the checkpoint in `directory` differs from the present one.

    A choice that an older checkpoint does not name is as it is by default.
    """
    if bool(stored) != bool(present) or stored.get("model") != present.get("model"):
        kinds = [signature.get("model", "a model of another kind") for signature in (stored, present)]
        return [f"--load {directory}: its checkpoint is of {kinds[0]}, this run trains {kinds[1]}"]
    before = {**{name: stored_section({}, "model").get(name) for name in present}, **stored}
    return [
        f"{flag_name(name)} {present.get(name)}: the model of the checkpoint in {directory} has {before[name]}"
        for name in sorted(before)
        if before[name] != present.get(name)
    ]
