"""Where a rank's part of a parameter lies in the whole, and the Megatron-LM attributes that mirror it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megatron.mpu.initialize import get_tensor_model_parallel_rank


@dataclass(frozen=True)
class Piece:
    """A rectangle of a global tensor that this rank holds."""

    local: tuple[slice, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def region(self) -> tuple[slice, ...]:
        """The same rectangle as slices of the global tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class Sharding:
    """Which part of a global tensor a rank's parameter is.

    Attributes:
        name: of the parameter, in its module or (from `parameter_shardings`) in the model.
        global_shape: of the whole, without the padding rows of a vocabulary.
        split_dim: the dimension that is cut over the ranks; None where every rank holds the whole.
        offset: where this rank's part (its first chunk, with a stride) begins along `split_dim`.
        stride: the whole is cut into `stride * partitions` chunks; a rank has `stride` of them, `partitions` apart.
        partitions: number of ranks that the tensor is cut over.
        partial_gradient: of a parameter that is not cut: it works on each rank's shard of the sequence, so that the
            gradients of the ranks are terms of a sum; else they are equal.
    """

    name: str
    global_shape: tuple[int, ...]
    split_dim: int | None
    offset: int
    stride: int = 1
    partitions: int = 1
    partial_gradient: bool = False

    def pieces(self, local_shape: tuple[int, ...]) -> list[Piece]:
        """The rectangles of the global tensor that a local tensor of `local_shape` holds.

        They are clipped to `global_shape`: rows that pad a vocabulary are in no piece, and a rank that has only such
        rows gets an empty list.
        """
        if self.split_dim is None:
            assert tuple(local_shape) == self.global_shape, f"{self.name}: {tuple(local_shape)} is not the whole"
            return [self._piece(0, 0, 0, self.global_shape)]
        chunks = 1 if self.partitions == 1 else self.stride  # chunks of one rank alone lie side by side
        length = local_shape[self.split_dim] // chunks
        found = []
        for j in range(chunks):
            start = self.offset + j * self.partitions * length
            size = min(length, self.global_shape[self.split_dim] - start)
            if size > 0:
                shape = list(local_shape)
                shape[self.split_dim] = size
                found.append(self._piece(self.split_dim, j * length, start, tuple(shape)))
        return found

    @staticmethod
    def _piece(dim: int, local_start: int, start: int, shape: tuple[int, ...]) -> Piece:
        local = [slice(0, size) for size in shape]
        offset = [0] * len(shape)
        if shape:
            local[dim] = slice(local_start, local_start + shape[dim])
            offset[dim] = start
        return Piece(tuple(local), tuple(offset), shape)


def parameter_shardings(model: nn.Module) -> dict[str, Sharding]:
    """The sharding of every parameter of `model` by its full name, in the model's order.

    The owning module says it in its `sharding` attribute (parameter name -> `Sharding`); what no module describes is
    replicated. A tied parameter appears once, under the name that `named_parameters` gives it.
    """
    described: dict[int, Sharding] = {}
    for module in model.modules():
        for name, sharding in getattr(module, "sharding", {}).items():
            parameter = getattr(module, name, None)
            if parameter is not None:
                described[id(parameter)] = sharding
    return {
        name: replace(described.get(id(parameter)) or replicated(name, parameter), name=name)
        for name, parameter in model.named_parameters()
    }


def replicated(name: str, parameter: torch.Tensor, partial_gradient: bool = False) -> Sharding:
    """The sharding of a parameter that every tensor rank holds whole; `partial_gradient` as in `Sharding`."""
    return Sharding(name, tuple(parameter.shape), None, 0, partial_gradient=partial_gradient)


def mirror_attributes(model: nn.Module) -> None:
    """Set Megatron-LM's attributes on every parameter again, from the shardings.

    They are lost in `to_empty`, `copy.deepcopy` and `load_state_dict(assign=True)`.
    """
    shardings = parameter_shardings(model)
    for name, parameter in model.named_parameters():
        sharding = shardings[name]
        split = sharding.split_dim
        set_tensor_model_parallel_attributes(
            parameter, split is not None, -1 if split is None else split, sharding.stride
        )


_DEFAULTS: dict[str, Any] = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def set_tensor_model_parallel_attributes(tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark `tensor` as one rank's part (or not), cut along `dim`, with that stride."""
    for name, value in zip(_DEFAULTS, (is_parallel, dim, stride), strict=True):
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Mark `tensor` as replicated, where it bears no mark."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: torch.Tensor, source_tensor: torch.Tensor) -> None:
    """Give `destination_tensor` the marks that `source_tensor` bears."""
    for name in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor) -> bool:
    """Whether this rank is the one to count `param`: it is cut over the ranks, or this is tensor rank 0."""
    return bool(getattr(param, "tensor_model_parallel", False)) or get_tensor_model_parallel_rank() == 0
