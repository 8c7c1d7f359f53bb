"""One training iteration and one evaluation: forward and backward over micro-batches, the loss divided once."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from megatron.data import HOST_KEYS
from megatron.optimizer import Optimizer

Batch = dict[str, Tensor]

# (model, batch) -> (sum of the losses of the counted tokens, their number), both scalars.
ForwardStep = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class LossSum:
    """A sum of losses and the number that divides it: counted tokens, or micro-batches where each is a mean already."""

    total: float
    count: float

    @property
    def mean(self) -> float:
        """The loss; 0 where nothing was counted."""
        return self.total / self.count if self.count > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Step:
    """What one iteration gave: its loss, the norm of its gradients before clipping, and whether FP16 skipped it."""

    loss: LossSum
    grad_norm: float
    skipped: bool = False


class NonFiniteLoss(FloatingPointError):
    """The loss of a micro-batch is not finite.

    Attributes:
        data_rank: the data-parallel rank whose it is.
        micro_batch: its number among those of that rank in the iteration, from 0.
    """

    def __init__(self, data_rank: int, micro_batch: int) -> None:
        super().__init__(f"the loss of micro-batch {micro_batch} of data-parallel rank {data_rank} is not finite")
        self.data_rank = data_rank
        self.micro_batch = micro_batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`, but for what the host reads; the copy from pinned memory does not wait."""
    return {
        name: tensor if name in HOST_KEYS else tensor.to(device, non_blocking=True) for name, tensor in batch.items()
    }


def normalized(loss: Tensor, tokens: Tensor, normalization: str) -> tuple[Tensor, Tensor]:
    """The pair of a micro-batch as it enters the sums: itself for "tokens", (its mean, 1) for "microbatch"."""
    if normalization == "tokens":
        return loss, tokens
    return loss / tokens.where(tokens > 0, 1), torch.ones_like(tokens)


def scaled(loss: Tensor, factor: float) -> Tensor:
    """`loss` times `factor` in float32; a loss that is not finite gets gradients that are not finite either.

    Without that, an infinite loss of an impossible token could pass: the gradient of its cross entropy is finite.
    """
    return loss.float() * torch.where(loss.detach().isfinite(), factor, math.nan)


def sum_over_replicas(total: Tensor, count: Tensor, data_group: dist.ProcessGroup | None) -> LossSum:
    """Both numbers summed over the data-parallel replicas in float64, by one all-reduce of 16 bytes."""
    pair = torch.stack([total.double(), count.double()])
    if dist.is_initialized():
        dist.all_reduce(pair, group=data_group)
    return LossSum(*pair.tolist())


def check_losses(losses: Sequence[Tensor], data_group: dist.ProcessGroup | None) -> None:
    """Raise `NonFiniteLoss`, the same on all replicas, for the first of the micro-batches' `losses` that is not finite.

    One all-reduce of one integer over the data group: for when it is known that some loss is wrong.
    """
    rank, size = (dist.get_rank(data_group), dist.get_world_size(data_group)) if dist.is_initialized() else (0, 1)
    wrong = [k for k, loss in enumerate(losses) if not loss.isfinite()]
    first = torch.tensor(wrong[0] * size + rank if wrong else len(losses) * size, device=losses[0].device)
    if dist.is_initialized():
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=data_group)
    micro_batch, data_rank = divmod(int(first.item()), size)
    if micro_batch < len(losses):
        raise NonFiniteLoss(data_rank, micro_batch)


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[Batch],
    forward_step: ForwardStep,
    *,
    num_micro_batches: int,
    lr: float,
    normalization: str,
    data_group: dist.ProcessGroup | None,
    device: torch.device,
    expected_count: float | None = None,
    check_loss: bool = False,
) -> Step:
    """Run one iteration and change the weights.

    Gradients of the sums of losses are accumulated over the micro-batches, summed over the replicas, and divided once
    by what the whole global batch counted, so that neither micro-batch size nor layout changes them.

    Args:
        expected_count: about what the global batch will count, for FP16 alone: each loss is divided by it and
            multiplied by the loss scale before backward, and the division is put right afterwards, so that the loss
            scale is relative to a mean. None where there is no loss scale.
        check_loss: stop at a loss that is not finite; FP16 skips the step for it in any case.

    Raises `ValueError` where nothing was counted, `NonFiniteLoss` as asked, and what `Optimizer.step` raises.
    """
    model.train()
    optimizer.zero_grad()
    losses: list[Tensor] = []
    count = torch.zeros((), dtype=torch.float64, device=device)
    for k in range(num_micro_batches):
        loss, tokens = normalized(*forward_step(model, to_device(next(batches), device)), normalization)
        if k == num_micro_batches - 1:
            optimizer.last_micro_batch()
        (loss if expected_count is None else scaled(loss, optimizer.loss_scale / expected_count)).backward()
        losses.append(loss.detach().double())
        count = count + tokens
    loss_sum = sum_over_replicas(torch.stack(losses).sum(), count, data_group)
    if check_loss and expected_count is None and not math.isfinite(loss_sum.total):
        check_losses(losses, data_group)
    optimizer.reduce_gradients(loss_sum.count / (expected_count or 1.0))
    result = optimizer.step(lr)
    return Step(loss_sum, result.grad_norm, result.skipped)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterator[Batch],
    forward_step: ForwardStep,
    *,
    normalization: str,
    data_group: dist.ProcessGroup | None,
    device: torch.device,
) -> LossSum:
    """The loss over all `batches` of all replicas, without dropout; weights and generators stay as they are."""
    model.eval()
    total = count = torch.zeros((), dtype=torch.float64, device=device)
    for batch in batches:
        loss, tokens = normalized(*forward_step(model, to_device(batch, device)), normalization)
        total, count = total + loss, count + tokens
    model.train()
    return sum_over_replicas(total, count, data_group)
