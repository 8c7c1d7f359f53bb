"""Gradients on their way: from autograd into the buckets, and summed over data ranks while backward goes on."""

import functools
import logging
import weakref
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable

from megatron.mpu.collectives import Pending, all_reduce
from megatron.mpu.initialize import SERIAL_GROUP, GroupInfo
from megatron.optimizer.buckets import Bucket, main_gradient

_logger = logging.getLogger(__name__)


class GradientReducer:
    """Collects gradients in buckets over the micro-batches of an iteration and sums them over the data ranks.

    Autograd's gradient is added to `main_grad` as soon as it is complete for one backward pass, and `grad` is None
    again: a parameter that is used twice (tied) is counted once with both contributions, one that is not used stays
    zero. A layer may also add to `main_grad` itself and give None to autograd.

    Args:
        buckets: in the order in which backward completes them, which is that of their collectives on every data rank.
        tied: names of parameters that other stages may have copies of. Their buckets come last, in `finish`, and are
            then summed over `copies`.
        copies: the ranks that have those copies.
        speaks: whether this rank is the one that says which parameters got no gradient.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        tied: Collection[str] = (),
        copies: GroupInfo = SERIAL_GROUP,
        speaks: bool = True,
    ) -> None:
        self._all = buckets
        self._tied = [bucket for bucket in buckets if not bucket.parameters.keys().isdisjoint(tied)]
        self._ordered = [bucket for bucket in buckets if bucket not in self._tied]
        self._copies = copies
        self._speaks = speaks
        self._seen: set[str] = set()
        # By number of the bucket: what the backward pass that was announced for it has not completed yet.
        self._missing: dict[int, set[str]] = {}
        self._is_at_work = False  # whether an announced backward pass is going on and has given a gradient
        self._pending: list[Pending] = []  # the reductions under way: of the first buckets in order
        numbers = {name: number for number, bucket in enumerate(self._ordered) for name in bucket.parameters}
        for bucket in buckets:
            for name, parameter in bucket.parameters.items():
                hook = functools.partial(_take_by, weakref.ref(self), numbers.get(name), name)
                parameter.register_post_accumulate_grad_hook(hook)

    def zero(self) -> None:
        """Start an iteration: all gradients are zero."""
        self._wait()
        self._seen.clear()
        for bucket in self._all:
            bucket.gradients.zero_()

    def overlap(self, names: Collection[str] | None = None) -> None:
        """Reduce buckets during the backward pass that comes, the last one before `finish` for the parameters `names`.

        A bucket's collective begins once its gradients are complete and those of the buckets before it have begun, so
        that their order is the same on all ranks, whatever the order in which they announce and complete theirs. Those
        that are left begin when the backward pass ends, before any other collective of the caller.

        Raises ValueError where `names` has a part of a bucket only, RuntimeError where its sum has begun.
        """
        wanted = None if names is None else frozenset(names)
        for number, bucket in enumerate(self._ordered):
            named = [name for name in bucket.parameters if wanted is None or name in wanted]
            if not named:
                continue
            if len(named) < len(bucket.parameters):
                other = next(name for name in bucket.parameters if name not in named)
                raise ValueError(
                    f"{named[0]} is said to have its last backward pass without {other}, with which it shares a bucket:"
                    " give the optimizer the parts of the model that run apart"
                )
            if number < len(self._pending):
                raise _too_late(named[0])
            self._missing[number] = set(named)

    def finish(self) -> None:
        """Begin the reductions that have not begun yet, those of tied parameters last, and wait for all.

        Then one all-reduce over the copies for each bucket of tied parameters: of what this rank holds, which is the
        same part in each copy. A sum of two is the same on both; the other way round, data groups that add in another
        order would let the copies drift apart.
        """
        for bucket in self._ordered[len(self._pending) :]:
            self._pending.append(bucket.start_reduction())
        self._pending += [bucket.start_reduction() for bucket in self._tied]
        if self._missing:
            self._say_unused()
        self._wait()
        for bucket in self._tied:
            all_reduce(bucket.gradients[bucket.held.slice], self._copies)

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        self._missing.clear()
        self._is_at_work = False

    def _take(self, number: int | None, name: str, parameter: Tensor) -> None:
        """Move the gradient that autograd has just completed into `main_grad`, and count it."""
        if parameter.grad is not None:
            main_gradient(parameter).add_(parameter.grad)
            parameter.grad = None
        self._seen.add(name)
        if number is not None and number in self._missing:
            self._count(self._missing[number], name)

    def _count(self, missing: set[str], name: str) -> None:
        if name not in missing:
            raise _too_late(name)
        if not self._is_at_work:
            self._is_at_work = True
            Variable._execution_engine.queue_callback(self._end_of_pass)
        missing.remove(name)
        self._start_complete()

    def _start_complete(self) -> None:
        """Begin the reductions of complete buckets, up to the first that is not."""
        while self._missing.get(len(self._pending)) == set():
            self._pending.append(self._ordered[len(self._pending)].start_reduction())

    def _end_of_pass(self) -> None:
        """What the announced pass has not completed, it has not used; a gradient that comes later comes too late."""
        self._is_at_work = False
        for missing in self._missing.values():
            missing.clear()
        self._start_complete()

    def _say_unused(self) -> None:
        unused = [name for bucket in self._all for name in bucket.parameters if name not in self._seen]
        if unused and self._speaks:
            self._speaks = False
            _logger.warning(
                "no gradient came for %s: the buckets that hold such a parameter, and those after them, are reduced "
                "at the end of the backward pass, not during it",
                ", ".join(unused),
            )


def _take_by(reducer: "weakref.ref[GradientReducer]", number: int | None, name: str, parameter: Tensor) -> None:
    """The hook of a parameter. It does not keep the reducer, which keeps the parameter: neither would ever be freed."""
    owner = reducer()
    if owner is not None:
        owner._take(number, name, parameter)


def _too_late(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} has a backward pass after the one that last_micro_batch() announced, when its sum over the data ranks "
        "has begun: call it before the last pass of an iteration only, and checkpoint activations with "
        "use_reentrant=False, for with True each checkpoint has a backward pass of its own"
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
