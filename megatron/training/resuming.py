"""A run's state out of a checkpoint: which one, what of it, and whether it fits the run that goes on."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron import mpu
from megatron.base.complaints import raise_joined
from megatron.checkpointing import (
    DamageError,
    LoadedState,
    Placed,
    iterations_to_load,
    load_checkpoint,
    load_first_whole,
    other_choice,
)
from megatron.checkpointing.index import StoredTensor
from megatron.optimizer import Schedule
from megatron.training.config import RunConfig
from megatron.training.data_changes import DataChanges, data_changes
from megatron.training.data_facts import DataFacts
from megatron.training.number_formats import across_formats, has_weights_alone
from megatron.training.setup import World
from megatron.training.state import Trainee, layout, model_signature
from megatron.training.stored import (
    PROGRESS,
    format_differences,
    incomplete,
    keeps_moments,
    model_differences,
    schedule_differences,
    stored_precision,
    stored_schedule,
)


@dataclasses.dataclass(frozen=True)
class Resumed:
    """How a run begins: the learning rate that it goes by, and sentences about what was loaded."""

    schedule: Schedule
    messages: list[str]


def restore(trainee: Trainee, config: RunConfig, world: World, data: DataFacts) -> Resumed:
    """Go on from the checkpoint that `--load` names, if any, in what of it the flags ask for.

    At the layout of the checkpoint the random generators and buffers of each rank go on too, so that the run is the
    uninterrupted one bit for bit. Elsewhere, and with `--no-load-rng`, generators begin anew, from a seed of this
    iteration; elsewhere all ranks get the buffers of the first. With `--finetune` the run is a new one, but for the
    weights and buffers that it begins with. Collective: all ranks agree on how the load went.

    Raises `ValueError` where no checkpoint that may be loaded is whole, or it does not fit: it is of another model, its
    optimizer's state is of another kind, or schedule or data are others and no flag says what to do about it.
    """
    return _Restoring(trainee, config, world, data).restore()


class _Restoring:
    """`restore`, and what its parts share."""

    def __init__(self, trainee: Trainee, config: RunConfig, world: World, data: DataFacts) -> None:
        self._trainee, self._config, self._world, self._data = trainee, config, world, data
        self._choice = config.checkpoint
        self._directory = config.checkpoint.load or ""
        batch, training = config.batch_schedule(world.size).global_batch_size, config.training
        self._schedule = config.schedule.resolve(batch, training.train_iters, training.train_samples)
        self._problems: list[str] = []  # of the checkpoint that was looked at last

    def restore(self) -> Resumed:
        iterations = iterations_to_load(self._choice)
        if not iterations:
            afresh = [f"there is no checkpoint in {self._directory} yet: the run starts afresh"]
            return Resumed(self._schedule, afresh if self._directory else [])
        loaded, left_out = self._load_first_whole(iterations)
        if self._choice.finetune:
            messages = self._begin(loaded)
        else:
            messages = [*self._go_on(loaded), *self._changes(loaded.state)]
        return Resumed(self._schedule, [*left_out, *messages])

    def _load_first_whole(self, iterations: Sequence[int]) -> tuple[LoadedState, list[str]]:
        try:
            return load_first_whole(iterations, self._load)
        except DamageError as error:
            other = "" if self._choice.load_fallback else other_choice(self._directory, iterations[-1])
            raise DamageError(f"{error}{other}") from error
        except ValueError:
            raise_joined(self._problems)  # this rank's own words, one by one
            raise

    def _load(self, iteration: int) -> LoadedState:
        return load_checkpoint(
            self._directory,
            self._tensors,
            rank=self._world.rank,
            layout=layout(),
            iteration=iteration,
            skip=self._choice.unread,
            cast=True,
            world_size=self._world.size,
        )

    def _tensors(self, state: dict[str, Any], stored: Mapping[str, StoredTensor]) -> Placed:
        """What to fill. Raises `ConfigError` where the checkpoint does not fit."""
        self._problems = self._misfits(state, stored)
        raise_joined(self._problems)
        wanted = self._trainee.tensors()
        if self._choice.loads_optimizer:
            return across_formats(wanted, stored)
        return {name: held for name, held in wanted.items() if not name.startswith(self._choice.unread)}

    def _misfits(self, state: dict[str, Any], stored: Mapping[str, StoredTensor]) -> list[str]:
        choice, directory = self._choice, self._directory
        with_optimizer = choice.loads_optimizer
        moments = keeps_moments(state.get("config", {}))
        if with_optimizer and moments and has_weights_alone(self._trainee.tensors(), stored):
            return [
                f"--load {directory}: its checkpoint has weights and no state of an optimizer: --finetune begins a "
                "training with them, --no-load-optim goes on from its iteration with a new optimizer"
            ]
        wanted = ["model"] + ["run", "config"] * (not choice.finetune) + ["optimizer"] * with_optimizer
        found = incomplete(state, directory, wanted)
        if found:
            return found
        found = model_differences(state["model"], model_signature(self._trainee.model), directory)
        if with_optimizer:
            found += format_differences(state["config"], self._config, directory)
        return found if found or choice.finetune else self._unaccepted(state)

    def _unaccepted(self, state: dict[str, Any]) -> list[str]:
        """What is other than it was and needs the user's word."""
        directory = self._directory
        found = schedule_differences(stored_schedule(state), self._schedule, self._config.schedule, directory)
        changes = self._data_changes(state)
        if changes.to_accept and not self._choice.accept_data_change:
            found += [*changes.to_accept, *changes.to_tell]
            found.append(f"the data is not that of the checkpoint in {directory}: --accept-data-change goes on with it")
        return found

    def _data_changes(self, state: dict[str, Any]) -> DataChanges:
        return data_changes(DataFacts.of_checkpoint(state), self._data, state["run"]["consumed_samples"])

    def _begin(self, loaded: LoadedState) -> list[str]:
        """A new run with loaded weights."""
        self._trainee.optimizer.after_load(masters=False)
        if loaded.rank_tensors is not None:
            self._trainee.load_own_tensors(loaded.rank_tensors, generators=False)
        return [f"loaded the weights of iteration {loaded.iteration} of {self._directory}: a new run begins with them"]

    def _go_on(self, loaded: LoadedState) -> list[str]:
        trainee, iteration, directory = self._trainee, loaded.iteration, self._directory
        for name in PROGRESS:
            setattr(trainee.state, name, loaded.state["run"][name])
        trainee.state.loaded_iteration = iteration
        what = f"loaded iteration {iteration} of {directory}"
        if self._choice.loads_optimizer:
            trainee.optimizer.load_state(loaded.state["optimizer"])
            what += _between_formats(stored_precision(loaded.state["config"]).format_flag, self._config)
        else:
            what += " without the state of its optimizer"
        trainee.optimizer.after_load(masters=self._choice.loads_optimizer)
        return [what, *self._restore_generators(loaded)]

    def _restore_generators(self, loaded: LoadedState) -> list[str]:
        choice, own = self._choice, loaded.rank_tensors
        if own is not None:
            self._trainee.load_own_tensors(own, generators=choice.load_rng)
        if own is None or not choice.load_rng:
            mpu.model_parallel_manual_seed(mpu.derive_seed(self._config.training.seed, "resumed", loaded.iteration))
        if own is None:
            return [_elsewhere(loaded.layout, list(self._trainee.buffers()))]
        return [] if choice.load_rng else ["random generators begin anew, so dropout goes on with other random numbers"]

    def _changes(self, state: dict[str, Any]) -> list[str]:
        """Sentences on a schedule and data that are others; from now on the learning rate is by the one asked for."""
        before, changes = stored_schedule(state), self._data_changes(state)
        told = changes.to_accept + changes.to_tell
        differences = [] if before is None else self._schedule.differences(before)
        if before is None or not differences:
            return told
        by_checkpoint = self._config.schedule.use_checkpoint_lr_scheduler
        goes_by = ("the checkpoint's schedule, not by the flags", "the flags, not by the checkpoint's schedule")
        if by_checkpoint:
            self._schedule = before
        return [f"the learning rate goes by {goes_by[not by_checkpoint]}: {', '.join(differences)}", *told]


def _between_formats(before: str, config: RunConfig) -> str:
    now = config.precision.format_flag
    return "" if now == before else f", saved with {before}, into {now}"


def _elsewhere(layout: Mapping[str, int], buffers: Sequence[str]) -> str:
    """A sentence on what goes on in another way at another layout than that of the checkpoint."""
    before = ", ".join(f"{name} {size}" for name, size in layout.items())
    sentence = f"it was saved at another layout ({before}), so dropout goes on with other random numbers"
    if not buffers:
        return sentence
    return f"{sentence}, and every rank with the first data and tensor rank's values of {', '.join(buffers)}"
