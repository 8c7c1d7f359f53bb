"""Counts the bytes that are truly kept: follows every storage that is made, and sees which of them still live."""

import gc
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):
    """Context manager that follows the storages which operators make inside the block, forwards and backwards.

    A storage counts once, whole, however many tensors or views share it, and whoever holds it. What was there before
    (parameters, inputs) does not count. Nothing is kept alive by being counted.

    Attributes:
        most_kept: the most bytes that lived when a forward pass, a repeated one included, was over and the backward
            pass went on: before the first operator that ran with gradients disabled after one with gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, StorageWeakRef] = {}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._forward = False
        self.most_kept = 0

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def live_bytes(self) -> int:
        """Bytes of the storages made so far that somebody still holds."""
        gc.collect()
        return self._sum_up()

    def _sum_up(self) -> int:
        self._made = {key: value for key, value in self._made.items() if not value[0].expired()}
        return sum(size for _, size in self._made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look()
        for tensor in _tensors((args, kwargs)):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in self._made:
                self._before.setdefault(reference.cdata, reference)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in self._before:
                self._made[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
        return result

    def _look(self) -> None:
        if self._forward and not torch.is_grad_enabled():
            self.most_kept = max(self.most_kept, self._sum_up())
        self._forward = torch.is_grad_enabled()


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))
