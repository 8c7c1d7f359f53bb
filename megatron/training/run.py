"""What a run holds while it goes on, and what is checked of its parts before it starts."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

from megatron import mpu
from megatron.base.complaints import raise_joined
from megatron.checkpointing import Saver
from megatron.data import GlobalBatchSampler, RampUp, build_loader
from megatron.optimizer import Schedule
from megatron.training.config import BatchSizes, RunConfig
from megatron.training.data_facts import DataFacts
from megatron.training.leaving import Leaving
from megatron.training.losses import NonFiniteLoss
from megatron.training.observers import Audience, Metrics
from megatron.training.pipeline import Batch, ForwardStep, Pipeline
from megatron.training.setup import World, device_facts
from megatron.training.state import RunState, Trainee, duplicate_parameters
from megatron.training.throughput import Workload, device_peak
from megatron.training.timers import Timers


class SampleDataset(Protocol):
    """What the loop needs of a dataset: samples by number, each a dict of arrays or tensors of equal shapes.

    Two things more are used where a dataset has them: `indexed.max_token_id(part, parts)`, the highest token id in a
    share of its files, which is held against the vocabulary before training; and `report()`, lines that tell what it
    is, printed when the run begins.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


# Samples wanted for training, validation and test; 0 for a split that is not used.
SampleCounts = tuple[int, int, int]
Datasets = Sequence[SampleDataset | None]  # training, validation, test

# (run, split) -> what is told of an evaluation, None where there is nothing to evaluate on. Every rank calls it alike.
Evaluator = Callable[["Run", str], Metrics | None]

ModelProvider = Callable[[torch.dtype, torch.device], nn.Module]
DatasetProvider = Callable[[SampleCounts], Datasets]

SPLITS = ("training", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Work:
    """What a program trains, as it tells `pretrain`, which says what these are.

    `flops_per_sample` are the model's and the executed ones, where they are known.
    """

    model_provider: ModelProvider
    dataset_provider: DatasetProvider
    forward_step: ForwardStep
    vocab_size: int
    flops_per_sample: tuple[float | None, float | None] = (None, None)
    evaluator: Evaluator | None = None
    loss_parts: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that the loop holds while it goes on; what moves is in `trainee`.

    `train_iters` is the iteration at which it ends; `schedule` is that of the flags or of the checkpoint; `data` says
    which samples it sees.
    """

    config: RunConfig
    world: World
    trainee: Trainee
    pipeline: Pipeline
    datasets: Datasets
    work: Work
    train_iters: int
    schedule: Schedule
    data: DataFacts
    audience: Audience
    saver: Saver | None
    leaving: Leaving
    timers: Timers | None

    def sizes(self, consumed_samples: int | None = None) -> BatchSizes:
        """The batch of the iteration after `consumed_samples` samples; None is after the ramp-up."""
        return self.config.batch_sizes(self.world.size, consumed_samples)

    def batches(
        self, dataset: SampleDataset, consumed_samples: int, num_samples: int, ramp_up: RampUp | None = None
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

    def learning_rate(self) -> float:
        """Of the next iteration, by the samples of those that were not skipped."""
        return self.schedule.rate(self.trainee.state.scheduled_samples)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of how the run goes, beside its flags: its schedule and what decides its samples."""
        return {"schedule": dataclasses.asdict(self.schedule), "data": dataclasses.asdict(self.data)}

    def loss_scaling(self) -> dict[str, float]:
        """The loss scale and how many iterations were skipped in all, as far as there are such things."""
        optimizer, skipped = self.trainee.optimizer, self.trainee.state.skipped_iterations
        scale = {"loss-scale": optimizer.loss_scale} if self.config.precision.fp16 else {}
        return scale | ({"skipped-iterations": skipped} if skipped else {})

    def expected_count(self, sizes: BatchSizes) -> float | None:
        """What a global batch of these sizes counts where no token is masked; None where there is no loss scale."""
        if not self.config.precision.fp16:
            return None
        if self.config.training.loss_normalization == "microbatch":
            return float(sizes.global_batch_size // sizes.micro_batch_size)
        return float(sizes.global_batch_size * self.config.most_counted)

    def words_on(self, error: NonFiniteLoss) -> str:
        """A sentence that is the same on all ranks: where in the present iteration the loss is not finite."""
        micro, grid = self.config.training.micro_batch_size, mpu.get_topology()
        place = error.micro_batch * grid.data + grid.coordinates(error.rank).data
        first = self.trainee.state.consumed_samples + place * micro
        return (
            f"the loss is not finite on rank {error.rank}, for the samples {first} to {first + micro - 1} in the order "
            "of the run (from 0); nothing of this iteration is saved"
        )

    def workload(self) -> Workload:
        """What one sample computes."""
        peak = device_peak(self.world.device, self.config.precision.dtype)
        return Workload(self.config.sample_tokens, *self.work.flops_per_sample, self.world.size, peak)


def sample_counts(config: RunConfig, ranks: int) -> SampleCounts:
    """Samples of each split: all iterations of training, and those of one evaluation or, where they move, of all."""
    training, full = config.training, config.batch_schedule(ranks).global_batch_size
    evaluated = training.eval_iters * full
    moving = training.evaluations(config.iterations(ranks)) + 1 if training.eval_samples == "moving" else 1
    # A run of no iteration, which only evaluates, has a training set too.
    return config.samples(ranks) or config.batch_schedule(ranks).size(0), moving * evaluated, evaluated


def first_evaluated(config: RunConfig, ranks: int, iteration: int, at_end: bool = False) -> int:
    """The first validation sample that the evaluation after `iteration` sees, or with `at_end` the last of a run there.

    Where they move, it is behind those of all evaluations before it, whether this run or an earlier one made them. One
    that is no multiple of `--eval-interval`, at the start of a run, sees what the next will see.
    """
    training = config.training
    if training.eval_samples == "same":
        return 0
    before = training.evaluations(iteration if at_end else max(iteration - 1, 0))
    return before * training.eval_iters * config.batch_schedule(ranks).global_batch_size


def check_lengths(datasets: Datasets, counts: SampleCounts) -> None:
    """Raise `ValueError` where a set has fewer samples than the run will ask it for, or none is there to train on."""
    if datasets[0] is None:
        raise ValueError("the dataset provider gives no training set")
    for split, dataset, count in zip(SPLITS, datasets, counts, strict=True):
        if dataset is not None and len(dataset) < count:
            raise ValueError(f"the {split} set has {len(dataset)} samples, but the run needs {count}")


def check_precision(config: RunConfig, world: World) -> None:
    """Raise `ConfigError` where the device of this rank cannot calculate in the format that is asked for."""
    raise_joined(config.precision.device_problems(*device_facts(world.device)))


def check_progress(config: RunConfig, state: RunState, ranks: int) -> None:
    """Raise `ValueError` where a loaded run is beyond its end, or will ask for more samples than there are.

    The data is prepared for a run from the start; one that was begun with larger batches has consumed more by now.
    """
    samples = config.training.train_samples
    if samples is not None and state.consumed_samples > samples:
        raise ValueError(f"--train-samples {samples}: the checkpoint has consumed {state.consumed_samples} already")
    total = config.iterations(ranks, state.iteration, state.consumed_samples)
    if state.iteration > total:
        raise ValueError(f"--train-iters {total}: the checkpoint is of iteration {state.iteration} already")
    end = config.batch_schedule(ranks).consumed_after(total - state.iteration, state.consumed_samples)
    prepared, evaluated, _ = sample_counts(config, ranks)
    if first_evaluated(config, ranks, total, at_end=True) >= max(evaluated, 1):
        raise ValueError(
            f"--eval-samples moving: the run ends with iteration {total}, for fewer evaluations than it will make data "
            "is prepared: give the batch size of the checkpoint, or --eval-samples same"
        )
    if state.iteration < total and end > prepared:
        size = config.batch_schedule(ranks).global_batch_size
        raise ValueError(
            f"--global-batch-size {size}: {state.consumed_samples} samples are consumed after iteration "
            f"{state.iteration}, so that iteration {total} would end at sample {end}, but data is prepared for "
            f"{prepared}: give the batch size of the checkpoint (about {state.consumed_samples // state.iteration}) or "
            "fewer --train-iters"
        )


def check_vocabulary(datasets: Datasets, vocab_size: int, world: World) -> None:
    """Raise `ValueError` where any token id of the data is not below `vocab_size`.

    Each rank reads its share of the files; the highest id is agreed by one all-reduce for each set of files. Sets that
    do not tell their files are not looked at.
    """
    stores = {id(store): store for d in datasets if (store := getattr(d, "indexed", None)) is not None}
    for store in stores.values():
        highest = torch.tensor(store.max_token_id(world.rank, world.size), device=world.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        if highest.item() >= vocab_size:
            raise ValueError(
                f"--data-path: the data holds the token id {highest.item()}, but the vocabulary has only {vocab_size} "
                "ids; give the vocabulary that the data was preprocessed with"
            )


def check_replicas(model: nn.Module) -> None:
    """Raise `ValueError` naming the first parameter that does not start equal on all data-parallel replicas.

    Two all-reduces over the data group, of one float64 for each parameter.
    """
    named = list(model.named_parameters())
    if not named:  # a stage that only calculates, on all replicas alike
        return
    sums = torch.stack([_fingerprint(parameter) for _, parameter in named])  # [parameters]
    lowest, highest = sums.clone(), sums.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=mpu.get_data_parallel_group())
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=mpu.get_data_parallel_group())
    for (name, _), different in zip(named, (lowest != highest).tolist(), strict=True):
        if different:
            raise ValueError(f"the parameter {name} does not start equal on all data-parallel replicas of the model")


def count_parameters(model: nn.Module, device: torch.device) -> int:
    """Parameters of the whole model, of which this rank has a part. One all-reduce of an integer over the pipeline."""
    copies = duplicate_parameters(model)
    own = {name: sharding for name, sharding in mpu.parameter_shardings(model).items() if name not in copies}
    total = torch.tensor(sum(torch.Size(s.global_shape).numel() for s in own.values()), device=device)
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        dist.all_reduce(total, group=mpu.get_pipeline_model_parallel_group())
    return int(total.item())


def _fingerprint(parameter: Tensor) -> Tensor:
    values = parameter.detach().double().flatten()
    return values.sum() + values[: len(values) // 2].sum()  # the half tells apart what only stands elsewhere
