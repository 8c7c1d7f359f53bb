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
from megatron.pipeline import LayerSplit, PipelineConfig, Stage, head_cost
from megatron.tokenizer import TokenizerConfig
from megatron.training.fitting import batch_problems, ramp_up_problems, rank_problems
from megatron.training.foreign_flags import ELSEWHERE, IGNORED, RENAMED, UNSUPPORTED
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
    eval_at_start: bool = flag(False, "evaluate before the first iteration too, also of a run that goes on")
    eval_samples: str = flag(
        "same",
        "same: each evaluation is on the first samples of the validation set; moving: on those after the last "
        "evaluation's, as Megatron-LM does, and once more at the end of training",
        choices=["same", "moving"],
    )
    exit_interval: int | None = flag(None, "end the run when the iteration is a multiple of this")
    exit_duration_in_mins: float | None = flag(None, "save and end the run after so many minutes")
    check_for_nan_in_loss: bool = flag(
        True, "end the run at a loss that is not finite, naming rank and samples; --fp16 skips the step instead"
    )

    def evaluations(self, iteration: int) -> int:
        """Evaluations at a multiple of `--eval-interval` up to `iteration`."""
        return iteration // self.eval_interval

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
        found += minimum_problems(self, 0, "train_iters", "eval_iters", "exit_duration_in_mins")
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
    pipeline: PipelineConfig
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
    renamed_flags: ClassVar[Mapping[str, str]] = RENAMED
    flags_elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE
    unsupported_flags: ClassVar[frozenset[str]] = UNSUPPORTED

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.distributed.tensor_model_parallel_size * self.pipeline.pipeline_model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model in a world of `world_size` ranks."""
        return world_size // self.model_parallel_size

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample."""
        return self.data.seq_length

    @property
    def most_counted(self) -> int:
        """What a sample without masked tokens adds to the number that divides the loss."""
        return self.data.seq_length

    def layer_split(self, logits: int | None = None) -> LayerSplit:
        """How the layers are divided over the stages.

        `logits` of a token (`model.vocabulary_rows`, or 0 for a model that makes none) give the cost of the head, where
        the flags ask to count it in; without them the stages are as many, and as legal, but perhaps of other layers.
        """
        model, sizes = self.model, (self.data.seq_length, self.model.hidden_size)
        cost = 1.0
        if logits is not None:
            cost = head_cost(*sizes, logits, model.ffn_size, model.projection_size)
        return self.pipeline.split(model.num_layers, head_cost=cost)

    def stages_of(self, pipeline_rank: int, logits: int) -> tuple[Stage, ...]:
        """The stages that a pipeline rank holds, in the order of the model; `logits` as for `layer_split`."""
        return tuple(stage for stage in self.layer_split(logits).stages() if stage.rank == pipeline_rank)

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

    @combines("model", "pipeline", "data")
    def _split_problems(self, world_size: int) -> list[str]:
        return self.layer_split().problems()

    @combines("model", "recompute", "distributed", "pipeline", "data")
    def _recompute_problems(self, world_size: int) -> list[str]:
        split, ranks = self.layer_split(), self.distributed
        if split.problems():
            return []
        # The layers of balanced stages depend on the vocabulary, which is not read yet.
        most = self.model.num_layers if split.head_cost else max(len(stage.layers) for stage in split.stages())
        return self.recompute.layout_problems(most, ranks.tensor_model_parallel_size, ranks.sequence_parallel)

    @combines("schedule", "training", "distributed", "pipeline")
    def _schedule_problems(self, world_size: int) -> list[str]:
        batch = self.batch_schedule(world_size).global_batch_size or None  # 0 where the ranks are too few
        return self.schedule.training_problems(self.training.train_iters, self.training.train_samples, batch)

    @combines("schedule", "checkpoint")
    def _resuming_problems(self, world_size: int) -> list[str]:
        if not (self.checkpoint.finetune and self.schedule.use_checkpoint_lr_scheduler):
            return []
        return ["--finetune and --use-checkpoint-lr-scheduler: give one of them, for the one begins a new schedule"]

    @combines("distributed", "pipeline")
    def _rank_problems(self, world_size: int) -> list[str]:
        t, p = self.distributed.tensor_model_parallel_size, self.pipeline.pipeline_model_parallel_size
        return rank_problems(t, p, world_size)

    @combines("training", "distributed", "pipeline", "model", "data")
    def _batch_problems(self, world_size: int) -> list[str]:
        split = self.layer_split()
        if world_size % self.model_parallel_size or split.problems():
            return []  # told already
        schedule, micro = self.batch_schedule(world_size), self.training.micro_batch_size
        total, data = schedule.global_batch_size, self.data_parallel_size(world_size)
        group = self.pipeline.pipeline_model_parallel_size if split.virtual_size > 1 else 1
        return (
            batch_problems(total, micro, data, group)
            or self.pipeline.batch_problems(split.virtual_size, total, micro * data)
            or ramp_up_problems(schedule, micro, data, group)
            or self._too_few_samples(world_size)
        )

    def _too_few_samples(self, world_size: int) -> list[str]:
        samples, first = self.training.train_samples, self.batch_schedule(world_size).size(0)
        if samples is None or samples >= first:
            return []
        return [f"--train-samples {samples}: it must be at least {first}, one global batch"]
