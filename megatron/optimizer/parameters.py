"""Updated parameters on their way back: gathered from the data ranks while the next forward pass begins."""

import functools
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from megatron.mpu.collectives import Pending
from megatron.optimizer.buckets import Bucket


class ParameterGatherer:
    """Gathers buckets after a step; modules wait, before their forward, for the parameters that they have.

    Parameters of `shared` buckets may be read by modules that do not have them (a tied embedding), so every module
    waits for these. A module that was not called between two steps, in training mode and with gradients, may have its
    parameters read in another way: its buckets are awaited at once. Calls of an evaluation say nothing about how
    training reads them. Who reads another module's parameters before that is called must wait for all.

    Args:
        model: gets forward pre-hooks.
        buckets: in the order of backward; forward needs the last ones first.
        shared: names of parameters.
        overlap: False where whoever starts to gather waits for all at once, and no module needs to.
    """

    def __init__(
        self, model: nn.Module, buckets: Sequence[Bucket], shared: Collection[str], *, overlap: bool = True
    ) -> None:
        self._buckets = buckets
        self._pending: dict[int, Pending] = {}
        self._shared = {i for i, bucket in enumerate(buckets) if not bucket.parameters.keys().isdisjoint(shared)}
        places = {id(p): i for i, bucket in enumerate(buckets) for p in bucket.parameters.values()}
        self._needs: list[set[int]] = []  # by module
        for module in model.modules() if overlap else ():
            module.register_forward_pre_hook(functools.partial(_before, weakref.ref(self), len(self._needs)))
            self._needs.append({places[id(p)] for p in module.parameters(recurse=False) if id(p) in places})
        self._called: set[int] = set()  # to train, since the last step
        # Once it is gone nobody else would wait for what is under way.
        weakref.finalize(self, _wait_for, self._pending).atexit = False

    def start(self, number: int) -> None:
        """Begin to gather bucket `number`."""
        self._pending[number] = self._buckets[number].start_gathering()

    def started_all(self) -> None:
        """Wait for what no module may wait for in time."""
        for module, needs in enumerate(self._needs):
            if module not in self._called:
                _wait_for(self._pending, needs)
        self._called.clear()

    def wait(self) -> None:
        """Wait for all buckets."""
        _wait_for(self._pending)

    def before(self, number: int, module: nn.Module) -> None:
        """Wait for what module `number` needs, for it is about to be called."""
        if module.training and torch.is_grad_enabled():
            self._called.add(number)
        if self._pending:
            _wait_for(self._pending, self._needs[number] | self._shared)


def _before(gatherer: "weakref.ref[ParameterGatherer]", number: int, module: nn.Module, args: Any) -> None:
    """The hook of a module. It does not keep the gatherer, which keeps the buckets, longer than its optimizer does."""
    owner = gatherer()
    if owner is not None:
        owner.before(number, module)


def _wait_for(pending: dict[int, Pending], buckets: Collection[int] | None = None) -> None:
    """Wait for some buckets of those `pending`, or for all."""
    for number in pending.keys() & (pending.keys() if buckets is None else set(buckets)):
        pending.pop(number).wait()
