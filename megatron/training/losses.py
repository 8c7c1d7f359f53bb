"""Losses of micro-batches: summed over an iteration and all replicas, known on every stage, divided once."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from torch import distributed as dist

from megatron.mpu import SERIAL_GROUP, all_reduce
from megatron.mpu.initialize import GroupInfo


@dataclasses.dataclass(frozen=True)
class LossSum:
    """A sum of losses and the number that divides it: counted tokens, or micro-batches where each is a mean already.

    `parts` are the sums of the losses that it is made of, where it is made of several, by name.
    """

    total: float
    count: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def mean(self) -> float:
        """The loss; 0 where nothing was counted."""
        return self.total / self.count if self.count > 0 else 0.0

    def means(self) -> dict[str, float]:
        """The loss and those that it is made of, by name."""
        return {"loss": self.mean} | {name: LossSum(part, self.count).mean for name, part in self.parts.items()}

    def __add__(self, other: Self) -> "LossSum":
        parts = {name: part + other.parts[name] for name, part in self.parts.items()}
        return LossSum(self.total + other.total, self.count + other.count, parts)


class NonFiniteLoss(FloatingPointError):
    """The loss of a micro-batch is not finite.

    Attributes:
        rank: the rank whose it is.
        micro_batch: its number among those of that rank in the iteration, from 0.
    """

    def __init__(self, rank: int, micro_batch: int) -> None:
        super().__init__(f"the loss of micro-batch {micro_batch} of rank {rank} is not finite")
        self.rank = rank
        self.micro_batch = micro_batch


def normalized(loss: Tensor, tokens: Tensor, normalization: str) -> tuple[Tensor, Tensor]:
    """The pair of a micro-batch as it enters the sums: itself for "tokens", (its mean, 1) for "microbatch"."""
    if normalization == "tokens":
        return loss, tokens
    return loss / tokens.where(tokens > 0, 1), torch.ones_like(tokens)


@dataclasses.dataclass(frozen=True)
class LossRanks:
    """The ranks that have losses, those of the last stage of `pipeline`, one of each replica in `data`.

    Tensor ranks have a pipeline and replicas each; `everyone` is all of them.
    """

    data: GroupInfo = SERIAL_GROUP
    pipeline: GroupInfo = SERIAL_GROUP
    everyone: GroupInfo = SERIAL_GROUP

    @property
    def last(self) -> bool:
        """Whether this rank is of the last stage."""
        return self.pipeline.rank == self.pipeline.size - 1

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over all replicas, in place, equal on all stages; those of earlier stages must be zero.

        One all-reduce over the data group on the last stage, then one over the pipeline; none over a single rank.
        """
        for group in ([self.data] if self.last else []) + [self.pipeline]:
            all_reduce(values, group)
        return values


class Losses:
    """What the micro-batches of an iteration have lost and counted; nothing on stages before the last.

    Args:
        parts: names of the losses that the loss is made of, whose values `add` is given; known on all stages.
    """

    def __init__(self, normalization: str, ranks: LossRanks, device: torch.device, parts: Sequence[str] = ()) -> None:
        self._names = tuple(parts)
        self._parts = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        self._normalization = normalization
        self._ranks = ranks
        self._count = torch.zeros((), dtype=torch.float64, device=device)
        self._losses: list[Tensor] = []

    def add(self, loss: Tensor, tokens: Tensor, parts: Sequence[Tensor] = ()) -> Tensor:
        """Count what the next micro-batch gave; returns its loss as it enters the sum."""
        for number, part in enumerate(parts):
            self._parts[number] += normalized(part.detach(), tokens, self._normalization)[0]
        loss, tokens = normalized(loss, tokens, self._normalization)
        self._losses.append(loss.detach().double())
        self._count = self._count + tokens
        return loss

    def total(self) -> LossSum:
        """All sums over all replicas, in float64, equal on all stages; of tensor ranks each has its own.

        Collectives of 16 bytes, and 8 for each part: `LossRanks.sum`.
        """
        total = torch.stack(self._losses).sum() if self._losses else torch.zeros_like(self._count)
        sums = torch.cat([torch.stack([total, self._count.double()]), self._parts])
        loss, count, *parts = self._ranks.sum(sums).tolist()
        return LossSum(loss, count, dict(zip(self._names, parts, strict=True)))

    def check(self) -> None:
        """Raise `NonFiniteLoss`, the same on all ranks, for the first micro-batch whose loss is not finite, if any is.

        One all-reduce of an integer over everyone: for when all ranks know that something is wrong.
        """
        everyone, none = self._ranks.everyone, torch.iinfo(torch.int64).max
        wrong = [k * everyone.size + everyone.rank for k, loss in enumerate(self._losses) if not loss.isfinite()]
        first = torch.tensor(min(wrong, default=none), device=self._count.device)
        found = int(all_reduce(first, everyone, dist.ReduceOp.MIN).item())
        if found < none:
            micro_batch, rank = divmod(found, everyone.size)
            raise NonFiniteLoss(rank, micro_batch)
