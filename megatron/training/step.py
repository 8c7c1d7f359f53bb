"""One training iteration and one evaluation: micro-batches through the stages, the loss divided once."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from megatron.optimizer import Optimizer
from megatron.training.losses import Losses, LossSum
from megatron.training.pipeline import Batch, ForwardStep, Pipeline
from megatron.training.timers import Timers


@dataclasses.dataclass(frozen=True)
class Step:
    """What one iteration gave: its loss, the norm of its gradients before clipping, and whether FP16 skipped it."""

    loss: LossSum
    grad_norm: float
    skipped: bool = False


def train_step(
    pipeline: Pipeline,
    optimizer: Optimizer,
    batches: Iterator[Batch],
    forward_step: ForwardStep,
    *,
    num_micro_batches: int,
    lr: float,
    normalization: str,
    expected_count: float | None = None,
    check_loss: bool = False,
    timers: Timers | None = None,
    after_backward: Callable[[], None] | None = None,
    loss_parts: Sequence[str] = (),
) -> Step:
    """Run one iteration and change the weights.

    Gradients of the sums of losses are accumulated over the micro-batches, summed over the replicas, and divided once
    by what the whole global batch counted, so that neither micro-batch size nor layout changes them.

    Args:
        expected_count: about what the global batch will count, for FP16 alone: each loss is divided by it and
            multiplied by the loss scale before backward, and the division is put right afterwards, so that the loss
            scale is relative to a mean. None where there is no loss scale.
        check_loss: stop at a loss that is not finite on any rank; FP16 skips the step for it in any case.
        timers: add up where the time goes.
        after_backward: called when the backward passes are over, before gradients are waited for and weights move.
        loss_parts: names of the losses that the forward step gives beside the one that they make up.

    Raises `ValueError` where nothing was counted, `NonFiniteLoss` as asked, and what `Optimizer.step` raises.
    """
    optimizer.zero_grad()
    losses = Losses(normalization, pipeline.loss_ranks, pipeline.device, loss_parts)

    def loss_of(loss: Tensor, tokens: Tensor, parts: Sequence[Tensor] = ()) -> Tensor:
        loss = losses.add(loss, tokens, parts)
        return loss if expected_count is None else loss.float() * (optimizer.loss_scale / expected_count)

    pipeline.train(batches, forward_step, loss_of, num_micro_batches, optimizer.last_micro_batch, timers)
    with _measured(timers, "pipeline-wait"):  # for the stages that end later
        loss_sum = losses.total()
    if after_backward is not None:
        after_backward()
    with _measured(timers, "reduce-gradients"):
        optimizer.reduce_gradients(loss_sum.count / (expected_count or 1.0))
    in_fp16 = expected_count is not None
    # Perhaps one tensor rank alone has a loss that is not finite: by the norm all hear of it before any turns aside.
    loss_is_finite = not (check_loss or in_fp16) or math.isfinite(loss_sum.total)
    try:
        with _measured(timers, "optimizer-step"):
            result = optimizer.step(lr, loss_is_finite=loss_is_finite)
    except FloatingPointError:
        if check_loss and not in_fp16:
            losses.check()
        raise
    return Step(loss_sum, result.grad_norm, result.skipped)


def _measured(timers: Timers | None, name: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if timers is None else timers.measure(name)


def evaluate(
    pipeline: Pipeline,
    batches: Iterator[Batch],
    forward_step: ForwardStep,
    *,
    num_micro_batches: int,
    global_batches: int,
    normalization: str,
    loss_parts: Sequence[str] = (),
) -> LossSum:
    """The loss over so many global batches of all replicas, without dropout; weights and generators stay as they are.

    `num_micro_batches` are those of one global batch on this replica. Equal on all ranks.
    """
    losses = Losses(normalization, pipeline.loss_ranks, pipeline.device, loss_parts)
    for _ in range(global_batches):
        pipeline.evaluate(batches, forward_step, losses.add, num_micro_batches)
    return losses.total()
