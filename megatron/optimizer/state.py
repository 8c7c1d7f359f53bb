"""The optimizer's tensors as a checkpoint sees them: by name, each with its place in the global tensor."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron.mpu.sharding import Sharding
from megatron.optimizer.buckets import Bucket
from megatron.optimizer.placement import FlatSharding
from megatron.optimizer.segments import Range
from megatron.optimizer.updates import BucketUpdate, main_dtype

# How the names of all that an optimizer keeps begin; no parameter's name does.
OPTIMIZER_STATE = "optimizer."

PlacedState = dict[str, tuple[Tensor, Sharding | FlatSharding]]


def state_tensors(
    updates: Sequence[BucketUpdate], parameters: Mapping[str, nn.Parameter], shardings: Mapping[str, Sharding]
) -> PlacedState:
    """What `updates` keep of `parameters`, as `optimizer.KIND.PARAMETER`, in their order.

    A tensor has its parameter's shape; where a bucket is sharded it is the 1-D range of the parameter that this rank
    holds, without elements where it holds nothing of it, so that all ranks know all names.
    """
    found: dict[str, PlacedState] = {name: {} for name in parameters}
    for update in updates:
        for kind, tensors in update.state.items():
            held = dict(zip([segment.name for segment in update.segments], tensors, strict=True))
            parts = {segment.name: segment.part for segment in update.segments}
            for slot in update.bucket.layout.slots:
                if slot.name not in parameters:
                    continue
                name, part = f"{OPTIMIZER_STATE}{kind}.{slot.name}", parts.get(slot.name, Range(0, 0))
                tensor = held[slot.name] if part.size else torch.empty(0, dtype=update.dtype)
                sharding = dataclasses.replace(shardings[slot.name], name=name)
                shape = tuple(parameters[slot.name].shape)
                found[slot.name][name] = _placed(tensor, sharding, shape, part, update.bucket.sharded)
    return {name: placed for of_one in found.values() for name, placed in of_one.items()}


def placed_gradients(buckets: Sequence[Bucket], shardings: Mapping[str, Sharding], factor: float) -> PlacedState:
    """The gradients in `buckets` times `factor`, by parameter: copies in the master weights' dtype.

    They have the shapes that `state_tensors` gives to the state.
    """
    found: PlacedState = {}
    for bucket in buckets:
        held = {segment.name: segment for segment in bucket.layout.segments(bucket.held)}
        for slot in bucket.layout.slots:
            segment = held.get(slot.name)
            place, part = (Range(0, 0), Range(0, 0)) if segment is None else (segment.range, segment.part)
            gradient = bucket.gradients[place.slice]
            shape = tuple(bucket.parameters[slot.name].shape)
            tensor = gradient.to(main_dtype(gradient.dtype)) * factor
            found[slot.name] = _placed(tensor, shardings[slot.name], shape, part, bucket.sharded)
    return found


def _placed(
    tensor: Tensor, sharding: Sharding, shape: tuple[int, ...], part: Range, sharded: bool
) -> tuple[Tensor, Sharding | FlatSharding]:
    if sharded:
        return tensor, FlatSharding(sharding, shape, part.begin, part.end)
    return tensor.view(shape), sharding
