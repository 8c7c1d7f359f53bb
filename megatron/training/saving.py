"""A run's whole state into checkpoints: what is written, and by whom."""

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron import mpu
from megatron.checkpointing import Saver
from megatron.checkpointing.config import same_folder
from megatron.checkpointing.folders import iterations_beyond
from megatron.training.config import RunConfig
from megatron.training.setup import World
from megatron.training.state import RunState, Trainee, layout, library_versions, model_signature
from megatron.training.stored import PROGRESS


@contextlib.contextmanager
def run_saver(config: RunConfig, world: World, state: RunState, tell: Callable[[str], None]) -> Iterator[Saver | None]:
    """What saves the checkpoints of a run inside the block, None without `--save`. Collective with `--async-save`.

    `tell` is given sentences. After an exception a save in the background goes on to its end: in process groups that
    are the caller's it is waited for; else the interpreter waits for it, when all have been told what is wrong.
    """
    chosen = config.checkpoint
    if chosen.save is None:
        yield None
        return
    saver = Saver(
        chosen.save,
        world.rank,
        world.size,
        tell,
        in_background=chosen.async_save,
        keep_last=chosen.keep_last,
        max_failed=chosen.max_failed_saves,
        saved_iteration=_saved_iteration(config, state),
        timeout=datetime.timedelta(minutes=config.distributed.distributed_timeout_minutes),
    )
    try:
        yield saver
    except BaseException:
        if world.store is None:
            saver.abandon()
        raise
    saver.close()


def _saved_iteration(config: RunConfig, state: RunState) -> int | None:
    """That of the checkpoint below `--save` from which the run goes on; None where it does not."""
    return state.loaded_iteration if same_folder(config.checkpoint.save, config.checkpoint.load) else None


def not_gone_on_from(config: RunConfig, state: RunState) -> list[str]:
    """A sentence where `--save` has checkpoints beyond the iteration from which the run goes on there, if it does."""
    folder = config.checkpoint.save
    beyond = [] if folder is None else iterations_beyond(Path(folder), _saved_iteration(config, state))
    if not beyond:
        return []
    listed = ", ".join(map(str, beyond[:3])) + (f" and {len(beyond) - 3} more" if len(beyond) > 3 else "")
    return [
        f"--save {folder}: it has checkpoints that this run does not go on from, of the iterations {listed}; one that "
        "it saves of the same iteration takes the place of such a one"
    ]


def save(saver: Saver, trainee: Trainee, config: RunConfig, facts: Mapping[str, Any], *, last: bool = False) -> None:
    """Write a checkpoint of `trainee`, or begin to. Collective: every rank takes part and writes what is its own.

    `facts` are plain values that are kept beside (`Run.facts`). See `Saver.save`: the `last` one of a run is there when
    this returns, or `SaveError` is raised.
    """
    trainee.optimizer.wait_for_parameters()
    saver.save(
        trainee.state.iteration,
        trainee.written(),
        {**_plain_state(trainee, config), **facts},
        trainee.own_tensors(),
        layout=layout(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        last=last,
    )


def _plain_state(trainee: Trainee, config: RunConfig) -> dict[str, Any]:
    """What a checkpoint keeps of a run beside tensors."""
    return {
        "run": {name: getattr(trainee.state, name) for name in PROGRESS},
        "model": model_signature(trainee.model),
        "optimizer": trainee.optimizer.state(),
        "config": dataclasses.asdict(config),
        "versions": library_versions(),
    }
