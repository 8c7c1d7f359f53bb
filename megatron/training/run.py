"""What a run holds while it goes on, and what is checked of its parts before it starts."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

from megatron import mpu
from megatron.data import GlobalBatchSampler, RampUp, build_loader
from megatron.training.config import BatchSizes, RunConfig
from megatron.training.observers import Audience
from megatron.training.setup import World
from megatron.training.state import RunState, Trainee
from megatron.training.step import Batch, ForwardStep
from megatron.training.throughput import Workload, device_peak


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

ModelProvider = Callable[[torch.dtype, torch.device], nn.Module]
DatasetProvider = Callable[[SampleCounts], Datasets]

SPLITS = ("training", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that the loop holds while it goes on; what moves is in `trainee`."""

    config: RunConfig
    world: World
    trainee: Trainee
    datasets: Datasets
    forward_step: ForwardStep
    flops_per_sample: float | None
    audience: Audience

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

    def workload(self) -> Workload:
        """What one sample computes."""
        peak = device_peak(self.world.device, params_dtype(self.config))
        return Workload(self.config.data.seq_length, self.flops_per_sample, self.world.size, peak)


def params_dtype(config: RunConfig) -> torch.dtype:
    """The torch dtype that `--params-dtype` names."""
    return {"float32": torch.float32, "float64": torch.float64}[config.training.params_dtype]


def sample_counts(config: RunConfig, ranks: int) -> SampleCounts:
    """Samples of each split: all iterations of training; one evaluation, which always sees the same samples."""
    schedule = config.batch_schedule(ranks)
    evaluated = config.training.eval_iters * schedule.global_batch_size
    return schedule.consumed_after(max(config.training.train_iters, 1)), evaluated, evaluated


def check_lengths(datasets: Datasets, counts: SampleCounts) -> None:
    """Raise `ValueError` where a set has fewer samples than the run will ask it for, or none is there to train on."""
    if datasets[0] is None:
        raise ValueError("the dataset provider gives no training set")
    for split, dataset, count in zip(SPLITS, datasets, counts, strict=True):
        if dataset is not None and len(dataset) < count:
            raise ValueError(f"the {split} set has {len(dataset)} samples, but the run needs {count}")


def check_progress(config: RunConfig, state: RunState, ranks: int) -> None:
    """Raise `ValueError` where a loaded run is beyond `--train-iters`, or will ask for more samples than there are.

    The data is prepared for a run from the start; one that was begun with larger batches has consumed more by now.
    """
    total = config.training.train_iters
    if state.iteration > total:
        raise ValueError(f"--train-iters {total}: the checkpoint is of iteration {state.iteration} already")
    end = config.batch_schedule(ranks).consumed_after(total - state.iteration, state.consumed_samples)
    prepared = sample_counts(config, ranks)[0]
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
    sums = torch.stack([_fingerprint(parameter) for _, parameter in named])  # [parameters]
    lowest, highest = sums.clone(), sums.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=mpu.get_data_parallel_group())
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=mpu.get_data_parallel_group())
    for (name, _), different in zip(named, (lowest != highest).tolist(), strict=True):
        if different:
            raise ValueError(f"the parameter {name} does not start equal on all data-parallel replicas of the model")


def _fingerprint(parameter: Tensor) -> Tensor:
    values = parameter.detach().double().flatten()
    return values.sum() + values[: len(values) // 2].sum()  # the half tells apart what only stands elsewhere
