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
from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.schedule import ScheduleConfig
from megatron.tokenizer import TokenizerConfig
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
    train_iters: int = flag(dataclasses.MISSING, "iterations to train in all")
    global_batch_size: int | None = flag(
        None,
        "samples of one iteration over all ranks; micro batch times data-parallel size if not given",
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, "start, increment, samples: begin with smaller global batches and reach the full one after that many"
    )
    seed: int = flag(1234, "seed of weights, dropout and data order")
    params_dtype: str = flag(
        "float32",
        "number format of weights and arithmetic",
        choices=["float32", "float64"],
    )
    loss_normalization: str = flag(
        "tokens",
        "tokens: divide by the counted tokens of the global batch; microbatch: mean of micro-batch means",
        choices=["tokens", "microbatch"],
    )
    eval_interval: int = flag(1000, "iterations between evaluations on the validation set")
    eval_iters: int = flag(100, "global batches of one evaluation; 0 for none")
    eval_at_start: bool = flag(False, "evaluate before the first iteration too")
    exit_interval: int | None = flag(None, "end the run when the iteration is a multiple of this")

    @property
    def ramp_up(self) -> RampUp | None:
        """The ramp-up of the global batch size, None where there is none."""
        return None if self.rampup_batch_size is None else RampUp(*self.rampup_batch_size)

    def problems(self) -> list[str]:
        found = choice_problems(self)
        if self.rampup_batch_size is not None and len(self.rampup_batch_size) != 3:
            words = " ".join(map(str, self.rampup_batch_size))
            found.append(f"--rampup-batch-size {words}: it takes three numbers: start, increment, samples")
        found += minimum_problems(
            self,
            1,
            "micro_batch_size",
            "global_batch_size",
            "eval_interval",
            "exit_interval",
        )
        found += minimum_problems(self, 0, "train_iters", "eval_iters")
        return found + range_problems(self, 0, 2**32, "seed")  # what NumPy's generator takes


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """The batch of one iteration, resolved: `global_batch_size` = `micro_batch_size` * `num_micro_batches` * `data`."""

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int


# Flags of Megatron-LM 2.5 and later for what is not here: a launch script that relies on them must not start.
_UNSUPPORTED = frozenset(
    """
    fp16 bf16 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis fp32-residual-connection
    accumulate-allreduce-grads-in-fp32 fp16-lm-cross-entropy checkpoint-activations checkpoint-num-layers
    distribute-checkpointed-activations recompute-granularity recompute-method recompute-num-layers
    pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage sequence-parallel use-distributed-optimizer
    overlap-grad-reduce overlap-param-gather untie-embeddings-and-output-weights DDP-impl optimizer sgd-momentum
    finetune no-load-optim no-load-rng no-save-optim no-save-rng ckpt-step train-samples lr-decay-samples
    lr-warmup-samples override-lr-scheduler use-checkpoint-lr-scheduler exit-duration-in-mins exit-signal-handler
    apply-residual-connection-post-layernorm openai-gelu init-method-xavier-uniform log-params-norm
    log-num-zeros-in-grad
    """.split()  # noqa: SIM905 - as a list it would be a page
)


@dataclasses.dataclass(frozen=True)
class RunConfig(ComposedConfig):
    """All flags of a pretraining run, from the command line or --config FILE.yaml.

    A section for each room that reads it.
    """

    distributed: DistributedConfig
    model: TransformerConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig

    # Flags of Megatron-LM that mean nothing here; accepted with a line, so that old scripts start.
    ignored_flags: ClassVar[Mapping[str, str]] = {
        "adlr-autoresume": "it belongs to one site's scheduler",
        "use-cpu-initialization": "weights are always drawn on the CPU, equal for every layout",
    }
    unsupported_flags: ClassVar[frozenset[str]] = _UNSUPPORTED

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

    @combines("model", "distributed")
    def _model_problems(self, world_size: int) -> list[str]:
        return self.model.tensor_problems(self.distributed.tensor_model_parallel_size)

    @combines("model", "data")
    def _length_problems(self, world_size: int) -> list[str]:
        length, most = self.data.seq_length, self.model.max_position_embeddings
        return (
            [] if length <= most else [f"--seq-length {length}: it must not be above --max-position-embeddings {most}"]
        )

    @combines("schedule", "training")
    def _schedule_problems(self, world_size: int) -> list[str]:
        return self.schedule.training_problems(self.training.train_iters)

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
        return self._ramp_up_problems(world_size)

    def _ramp_up_problems(self, world_size: int) -> list[str]:
        ramp, together = self.training.ramp_up, self.training.micro_batch_size * self.data_parallel_size(world_size)
        found = self.batch_schedule(world_size).problems()
        if not found and ramp is not None and (ramp.start % together or ramp.increment % together):
            found.append(
                f"--rampup-batch-size {ramp.start} {ramp.increment} {ramp.samples}: start and increment must be "
                f"multiples of the micro batch times the data-parallel size, which is {together}"
            )
        return found
