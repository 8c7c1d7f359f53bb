"""Gradients on their way: from autograd into the buckets, and summed over data ranks while backward goes on."""

import functools
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable

from megatron.mpu.collectives import Pending, all_reduce
from megatron.mpu.initialize import GroupInfo
from megatron.optimizer.buckets import Bucket, main_gradient

_logger = logging.getLogger(__name__)


class GradientReducer:
    """Collects gradients in buckets over the micro-batches of an iteration and sums them over the data ranks.

    Autograd's gradient is added to `main_grad` as soon as it is complete for one backward pass, and `grad` is None
    again: a parameter that is used twice (tied) is counted once with both contributions, one that is not used stays
    zero. A layer may also add to `main_grad` itself and give None to autograd.

    Args:
        buckets: in the order in which backward completes them.
        speaks: whether this rank is the one that says which parameters got no gradient.
    """

    def __init__(self, buckets: Sequence[Bucket], speaks: bool = True) -> None:
        self._buckets = buckets
        self._speaks = speaks
        self._seen: set[str] = set()
        self._missing: list[set[str]] | None = None  # by bucket: what the last backward pass has not completed yet
        self._is_at_work = False  # whether that backward pass has given a gradient already
        self._pending: list[Pending] = []  # of the first buckets: the reductions under way
        for number, bucket in enumerate(buckets):
            for name, parameter in bucket.parameters.items():
                parameter.register_post_accumulate_grad_hook(functools.partial(self._take, number, name))

    def zero(self) -> None:
        """Start an iteration: all gradients are zero."""
        self._wait()
        self._seen.clear()
        for bucket in self._buckets:
            bucket.gradients.zero_()

    def overlap(self) -> None:
        """Reduce each bucket during the backward pass that comes, the last one before `finish`.

        A bucket's collective begins once its gradients are complete and those of the buckets before it have begun, so
        that their order is the same on all ranks. Those that are left begin when the backward pass ends, before any
        other collective of the caller.
        """
        self._missing = [set(bucket.parameters) for bucket in self._buckets]

    def finish(self) -> None:
        """Begin the reductions that have not begun yet, and wait for all."""
        self._start_rest()
        if self._missing is not None:
            self._say_unused()
        self._wait()

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        self._missing = None
        self._is_at_work = False

    def _take(self, number: int, name: str, parameter: Tensor) -> None:
        """Move the gradient that autograd has just completed into `main_grad`, and count it."""
        if parameter.grad is not None:
            main_gradient(parameter).add_(parameter.grad)
            parameter.grad = None
        self._seen.add(name)
        if self._missing is not None:
            self._count(self._missing, number, name)

    def _count(self, missing: list[set[str]], number: int, name: str) -> None:
        if name not in missing[number]:
            raise RuntimeError(
                f"{name} got a gradient after those of the backward pass that last_micro_batch() announced, when their "
                "sums over the data ranks have begun: call it before the last pass of an iteration only"
            )
        if not self._is_at_work:
            self._is_at_work = True
            Variable._execution_engine.queue_callback(self._start_rest)
        missing[number].remove(name)
        while len(self._pending) < len(missing) and not missing[len(self._pending)]:
            self._pending.append(self._buckets[len(self._pending)].start_reduction())

    def _start_rest(self) -> None:
        """Begin the reductions that have not begun yet; a gradient that comes later comes too late."""
        for bucket in self._buckets[len(self._pending) :]:
            self._pending.append(bucket.start_reduction())
        for missing in self._missing or ():
            missing.clear()

    def _say_unused(self) -> None:
        unused = [name for bucket in self._buckets for name in bucket.parameters if name not in self._seen]
        if unused and self._speaks:
            self._speaks = False
            _logger.warning(
                "no gradient came for %s: the buckets that hold such a parameter, and those after them, are reduced "
                "at the end of the backward pass, not during it",
                ", ".join(unused),
            )


def sum_over_group(parts: Iterable[Tensor], group: GroupInfo) -> None:
    """Sum each of `parts` (1-D) over the ranks of `group`, in place. One all-reduce for each dtype and device."""
    if group.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for part in parts:
        kinds.setdefault((part.dtype, part.device), []).append(part)
    for same in kinds.values():
        packed = all_reduce(torch.cat(same), group)
        for part, total in zip(same, packed.split([len(part) for part in same]), strict=True):
            part.copy_(total)
