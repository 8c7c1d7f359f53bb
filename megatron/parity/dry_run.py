"""A layout planned at its full size, without training: what one rank holds, computes and exchanges."""

import dataclasses
from collections import Counter

import torch

from megatron.base.activations import activation_bytes
from megatron.base.words import counted, micro_batches
from megatron.model import GPTModel
from megatron.mpu.initialize import GroupInfo
from megatron.mpu.topology import Topology
from megatron.pipeline import Action, Program, Schedule, Stage, bubble, programs, schedule_problems
from megatron.pipeline.validate import peak_in_flight
from megatron.training.config import RunConfig

# Of GPT-2, where the flags do not say how many tokens there are.
_VOCAB_SIZE = 50_257


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """One rank's part of a run.

    Attributes:
        stages: what it holds of the model.
        schedule: of an iteration, for all pipeline ranks.
        program: what the rank does in it.
        model: its part of the model, on the meta device.
    """

    stages: tuple[Stage, ...]
    schedule: Schedule
    program: Program
    model: GPTModel


def plan_rank(config: RunConfig, world_size: int, rank: int, vocab_size: int) -> RankPlan:
    """Plan the part of `rank`; takes little memory, whatever the size. ValueError where there is no such rank."""
    at = _topology(config, world_size).coordinates(rank)
    stages = config.stages_of(at.pipeline, config.model.vocabulary_rows(vocab_size))
    number = config.batch_sizes(world_size).num_micro_batches
    schedule = config.pipeline.schedule(len(stages), number)
    assert not schedule_problems(schedule)
    model = GPTModel(
        config.model,
        vocab_size,
        group=GroupInfo(None, at.tensor, config.distributed.tensor_model_parallel_size),
        dtype=config.precision.dtype,
        device="meta",
        sequence_parallel=config.distributed.sequence_parallel,
        recompute=config.recompute,
        stages=stages,
    )
    return RankPlan(stages, schedule, programs(schedule, [at.pipeline])[0], model)


def _topology(config: RunConfig, world_size: int) -> Topology:
    sizes = config.distributed.tensor_model_parallel_size, config.pipeline.pipeline_model_parallel_size
    return Topology(world_size, *sizes)


def parameter_bytes(config: RunConfig, world_size: int) -> float:
    """Bytes of a parameter with its gradient and Adam's state, on each rank."""
    precision = config.precision
    kept = precision.dtype.itemsize + precision.gradient_dtype.itemsize
    state = (3 if precision.is_mixed else 2) * precision.main_dtype.itemsize  # master weight and two moments
    shares = config.data_parallel_size(world_size) if config.optimizer.use_distributed_optimizer else 1
    return kept + state / shares


def activation_bytes_of_rank(config: RunConfig, stages: tuple[Stage, ...], in_flight: int) -> float:
    """Bytes of the layers' activations of `in_flight` forward passes through a stage, as long as they wait.

    A group of layers that is recomputed keeps its input alone.
    """
    granularity = config.recompute.granularity
    whole, of_input = (_layer_bytes(config, how) for how in (None if granularity == "full" else granularity, "full"))
    groups = [group for stage in stages for group in _groups(config, stage)]
    kept = sum(of_input if recomputed else len(names) * whole for names, recomputed in groups)
    return kept * in_flight / len(stages)


def _groups(config: RunConfig, stage: Stage) -> list[tuple[list[str], bool]]:
    return config.recompute.groups([str(layer) for layer in stage.layers])


def _layer_bytes(config: RunConfig, granularity: str | None) -> int:
    model, ranks = config.model, config.distributed
    return activation_bytes(
        config.data.seq_length,
        config.training.micro_batch_size,
        model.hidden_size,
        model.num_attention_heads,
        f=model.ffn_size,
        projection=model.projection_size,
        t=ranks.tensor_model_parallel_size,
        sequence_parallel=ranks.sequence_parallel,
        recompute=granularity,
        distribute_saved=config.recompute.distribute_saved_activations,
        fused_attention=model.attention_backend == "fused",
        attention_dropout=model.attention_dropout > 0,
        hidden_dropout=model.hidden_dropout > 0,
        width=config.precision.dtype.itemsize,
    )


def plan(config: RunConfig, world_size: int, rank: int) -> list[str]:
    """The part of `rank`, in words. Raises ValueError where there is no such rank."""
    vocab_size = config.tokenizer.vocab_size or config.model.padded_vocab_size or _VOCAB_SIZE
    mine = plan_rank(config, world_size, rank, vocab_size)
    at, schedule = _topology(config, world_size).coordinates(rank), mine.schedule
    p, v, m = schedule.pipeline_size, schedule.virtual_size, schedule.num_micro_batches
    in_flight = peak_in_flight(schedule.actions[at.pipeline])
    waiting = counted(in_flight, "forward pass waits", "forward passes wait")
    parameters = sum(parameter.numel() for parameter in mine.model.parameters())
    static = parameters * parameter_bytes(config, world_size)
    active = activation_bytes_of_rank(config, mine.stages, in_flight)
    return [
        f"rank {rank} of {world_size}: tensor rank {at.tensor} of {config.distributed.tensor_model_parallel_size}, "
        f"pipeline rank {at.pipeline} of {p}, data rank {at.data} of {config.data_parallel_size(world_size)}",
        *(f"  holds {_stage_words(stage)}" for stage in mine.stages),
        f"  {parameters:,} parameters of a vocabulary of {config.model.vocabulary_rows(vocab_size):,}; with gradients "
        f"and optimizer {static / 1e9:.1f} GB",
        f"  at most {waiting} for the backward pass; the activations of their layers take "
        f"{active / 1e9:.1f} GB" + _recompute_words(config, mine.stages),
        f"  an iteration: {_program_words(mine.program)}",
        *([f"  from stage to stage goes {_boundary_words(config, mine.model)}"] if p > 1 else []),
        f"pipeline of {micro_batches(m)}: the bubble is (p - 1)/(v m) = {bubble(p, v, m):.2%} of the ideal time",
    ]


def _stage_words(stage: Stage) -> str:
    first, last = stage.layers.start, stage.layers.stop - 1
    layers = f"layer {first}" if first == last else f"layers {first} to {last}"
    return f"{'the embedding, ' * stage.embedding}{layers}{', the final norm and the output' * stage.head}"


def _recompute_words(config: RunConfig, stages: tuple[Stage, ...]) -> str:
    groups = [group for stage in stages for group in _groups(config, stage)]
    largest = max((len(names) for names, recomputed in groups if recomputed), default=0)
    return f", and {counted(largest, 'whole layer')} more at the peak" if largest else ""


def _program_words(program: Program) -> str:
    passes = Counter(i.kind for i in program if isinstance(i, Action))
    exchanges = [i for i in program if not isinstance(i, Action)]
    sent, received = (sum(len(getattr(i, side)) for i in exchanges) for side in ("sends", "receives"))
    return (
        f"{passes['forward']} forward and {counted(passes['backward'], 'backward pass', 'backward passes')}, "
        f"{counted(sent, 'tensor')} sent and {received} received in {counted(len(exchanges), 'exchange')}"
    )


def _boundary_words(config: RunConfig, model: GPTModel) -> str:
    shape = model.boundary_shape(config.training.micro_batch_size, config.data.seq_length)
    size = torch.Size(shape).numel() * config.precision.dtype.itemsize
    return f"a tensor of shape {list(shape)} on this rank, {size / 1e6:.1f} MB"
