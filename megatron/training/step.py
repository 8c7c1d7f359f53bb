"""One training iteration and one evaluation: forward and backward over micro-batches, the loss divided once."""

import dataclasses
from collections.abc import Callable, Iterator

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
    """What one iteration gave: its loss and the norm of its gradients before clipping."""

    loss: LossSum
    grad_norm: float


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


def sum_over_replicas(total: Tensor, count: Tensor, data_group: dist.ProcessGroup | None) -> LossSum:
    """Both numbers summed over the data-parallel replicas in float64, by one all-reduce of 16 bytes."""
    pair = torch.stack([total.double(), count.double()])
    if dist.is_initialized():
        dist.all_reduce(pair, group=data_group)
    return LossSum(*pair.tolist())


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
) -> Step:
    """Run one iteration and change the weights.

    Gradients of the sums of losses are accumulated over the micro-batches, summed over the replicas, and divided once
    by what the whole global batch counted, so that neither micro-batch size nor layout changes them. Raises
    `ValueError` where it counted nothing.
    """
    model.train()
    optimizer.zero_grad()
    total = count = torch.zeros((), dtype=torch.float64, device=device)
    for _ in range(num_micro_batches):
        loss, tokens = normalized(*forward_step(model, to_device(next(batches), device)), normalization)
        loss.backward()
        total, count = total + loss.detach(), count + tokens
    loss_sum = sum_over_replicas(total, count, data_group)
    optimizer.reduce_gradients(loss_sum.count)
    return Step(loss_sum, optimizer.step(lr).grad_norm)


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
