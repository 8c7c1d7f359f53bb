"""The optimizer of a run: gradient buckets, reduction, clipping by the global norm, master weights, the step."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.mpu.sharding import Sharding
from megatron.optimizer.buckets import main_gradient, make_buckets
from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.gradients import GradientReducer, sum_over_group
from megatron.optimizer.groups import RankGroups, info
from megatron.optimizer.loss_scaler import make_loss_scaler
from megatron.optimizer.norm import ShardNorms, sum_of_places, words_on_non_finite
from megatron.optimizer.parameters import ParameterGatherer
from megatron.optimizer.precision import PrecisionConfig
from megatron.optimizer.state import PlacedState, placed_gradients, state_tensors
from megatron.optimizer.updates import BucketUpdate


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step did: the norm of the gradients before clipping, and whether it was skipped for their overflow."""

    grad_norm: float
    skipped: bool = False


class Optimizer:
    """Trains a model that is split over tensor ranks and pipeline stages, and replicated over data ranks.

    One iteration: `zero_grad()`, a backward pass for each micro-batch, with `last_micro_batch()` before the last one
    (of each part of the model that runs apart), `reduce_gradients(divisor)`, `step(lr)`. The loss of each micro-batch
    is multiplied by `loss_scale` before backward.

    Parameters with `requires_grad` become views of flat buffers, and their gradients are collected in others (see
    `Bucket`). With `--use-distributed-optimizer` each data rank keeps master weights and state of its share only.

    With `--overlap-param-gather` parameters are not whole when `step` returns. Each module waits for its own as it is
    called, and those of modules that training did not call since the step before are awaited by `step`. Whoever reads
    parameters in another way, such as a training step that uses `model.out.weight` before it calls `model.out`, must
    call `wait_for_parameters()` first.

    Args:
        model: what this rank holds; parameters with `requires_grad` are trained, gradients are collected from now on.
        shardings: where each parameter belongs, by the names of `model.named_parameters()`. One-dimensional parameters
            (biases, norms) are not decayed.
        config: which optimizer, its constants, clipping, and how data ranks share the work.
        precision: number formats and the loss scale.
        data_group: ranks with the same weights and other samples; None for this rank alone.
        tensor_group: ranks that share the model's layers; None for this rank alone.
        tensor_rank: this rank's place in `tensor_group`.
        model_group: ranks that hold one copy of the model together; `tensor_group` by default.
        model_rank: this rank's place in `model_group`.
        everyone: `model_group` times `data_group`; needed where both have several ranks and the optimizer is sharded.
        own_buckets: names of parameters that other modules read than those that have them, such as a tied embedding.
        embedding_group: the stages that have copies of the parameters in `own_buckets`, each with a part of their
            gradients; None where this rank's stage has none, or has the only one.
        duplicates: names of parameters that another stage has too and counts in the norm.
        parts: for each parameter the chunk of the model that it belongs to, where several run apart (an interleaved
            pipeline): no bucket has parameters of two. Chunks complete their gradients from the last to the first.
        device: of the norm; that of the parameters by default, and to be given where a stage may have none.

    Raises ValueError where nothing is trained, a parameter has no sharding or no part, or `everyone` is missing. With
    a pipeline a stage may have nothing to train.
    """

    def __init__(
        self,
        model: nn.Module,
        shardings: Mapping[str, Sharding],
        config: OptimizerConfig,
        precision: PrecisionConfig | None = None,
        *,
        data_group: ProcessGroup | None = None,
        tensor_group: ProcessGroup | None = None,
        tensor_rank: int = 0,
        model_group: ProcessGroup | None = None,
        model_rank: int = 0,
        everyone: ProcessGroup | None = None,
        own_buckets: Collection[str] = (),
        embedding_group: ProcessGroup | None = None,
        duplicates: Collection[str] = (),
        parts: Mapping[str, int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._config, self._precision = config, precision or PrecisionConfig()
        tensor = info(tensor_group, tensor_rank)
        model_ranks = tensor if model_group is None else info(model_group, model_rank)
        self._groups = RankGroups(info(data_group), tensor, model_ranks, info(everyone), info(embedding_group))
        self._parameters = _trained(model, shardings, may_be_none=model_ranks.size > tensor.size)
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._shardings = {name: shardings[name] for name in self._parameters}
        self._duplicates = frozenset(duplicates)
        self._norm_group = self._groups.norm_group(self.sharded)
        self._buckets = make_buckets(
            self._parameters,
            self._precision,
            config.ddp_bucket_size,
            own_buckets,
            data=self._groups.data,
            sharded=self.sharded,
            parts=parts,
        )
        first = tensor.rank == 0
        counted = {name for name, sharding in self._shardings.items() if first or sharding.split_dim is not None}
        shards = 1 if self.sharded else self._groups.data.size
        where = device or next((p.device for p in model.parameters()), torch.device("cpu"))
        self._norms = ShardNorms(self._buckets, counted - self._duplicates, shards, where)
        copies = self._groups.embedding
        tied = own_buckets if copies.size > 1 else ()
        speaks = self._groups.data.rank == tensor.rank == 0
        self._reducer = GradientReducer(self._buckets, tied, copies, speaks)
        self._overlaps_gathering = config.overlap_param_gather and self.sharded
        self._gatherer = ParameterGatherer(model, self._buckets, own_buckets, overlap=self._overlaps_gathering)
        self._updates = [BucketUpdate(bucket, self._is_decayed, config) for bucket in self._buckets]
        self._scaler = make_loss_scaler(self._precision)
        self._divisor = 1.0
        self._step_count = self._skipped_in_a_row = 0

    @property
    def sharded(self) -> bool:
        """Whether each data rank keeps a part of the optimizer's state only."""
        return self._config.use_distributed_optimizer and self._groups.data.size > 1

    def _is_decayed(self, name: str) -> bool:
        return len(self._shardings[name].global_shape) > 1

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward; 1 unless parameters are float16."""
        return self._scaler.scale

    def zero_grad(self) -> None:
        """Forget the gradients of the last iteration.

        Raises ValueError where a parameter was moved, cast or unfrozen since the optimizer was made, which would go on
        without it.
        """
        for bucket in self._buckets:
            bucket.check_views()
        unfrozen = [name for name, p in self._frozen.items() if p.requires_grad]
        if unfrozen:
            raise ValueError(
                f"parameters {', '.join(unfrozen)} were frozen when the optimizer was made and have requires_grad now, "
                "but it does not train them: set requires_grad before that, or make a new optimizer"
            )
        self._reducer.zero()
        self._divisor = 1.0

    def last_micro_batch(self, names: Collection[str] | None = None) -> None:
        """Say that the backward pass that comes is the last of the iteration for the parameters `names`, or for all.

        With `--overlap-grad-reduce` it sums the gradients over the data group, a bucket at a time, while it goes on:
        the collectives of `reduce_gradients`, but for those of parameters with copies on other stages. All data ranks
        begin them in one order. `names` are the parameters of one or more of the `parts`, else ValueError is raised;
        RuntimeError where their sums have begun.
        """
        if self._config.overlap_grad_reduce:
            self._reducer.overlap(names)

    def reduce_gradients(self, divisor: float) -> None:
        """Sum the gradients over the data group, or wait until that is done; `step` will divide them by `divisor`.

        `divisor` is what the summed loss is divided by over the whole global batch, usually its counted tokens; without
        the loss scale. One all-reduce over the data group for each bucket, or one reduce-scatter if sharded. The
        buckets of parameters with copies on other stages come last, each followed by one all-reduce over the embedding
        group, of this rank's share of it if sharded. Then one all-reduce over the tensor group of gradients that its
        ranks have terms of. Raises ValueError where `divisor` is not above 0.
        """
        if not divisor > 0:
            raise ValueError(f"gradients cannot be divided by {divisor}: no token of the global batch was counted")
        self._reducer.finish()
        partial = {name for name, sharding in self._shardings.items() if sharding.partial_gradient}
        sum_over_group(
            [
                bucket.gradients[segment.range.slice]
                for bucket in self._buckets
                for segment in bucket.layout.segments(bucket.held)
                if segment.name in partial
            ],
            self._groups.tensor,
        )
        self._divisor = divisor

    def gradients(self) -> dict[str, Tensor]:
        """This rank's collected gradients by parameter name: views of the buffers.

        They are as backward left them until `step` divides them, in place unless they have fewer bits than the master
        weights. If sharded, only this rank's share of them means anything once they are reduced.
        """
        return {name: main_gradient(parameter) for name, parameter in self._parameters.items()}

    def placed_gradients(self) -> PlacedState:
        """Copies of the reduced gradients, divided and not clipped, and where they belong.

        Of this rank's share of them if sharded. To be asked for between `reduce_gradients` and `step`.
        """
        return placed_gradients(self._buckets, self._shardings, 1.0 / (self._divisor * self.loss_scale))

    def gradient_norm(self, loss_is_finite: bool = True) -> float:
        """The 2-norm of the whole model's gradient, divided; equal on all ranks. A parameter with copies counts once.

        No number on all ranks where `loss_is_finite` is false on any: a loss may be infinite with finite gradients.

        One all-reduce of (model ranks x data ranks) float64 over the model group, over everyone if sharded.
        """
        squared = self._norms.squared()  # [shards]
        if not loss_is_finite:
            squared.fill_(math.nan)
        first = self._groups.place(self._groups.data.rank if self.sharded else 0)
        total = sum_of_places(squared, first, self._groups.places, self._norm_group)
        return total.sqrt().item() / (self._divisor * self.loss_scale)

    def step(self, lr: float, *, loss_is_finite: bool = True) -> StepResult:
        """Divide and clip the gradients, move the weights; returns the norm before clipping.

        Clipping multiplies by `clip_grad / (norm + 1e-6)` where that is below 1; division, loss scale and clipping are
        one multiplication. If sharded, one all-gather over the data group for each bucket, under way when this returns
        with `--overlap-param-gather`.

        Where the norm is not finite, on every rank alike, weights and state stay as they are: with float16 parameters
        the step is skipped and the loss scale hears of it. Raises FloatingPointError with others, and where
        `--max-skipped-steps` steps in a row were skipped. So it is also where `loss_is_finite` is false on any rank.
        """
        norm = self.gradient_norm(loss_is_finite)
        if not math.isfinite(norm):
            return self._skip(norm)
        clip = self._config.clip_grad / (norm + 1e-6)
        factor = 1.0 / (self._divisor * self.loss_scale)
        self._update(lr, factor * clip if 0 < clip < 1 else factor)
        self._step_count += 1
        self._skipped_in_a_row = 0
        self._scaler.update(overflow=False)
        return StepResult(norm)

    def _update(self, lr: float, factor: float) -> None:
        self._gatherer.wait()
        for number, update in reversed(list(enumerate(self._updates))):  # forward needs the last bucket first
            update.step(lr, factor)
            self._gatherer.start(number)
        if self._overlaps_gathering:
            self._gatherer.started_all()
        else:
            self._gatherer.wait()

    def _skip(self, norm: float) -> StepResult:
        if not self._precision.fp16:
            raise FloatingPointError(f"the gradient norm is {norm}; {words_on_non_finite(self._buckets)}")
        scale, most = self.loss_scale, self._precision.max_skipped_steps
        self._scaler.update(overflow=True)
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= most:
            raise FloatingPointError(
                f"--max-skipped-steps {most}: {self._skipped_in_a_row} steps in a row were skipped, as gradients are "
                f"not finite even at a loss scale of {scale:g}; {words_on_non_finite(self._buckets)}"
            )
        return StepResult(norm, skipped=True)

    def wait_for_parameters(self) -> None:
        """Wait until all parameters are gathered, so that they may be read in any way.

        Calls of modules wait for their own parameters by themselves.
        """
        self._gatherer.wait()

    @property
    def step_count(self) -> int:
        """Steps taken and not skipped."""
        return self._step_count

    @step_count.setter
    def step_count(self, steps: int) -> None:
        self._step_count = steps
        for update in self._updates:
            update.set_step_count(steps)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside tensors, as plain values."""
        return {
            "step_count": self._step_count,
            "skipped_in_a_row": self._skipped_in_a_row,
            "loss_scaler": self._scaler.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has given, after the tensors are loaded."""
        self.step_count = int(state["step_count"])
        self._skipped_in_a_row = int(state.get("skipped_in_a_row", 0))
        self._scaler.load_state(state.get("loss_scaler", {}))

    def after_load(self, masters: bool) -> None:
        """Make 16-bit parameters and their master weights agree after a checkpoint was loaded into them.

        Args:
            masters: whether the master weights were loaded, so that the parameters follow them (if sharded, one
                all-gather for each bucket); else they follow the parameters.
        """
        self._gatherer.wait()
        for number, update in enumerate(self._updates):
            if not masters:
                update.masters_from_weights()
            elif update.has_masters:
                update.weights_from_masters()
                self._gatherer.start(number)
        self._gatherer.wait()

    def state_tensors(self, *, duplicates: bool = True) -> PlacedState:
        """The optimizer's state and where it belongs, as `optimizer.exp_avg.NAME` and so on.

        They have the parameters' shapes, or are the 1-D ranges of them that this rank holds if sharded. They exist
        before the first step and are filled in place by a load. A save leaves out those of `duplicates`, which another
        stage writes.
        """
        self._gatherer.wait()
        left_out = () if duplicates else self._duplicates
        parameters = {name: p for name, p in self._parameters.items() if name not in left_out}
        return state_tensors(self._updates, parameters, self._shardings)


def _trained(model: nn.Module, shardings: Mapping[str, Sharding], *, may_be_none: bool) -> dict[str, nn.Parameter]:
    """The parameters to train, by name. Raises ValueError where one has no sharding, or there is none and must be."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters and not may_be_none:
        raise ValueError("the model has no parameter with requires_grad: there is nothing to train")
    homeless = [name for name in parameters if name not in shardings]
    if homeless:
        raise ValueError(f"no sharding is given for the parameters {', '.join(homeless)}")
    return parameters
