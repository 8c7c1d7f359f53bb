"""`pretrain`: from a config, a model, data and a forward step to a trained model."""

import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch import nn

from megatron import mpu
from megatron.base.formulas import model_flops
from megatron.data import GlobalBatchSampler, RampUp, build_loader
from megatron.optimizer import Optimizer, learning_rate
from megatron.training.config import BatchSizes, RunConfig
from megatron.training.observers import Audience, Observer, configured_observers
from megatron.training.setup import World, distributed_world, world_size
from megatron.training.state import RunState, Trainee, restore, save
from megatron.training.step import Batch, ForwardStep, Step, evaluate, train_step
from megatron.training.throughput import Interval, Workload, device_peak, memory_gib


class TokenStore(Protocol):
    """The tokens that a dataset cuts its samples from."""

    def max_token_id(self, part: int = 0, parts: int = 1) -> int:
        """The highest id in the `part`-th of `parts` shares of the tokens."""
        ...


class TokenDataset(Protocol):
    """What the loop needs of a dataset: a length, samples of named arrays, and the tokens that it cuts them from."""

    @property
    def indexed(self) -> TokenStore: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    def report(self) -> list[str]:
        """Lines that tell what it is; printed when the run begins."""
        ...


# Samples wanted for training, validation and test; 0 for a split that is not used.
SampleCounts = tuple[int, int, int]
Datasets = Sequence[TokenDataset | None]  # training, validation, test

ModelProvider = Callable[[torch.dtype, torch.device], nn.Module]
DatasetProvider = Callable[[SampleCounts], Datasets]

# exp of a larger number is no float.
_HIGHEST_EXPONENT = 700.0

SPLITS = ("training", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that the loop holds while it goes on; what moves is in `trainee`."""

    config: RunConfig
    world: World
    trainee: Trainee
    datasets: Datasets
    forward_step: ForwardStep
    vocab_size: int
    audience: Audience

    def sizes(self, consumed_samples: int | None = None) -> BatchSizes:
        """The batch of the iteration after `consumed_samples` samples; None is after the ramp-up."""
        return self.config.batch_sizes(self.world.size, consumed_samples)

    def batches(
        self, dataset: TokenDataset, consumed_samples: int, num_samples: int, ramp_up: RampUp | None = None
    ) -> Iterator[Batch]:
        """This replica's micro-batches of `dataset` from `consumed_samples` to `num_samples`, in the global order."""
        sizes = self.sizes()
        sampler = GlobalBatchSampler(
            num_samples,
            consumed_samples,
            global_batch_size=sizes.global_batch_size,
            micro_batch_size=sizes.micro_batch_size,
            data_rank=mpu.get_data_parallel_rank(),
            data_size=mpu.get_data_parallel_world_size(),
            ramp_up=ramp_up,
        )
        workers, seed = self.config.data.num_workers, self.config.training.seed
        return iter(build_loader(dataset, sampler, workers, seed, pin_memory=self.world.device.type != "cpu"))

    def workload(self) -> Workload:
        """What one sample computes."""
        model, s = self.config.model, self.config.data.seq_length
        flops = model_flops(
            1, s, model.num_layers, model.hidden_size, self.vocab_size, model.ffn_size, model.projection_size
        )
        dtype = params_dtype(self.config)
        return Workload(s, flops, self.world.size, device_peak(self.world.device, dtype))


def params_dtype(config: RunConfig) -> torch.dtype:
    """The torch dtype that `--params-dtype` names."""
    return {"float32": torch.float32, "float64": torch.float64}[config.training.params_dtype]


def sample_counts(config: RunConfig, ranks: int) -> SampleCounts:
    """Samples of each split: all iterations of training; one evaluation, which always sees the same samples."""
    schedule = config.batch_schedule(ranks)
    evaluated = config.training.eval_iters * schedule.global_batch_size
    return schedule.consumed_after(max(config.training.train_iters, 1)), evaluated, evaluated


def check_vocabulary(datasets: Datasets, vocab_size: int, world: World) -> None:
    """Raise `ValueError` where any token id of the data is not below `vocab_size`.

    Each rank reads its share of the files; the highest id is agreed by one all-reduce for each set of files.
    """
    stores = {id(d.indexed): d.indexed for d in datasets if d is not None}
    for store in stores.values():
        highest = torch.tensor(store.max_token_id(world.rank, world.size), device=world.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        if highest.item() >= vocab_size:
            raise ValueError(
                f"--data-path: the data holds the token id {highest.item()}, but the vocabulary has only {vocab_size} "
                "ids; give the vocabulary that the data was preprocessed with"
            )


def pretrain(
    config: RunConfig,
    *,
    model_provider: ModelProvider,
    dataset_provider: DatasetProvider,
    forward_step: ForwardStep,
    vocab_size: int,
    observers: Sequence[Observer] = (),
) -> Trainee:
    """Train a model as `config` says, on every rank of the launcher's world alike.

    Args:
        model_provider: makes the model, given dtype and device, when model parallelism is initialised.
        dataset_provider: makes training, validation and test sets for the asked numbers of samples; None for no set.
        forward_step: (model, micro-batch) -> sum of losses and number of counted tokens.
        vocab_size: real size of the vocabulary, without padding.
        observers: watch the run beside those that the flags ask for; called on the reporting rank alone.

    Returns what was trained. Raises `ValueError` for whatever the user can mend; once ranks have met, an error on one
    ends all with its message (`training.failure`).
    """
    datasets = dataset_provider(sample_counts(config, world_size()))
    with distributed_world(config.distributed, config.training.seed) as world:
        check_vocabulary(datasets, vocab_size, world)
        trainee = _new_trainee(config, model_provider, world)
        restored = restore(trainee, config, world)
        # Nothing is written before this line: whatever is wrong has been told by now.
        audience = Audience(_open_outputs(config, observers) if world.rank == 0 else [])
        run = Run(config, world, trainee, datasets, forward_step, vocab_size, audience)
        try:
            audience.on_start(_description(run))
            for line in (line for dataset in datasets if dataset is not None for line in dataset.report()):
                audience.on_message(line)
            if restored is not None:
                audience.on_message(restored)
            _train(run)
        finally:
            audience.on_end()
    return trainee


def _open_outputs(config: RunConfig, observers: Sequence[Observer]) -> list[Observer]:
    """The observers, ready to write, and the folder of `--save`. Raises `ValueError` where one cannot be written."""
    try:
        if config.checkpoint.save is not None:
            os.makedirs(config.checkpoint.save, exist_ok=True)
            tempfile.TemporaryFile(dir=config.checkpoint.save).close()
        return [*configured_observers(config.logging), *observers]
    except OSError as error:
        raise ValueError(f"--save, --metrics-file or --tensorboard-dir cannot be written: {error}") from error


def _new_trainee(config: RunConfig, model_provider: ModelProvider, world: World) -> Trainee:
    model = model_provider(params_dtype(config), world.device)
    optimizer = Optimizer(
        model,
        mpu.parameter_shardings(model),
        config.optimizer,
        data_group=mpu.get_data_parallel_group(),
        tensor_group=mpu.get_tensor_model_parallel_group(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
    )
    return Trainee(model, optimizer, RunState())


def _description(run: Run) -> str:
    shardings = mpu.parameter_shardings(run.trainee.model)
    parameters = sum(torch.Size(s.global_shape).numel() for s in shardings.values())
    sizes, world, ramp = run.sizes(), run.world, run.config.training.ramp_up
    ramped = "" if ramp is None else f", from {ramp.start} by {ramp.increment} over {ramp.samples} samples"
    return (
        f"{parameters:,} parameters on {world.size} ranks ({world.device.type}): tensor "
        f"{mpu.get_tensor_model_parallel_world_size()}, data {mpu.get_data_parallel_world_size()}; "
        f"global batch {sizes.global_batch_size} = micro batch {sizes.micro_batch_size} x {sizes.num_micro_batches} "
        f"x data{ramped}; {run.config.training.train_iters} iterations"
    )


def _train(run: Run) -> None:
    training, state = run.datasets[0], run.trainee.state
    assert training is not None
    total = run.config.training.train_iters
    if run.config.training.eval_at_start and state.iteration == 0:
        _evaluate(run, "validation")
    end = run.config.batch_schedule(run.world.size).consumed_after(total - state.iteration, state.consumed_samples)
    prepared = sample_counts(run.config, run.world.size)[0]
    if state.iteration < total and end > prepared:
        raise ValueError(
            f"--load: {state.consumed_samples} samples are consumed after iteration {state.iteration}; with this "
            f"--global-batch-size iteration {total} ends at sample {end}, but a run from the start at {prepared}, for "
            "which the data is prepared: give fewer --train-iters or the batch size of the checkpoint"
        )
    batches = run.batches(training, state.consumed_samples, end, run.config.training.ramp_up)
    interval = Interval(run.workload())
    while state.iteration < total:
        _iterate(run, batches, interval)
        with interval.paused():
            if _due(run.config.training.eval_interval, state.iteration):
                _evaluate(run, "validation")
            if _due(run.config.checkpoint.save_interval, state.iteration):
                _save(run)
        if _due(run.config.training.exit_interval, state.iteration):
            break
    _save(run)
    if state.iteration == total:
        _final_evaluations(run)


def _iterate(run: Run, batches: Iterator[Batch], interval: Interval) -> None:
    """One iteration, counted and logged."""
    config, state = run.config, run.trainee.state
    total, sizes = config.training.train_iters, run.sizes(state.consumed_samples)
    full = run.sizes().global_batch_size
    lr = learning_rate(config.schedule, state.consumed_samples, train_iters=total, global_batch_size=full)
    interval.add(_step(run, batches, lr, sizes), sizes.global_batch_size)
    state.iteration += 1
    state.consumed_samples += sizes.global_batch_size
    run.audience.on_iteration(state.iteration, total)
    if _due(config.logging.log_interval, state.iteration):
        progress = {"iteration": state.iteration, "consumed-samples": state.consumed_samples, "lr": lr}
        memory = {"memory-GiB": memory_gib(run.world.device)}
        run.audience.on_log({**progress, **interval.report(), **memory})


def _step(run: Run, batches: Iterator[Batch], lr: float, sizes: BatchSizes) -> Step:
    try:
        return train_step(
            run.trainee.model,
            run.trainee.optimizer,
            batches,
            run.forward_step,
            num_micro_batches=sizes.num_micro_batches,
            lr=lr,
            normalization=run.config.training.loss_normalization,
            data_group=mpu.get_data_parallel_group(),
            device=run.world.device,
        )
    except FloatingPointError as error:
        raise FloatingPointError(f"iteration {run.trainee.state.iteration + 1}: {error}") from error


def _due(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0


def _evaluate(run: Run, split: str) -> None:
    """The loss on the first `--eval-iters` global batches of `split`; nothing where there is no such set."""
    dataset, config = run.datasets[SPLITS.index(split)], run.config.training
    if dataset is None or config.eval_iters == 0:
        return
    loss = evaluate(
        run.trainee.model,
        run.batches(dataset, 0, config.eval_iters * run.sizes().global_batch_size),
        run.forward_step,
        normalization=config.loss_normalization,
        data_group=mpu.get_data_parallel_group(),
        device=run.world.device,
    ).mean
    perplexity = math.exp(min(loss, _HIGHEST_EXPONENT))
    run.audience.on_evaluation(
        split, {"iteration": run.trainee.state.iteration, "loss": loss, "perplexity": perplexity}
    )


def _final_evaluations(run: Run) -> None:
    if not _due(run.config.training.eval_interval, run.trainee.state.iteration):
        _evaluate(run, "validation")
    _evaluate(run, "test")


def _save(run: Run) -> None:
    """Write a checkpoint below `--save`, if asked for and not written for this iteration yet."""
    config, state = run.config, run.trainee.state
    if config.checkpoint.save is None or state.saved_iteration == state.iteration:
        return
    began = time.perf_counter()
    save(run.trainee, config, run.world)
    state.saved_iteration = state.iteration
    run.audience.on_message(
        f"saved iteration {state.iteration} to {config.checkpoint.save} in {time.perf_counter() - began:.1f} s"
    )
