"""What a run starts with: its model, pipeline and optimizer, its outputs, and the line that describes it."""

import dataclasses
import os
import tempfile
from collections.abc import Sequence

from torch import distributed as dist
from torch import nn

from megatron import mpu
from megatron.base.words import counted
from megatron.optimizer import Optimizer, Schedule
from megatron.training.config import RunConfig
from megatron.training.data_facts import DataFacts
from megatron.training.failure import mistakes
from megatron.training.memory import memory_needed
from megatron.training.observers import Observer, configured_observers
from megatron.training.pipeline import Pipeline, make_pipeline
from megatron.training.resuming import restore
from megatron.training.run import (
    Datasets,
    ModelProvider,
    Run,
    SampleCounts,
    Work,
    check_precision,
    check_progress,
    check_replicas,
    check_vocabulary,
    count_parameters,
)
from megatron.training.saving import not_gone_on_from
from megatron.training.setup import World
from megatron.training.state import RunState, Trainee, duplicate_parameters


def open_outputs(config: RunConfig, observers: Sequence[Observer]) -> list[Observer]:
    """The observers, ready to write, and the folder of `--save`. Raises `ValueError` where one cannot be written."""
    try:
        configured = configured_observers(config.logging)
        if config.checkpoint.save is not None:
            os.makedirs(config.checkpoint.save, exist_ok=True)
            tempfile.TemporaryFile(dir=config.checkpoint.save).close()
        return [*configured, *observers]
    except OSError as error:
        raise ValueError(f"--save, --metrics-file or --tensorboard-dir cannot be written: {error}") from error


@memory_needed("the model")
def new_model(config: RunConfig, model_provider: ModelProvider, world: World) -> nn.Module:
    """The model, equal on all replicas or `ValueError` is raised: two all-reduces over the data group."""
    with mpu.get_rng_tracker().fork(mpu.PARAMETER_STREAM):
        model = model_provider(config.precision.dtype, world.device)
    check_replicas(model)
    return model


def new_pipeline(config: RunConfig, model: nn.Module, world: World) -> Pipeline:
    """The way of micro-batches through the stages of `model`. Collective and errors: `make_pipeline`."""
    return make_pipeline(
        model,
        config.pipeline,
        config.layer_split().virtual_size,
        batch=(config.training.micro_batch_size, config.data.seq_length),
        dtype=config.precision.dtype,
        device=world.device,
    )


@memory_needed("gradients and optimizer")
def new_optimizer(config: RunConfig, model: nn.Module, world: World) -> Optimizer:
    """The optimizer of `model` over the groups of mpu."""
    tied: list[str] = getattr(model, "tied_parameters", list)()
    copied = bool(tied) and mpu.get_pipeline_model_parallel_world_size() > 1
    return Optimizer(
        model,
        mpu.parameter_shardings(model),
        config.optimizer,
        config.precision,
        data_group=mpu.get_data_parallel_group(),
        tensor_group=mpu.get_tensor_model_parallel_group(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        model_group=mpu.get_model_parallel_group(),
        model_rank=dist.get_rank(mpu.get_model_parallel_group()),
        everyone=dist.group.WORLD,
        own_buckets=tied,
        embedding_group=mpu.get_embedding_group() if copied else None,
        duplicates=duplicate_parameters(model),
        parts=getattr(model, "parameter_chunks", dict)() or None,
        device=world.device,
    )


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run starts with: what it trains, on what, at which learning rate, and what is told of it at first."""

    trainee: Trainee
    pipeline: Pipeline
    datasets: Datasets
    data: DataFacts
    schedule: Schedule
    messages: list[str]


def started(config: RunConfig, work: Work, world: World, datasets: Datasets, counts: SampleCounts) -> Start:
    """The model and all that goes with it, as it was saved if it was, once nothing is wrong with any of it.

    Nothing is written. Collective, and raises `ConfigError` for mistakes of the user.
    """
    with mistakes():
        check_precision(config, world)
        check_vocabulary(datasets, work.vocab_size, world)
    model = new_model(config, work.model_provider, world)
    with mistakes():
        pipeline = new_pipeline(config, model, world)
    trainee = Trainee(model, new_optimizer(config, model, world), RunState())
    with mistakes():
        messages = [line for d in datasets for line in getattr(d, "report", list)()]
        data = DataFacts.of_run(config, world.size, counts[0], datasets)
        resumed = restore(trainee, config, world, data)
        messages += [*resumed.messages, *not_gone_on_from(config, trainee.state)]
        check_progress(config, trainee.state, world.size)
    return Start(trainee, pipeline, datasets, data, resumed.schedule, messages)


def description(run: Run) -> str:
    """Size, layout and batches of the run. One all-reduce over the pipeline: `count_parameters`."""
    config, sizes, world, ramp = run.config, run.sizes(), run.world, run.config.training.ramp_up
    ramped = "" if ramp is None else f", from {ramp.start} by {ramp.increment} over {ramp.samples} samples"
    dtype = str(config.precision.dtype).removeprefix("torch.")
    tensor, data = mpu.get_tensor_model_parallel_world_size(), mpu.get_data_parallel_world_size()
    sequence = " (sequence parallel)" if config.distributed.sequence_parallel else ""
    optimizer = " (sharded optimizer)" if run.trainee.optimizer.sharded else ""
    return (
        f"{count_parameters(run.trainee.model, world.device):,} parameters in {dtype} on {counted(world.size, 'rank')} "
        f"({world.device.type}): tensor {tensor}{sequence}, {_pipeline_words(run)}data {data}{optimizer}; global batch "
        f"{sizes.global_batch_size} = micro batch {sizes.micro_batch_size} x {sizes.num_micro_batches} x data{ramped}; "
        f"{run.train_iters} iterations"
    )


def _pipeline_words(run: Run) -> str:
    pipeline, virtual = run.config.pipeline, len(run.pipeline.chunks)
    if pipeline.pipeline_model_parallel_size == 1:
        return ""
    stages = f", {virtual} virtual stages each" if virtual > 1 else ""
    return f"pipeline {pipeline.pipeline_model_parallel_size} ({pipeline.pipeline_schedule}{stages}), "
