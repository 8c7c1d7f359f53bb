"""The stages of the model on this rank, and how micro-batches go through them; one whole model is one stage."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from megatron import mpu
from megatron.data import HOST_KEYS
from megatron.mpu.initialize import Group
from megatron.pipeline import PipelineConfig, Program, programs
from megatron.pipeline.executor import Boundary, Event, Transport, run_program
from megatron.training.losses import LossRanks
from megatron.training.timers import Timers

Batch = dict[str, Tensor]

# (model, batch) -> (sum of the losses of the counted tokens, their number), both scalars. Of a model in stages it is
# called with each of its `chunks`, and gives hidden states where that is not the last; what the stage before has given
# is in the batch as "hidden". A third element is the losses that the sum is made of, for the log alone: sums as well,
# by the names that `pretrain` is told as `loss_parts`.
ForwardStep = Callable[[Any, Batch], tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Sequence[Tensor]] | Tensor]

# What a micro-batch has lost and counted, as in the end of `ForwardStep` -> the scalar to run backward from.
LossOf = Callable[..., Tensor]

# Says which parameters complete their gradients in the backward pass that comes; all of them where it is given None.
LastMicroBatch = Callable[[list[str] | None], None]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`, but for what the host reads; the copy from pinned memory does not wait."""
    return {
        name: tensor if name in HOST_KEYS else tensor.to(device, non_blocking=True) for name, tensor in batch.items()
    }


class MicroBatches:
    """Micro-batches by number; each is kept until all `uses` (chunks of this rank) have taken it, in any order."""

    def __init__(self, batches: Iterator[Batch], device: torch.device, uses: int) -> None:
        self._batches = batches
        self._device = device
        self._uses = uses
        self._held: dict[int, Batch] = {}
        self._left: dict[int, int] = {}

    def take(self, number: int) -> Batch:
        """The micro-batch of this number, from 0."""
        while len(self._left) <= number:
            self._held[len(self._left)] = to_device(next(self._batches), self._device)
            self._left[len(self._left)] = self._uses
        self._left[number] -= 1
        return self._held[number] if self._left[number] else self._held.pop(number)


class Pipeline:
    """A model, or this rank's stages of one, with the programs that take micro-batches through it.

    Args:
        model: has the stages of this rank as `chunks`, each called as the forward step calls a model and with `last` to
            say whether it ends in losses; or no such attribute, and is then whole. One in several stages says by
            `parameter_chunks()` which parameter is in which of them.
        config: how the stages work.
        loss_ranks: the ranks of this pipeline and those of its replicas.
        device: of batches and losses.
        boundary: what goes from stage to stage, where there are several ranks.
        scatter_gather: the tensor group, where each of its ranks sends its part of a boundary tensor.

    Raises ValueError where the model cannot be split over the ranks. Collective over the pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        config: PipelineConfig | None = None,
        *,
        loss_ranks: LossRanks | None = None,
        device: torch.device | None = None,
        boundary: Boundary | None = None,
        scatter_gather: Group = None,
    ) -> None:
        self.model = model
        self.device = device or torch.device("cpu")
        self.loss_ranks = loss_ranks or LossRanks()
        self.chunks: list[Any] = getattr(model, "chunks", [model])
        self._config = config or PipelineConfig()
        ranks = self.loss_ranks.pipeline
        self._transport: Transport | None = None
        if ranks.size > 1:
            assert boundary is not None
            assert ranks.group is not None
            self._transport = Transport(boundary, ranks.group, scatter_gather=scatter_gather)
        self._programs: dict[tuple[int, bool], Program] = {}

    def program(self, num_micro_batches: int, *, forward_only: bool = False) -> Program:
        """What this rank does with that many micro-batches; made once, which takes seconds for thousands of them."""
        key = (num_micro_batches, forward_only)
        if key not in self._programs:
            schedule = self._config.schedule(len(self.chunks), num_micro_batches, forward_only=forward_only)
            (self._programs[key],) = programs(schedule, [self.loss_ranks.pipeline.rank])
        return self._programs[key]

    def train(
        self,
        batches: Iterator[Batch],
        forward_step: ForwardStep,
        loss_of: LossOf,
        num_micro_batches: int,
        last_micro_batch: LastMicroBatch,
        timers: Timers | None = None,
    ) -> None:
        """Take micro-batches forward and back, so that gradients are added up.

        `last_micro_batch` is called right before the backward pass that completes those of a stage. Collectives: those
        of the model; between stages as `run_program` says.
        """
        self.model.train()
        several = len(self.chunks) > 1

        def before_last_backward(chunk: int) -> None:
            last_micro_batch(self._names[chunk] if several else None)

        program = self.program(num_micro_batches)
        self._run(program, self._forward(batches, forward_step, loss_of), before_last_backward, timers)

    def evaluate(
        self, batches: Iterator[Batch], forward_step: ForwardStep, loss_of: LossOf, num_micro_batches: int
    ) -> None:
        """Take micro-batches forward alone, without dropout and without gradients."""
        self.model.eval()
        program = self.program(num_micro_batches, forward_only=True)
        self._run(program, self._forward(batches, forward_step, loss_of))
        self.model.train()

    def _forward(
        self, batches: Iterator[Batch], forward_step: ForwardStep, loss_of: LossOf
    ) -> Callable[[int, int, Tensor | None], Tensor]:
        micro_batches = MicroBatches(batches, self.device, len(self.chunks))

        def forward(chunk: int, micro_batch: int, received: Tensor | None) -> Tensor:
            batch = micro_batches.take(micro_batch)
            if received is not None:
                batch = {**batch, "hidden": received}
            output = forward_step(self.chunks[chunk], batch)
            return output if isinstance(output, Tensor) else loss_of(*output)

        return forward

    def _run(
        self,
        program: Program,
        forward: Callable[[int, int, Tensor | None], Tensor],
        before_last_backward: Callable[[int], None] | None = None,
        timers: Timers | None = None,
    ) -> None:
        ranks = self.loss_ranks.pipeline
        run_program(
            program,
            forward,
            pipeline_size=ranks.size,
            virtual_size=len(self.chunks),
            rank=ranks.rank,
            transport=self._transport,
            before_last_backward=before_last_backward,
            observer=None if timers is None else functools.partial(_count, timers),
            clock=time.perf_counter if timers is None else timers.now,
        )

    @functools.cached_property
    def _names(self) -> list[list[str]]:
        """The names of the parameters of each chunk."""
        model: Any = self.model
        places: dict[str, int] = model.parameter_chunks()
        return [[name for name, chunk in places.items() if chunk == number] for number in range(len(self.chunks))]


def _count(timers: Timers, event: Event) -> None:
    kind = f"{event.kind}-compute" if event.kind in ("forward", "backward") else "pipeline-wait"
    timers.add(kind, event.end - event.start)


def make_pipeline(
    model: Any,
    config: PipelineConfig,
    virtual_size: int,
    *,
    batch: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Pipeline:
    """The pipeline of a run over the groups of mpu; `batch` is the shape [b, s] of a micro-batch.

    Raises ValueError where the model cannot be split, or is not split as the flags say.
    """
    size, chunks = config.pipeline_model_parallel_size, getattr(model, "chunks", None)
    if size > 1 and (chunks is None or not hasattr(model, "boundary_shape")):
        raise ValueError(
            f"--pipeline-model-parallel-size {size}: it must be 1, the model has no stages (`chunks`, `boundary_shape`)"
        )
    if chunks is not None and len(chunks) != virtual_size:
        raise ValueError(f"the model has {len(chunks)} stages on this rank, and the flags ask for {virtual_size}")
    if chunks is not None and len(chunks) > 1 and not hasattr(model, "parameter_chunks"):
        raise ValueError(
            f"the model has {len(chunks)} stages on this rank and no parameter_chunks(), a dict of the number of the "
            "stage by the name of each parameter"
        )
    groups = (mpu.get_data_parallel_group(), mpu.get_pipeline_model_parallel_group(), dist.group.WORLD)
    ranks = LossRanks(*map(mpu.resolve_group, groups))
    if size == 1:
        return Pipeline(model, config, loss_ranks=ranks, device=device)
    # With sequence parallelism what goes to the next stage is another part of the sequence on each tensor rank.
    equal = config.scatter_gather_tensors_in_pipeline and not getattr(model, "sequence_parallel", False)
    return Pipeline(
        model,
        config,
        loss_ranks=ranks,
        device=device,
        boundary=Boundary(tuple(model.boundary_shape(*batch)), dtype, device),
        scatter_gather=mpu.get_tensor_model_parallel_group() if equal else None,
    )
