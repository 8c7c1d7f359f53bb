"""The configs that the training loop reads, and all configs of a run composed, with complaints of combinations."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from megatron.base.compose import ComposedConfig, combines
from megatron.base.config import (
    Config,
    choice_problems,
    flag,
    minimum_problems,
    range_problems,
)
from megatron.checkpointing.config import CheckpointConfig
from megatron.data.batch_sizes import BatchSchedule, RampUp
from megatron.data.config import DataConfig
from megatron.model.config import TransformerConfig
from megatron.model.recompute import RecomputeConfig
from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.precision import PrecisionConfig
from megatron.optimizer.schedule import ScheduleConfig
from megatron.tokenizer import TokenizerConfig
from megatron.training.foreign_flags import IGNORED, UNSUPPORTED
from megatron.training.observers import LoggingConfig
from megatron.training.setup import DistributedConfig


@dataclasses.dataclass(frozen=True)
class TrainingConfig(Config):
    """How long to train, on how much at a time, and how often to look."""

    micro_batch_size: int = flag(
        dataclasses.MISSING,
        "samples of one forward pass on one rank",
        aliases=["batch-size"],
    )
    train_iters: int | None = flag(None, "iterations to train in all; or give --train-samples")
    train_samples: int | None = flag(None, "samples to train on in all, in place of --train-iters")
    global_batch_size: int | None = flag(
        None,
        "samples of one iteration over all ranks; micro batch times data-parallel size if not given",
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, "start, increment, samples: begin with smaller global batches and reach the full one after that many"
    )
    seed: int = flag(1234, "seed of weights, dropout and data order")
    loss_normalization: str = flag(
        "tokens",
        "tokens: divide by the counted tokens of the global batch; microbatch: mean of micro-batch means",
        choices=["tokens", "microbatch"],
    )
    eval_interval: int = flag(1000, "iterations between evaluations on the validation set")
    eval_iters: int = flag(100, "global batches of one evaluation; 0 for none")
    eval_at_start: bool = flag(False, "evaluate before the first iteration too")
    exit_interval: int | None = flag(None, "end the run when the iteration is a multiple of this")
    check_for_nan_in_loss: bool = flag(
        True, "end the run at a loss that is not finite, naming rank and samples; --fp16 skips the step instead"
    )

    @property
    def ramp_up(self) -> RampUp | None:
        """The ramp-up of the global batch size, None where there is none."""
        return None if self.rampup_batch_size is None else RampUp(*self.rampup_batch_size)

    def problems(self) -> list[str]:
        found = choice_problems(self) + self._length_problems()
        if self.rampup_batch_size is not None and len(self.rampup_batch_size) != 3:
            words = " ".join(map(str, self.rampup_batch_size))
            found.append(f"--rampup-batch-size {words}: it takes three numbers: start, increment, samples")
        found += minimum_problems(
            self,
            1,
            "micro_batch_size",
            "global_batch_size",
            "train_samples",
            "eval_interval",
            "exit_interval",
        )
        found += minimum_problems(self, 0, "train_iters", "eval_iters")
        return found + range_problems(self, 0, 2**32, "seed")  # what NumPy's generator takes

    def _length_problems(self) -> list[str]:
        iters, samples = self.train_iters, self.train_samples
        if iters is None and samples is None:
            return ["--train-iters is not given, and neither is --train-samples: give one of them"]
        if iters is not None and samples is not None:
            return [f"--train-iters {iters} and --train-samples {samples}: give one of them"]
        return []


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """The batch of one iteration, resolved: `global_batch_size` = `micro_batch_size` * `num_micro_batches` * `data`."""

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int


@dataclasses.dataclass(frozen=True)
class RunConfig(ComposedConfig):
    """All flags of a pretraining run, from the command line or --config FILE.yaml.

    A section for each room that reads it.
    """

    distributed: DistributedConfig
    model: TransformerConfig
    recompute: RecomputeConfig
    training: TrainingConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig

    ignored_flags: ClassVar[Mapping[str, str]] = IGNORED
    unsupported_flags: ClassVar[frozenset[str]] = UNSUPPORTED

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model in a world of `world_size` ranks."""
        return world_size // self.distributed.tensor_model_parallel_size

    def batch_schedule(self, world_size: int) -> BatchSchedule:
        """The size of each global batch."""
        smallest = self.training.micro_batch_size * self.data_parallel_size(world_size)
        return BatchSchedule(self.training.global_batch_size or smallest, self.training.ramp_up)

    def batch_sizes(self, world_size: int, consumed_samples: int | None = None) -> BatchSizes:
        """The batch of the iteration after `consumed_samples` samples, None being after the ramp-up.

        The sizes divide, or a complaint has said so.
        """
        schedule, micro = self.batch_schedule(world_size), self.training.micro_batch_size
        total = schedule.global_batch_size if consumed_samples is None else schedule.size(consumed_samples)
        return BatchSizes(total, micro, total // (micro * self.data_parallel_size(world_size)))

    def iterations(self, world_size: int, iteration: int = 0, consumed_samples: int = 0) -> int:
        """The iteration at which a run ends that has come to `iteration` with `consumed_samples` samples."""
        if self.training.train_iters is not None:
            return self.training.train_iters
        assert self.training.train_samples is not None
        return iteration + self.batch_schedule(world_size).batches_until(self.training.train_samples, consumed_samples)

    def samples(self, world_size: int) -> int:
        """The samples of all iterations of a run from its start."""
        if self.training.train_samples is not None:
            return self.training.train_samples
        return self.batch_schedule(world_size).consumed_after(self.iterations(world_size))

    @combines("model", "distributed")
    def _model_problems(self, world_size: int) -> list[str]:
        return self.model.tensor_problems(self.distributed.tensor_model_parallel_size)

    @combines("model", "data")
    def _length_problems(self, world_size: int) -> list[str]:
        length, most = self.data.seq_length, self.model.max_position_embeddings
        return (
            [] if length <= most else [f"--seq-length {length}: it must not be above --max-position-embeddings {most}"]
        )

    @combines("data", "distributed")
    def _sequence_problems(self, world_size: int) -> list[str]:
        length, t = self.data.seq_length, self.distributed.tensor_model_parallel_size
        if not self.distributed.sequence_parallel or length % t == 0:
            return []
        return [
            f"--seq-length {length}: with --sequence-parallel it must be a multiple of --tensor-model-parallel-size {t}"
        ]

    @combines("model", "recompute", "distributed")
    def _recompute_problems(self, world_size: int) -> list[str]:
        ranks = self.distributed
        return self.recompute.layout_problems(
            self.model.num_layers, ranks.tensor_model_parallel_size, ranks.sequence_parallel
        )

    @combines("schedule", "training", "distributed")
    def _schedule_problems(self, world_size: int) -> list[str]:
        batch = self.batch_schedule(world_size).global_batch_size or None  # 0 where the ranks are too few
        return self.schedule.training_problems(self.training.train_iters, self.training.train_samples, batch)

    @combines("training", "distributed")
    def _batch_problems(self, world_size: int) -> list[str]:
        t = self.distributed.tensor_model_parallel_size
        if world_size % t:
            wrong = f"--tensor-model-parallel-size {t}: it must divide the number of ranks, which is {world_size}"
            return [f"{wrong}; torchrun --nproc-per-node starts more" if t > world_size else wrong]
        total, micro = self.training.global_batch_size, self.training.micro_batch_size
        data = self.data_parallel_size(world_size)
        if total is not None and total % (micro * data):
            return [
                f"--global-batch-size {total}: it must be a multiple of --micro-batch-size {micro} times "
                f"the data-parallel size {data}"
            ]
        return self._ramp_up_problems(world_size) or self._too_few_samples(world_size)

    def _too_few_samples(self, world_size: int) -> list[str]:
        samples, first = self.training.train_samples, self.batch_schedule(world_size).size(0)
        if samples is None or samples >= first:
            return []
        return [f"--train-samples {samples}: it must be at least {first}, one global batch"]

    def _ramp_up_problems(self, world_size: int) -> list[str]:
        ramp, together = self.training.ramp_up, self.training.micro_batch_size * self.data_parallel_size(world_size)
        found = self.batch_schedule(world_size).problems()
        if not found and ramp is not None and (ramp.start % together or ramp.increment % together):
            found.append(
                f"--rampup-batch-size {ramp.start} {ramp.increment} {ramp.samples}: start and increment must be "
                f"multiples of the micro batch times the data-parallel size, which is {together}"
            )
        return found
