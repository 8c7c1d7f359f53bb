"""The optimizer's tensors as a checkpoint sees them: by name, each with its place in the global tensor."""

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from megatron.mpu.sharding import Sharding
from megatron.optimizer.placement import FlatSharding
from megatron.optimizer.segments import Segment
from megatron.optimizer.updates import BucketUpdate

PlacedState = dict[str, tuple[Tensor, Sharding | FlatSharding]]


def state_tensors(
    updates: Sequence[BucketUpdate], parameters: Mapping[str, nn.Parameter], shardings: Mapping[str, Sharding]
) -> PlacedState:
    """What `updates` keep, as `optimizer.KIND.PARAMETER`, in the order of `parameters`.

    A tensor has its parameter's shape; where a bucket is sharded it is the 1-D range of the parameter that this rank
    holds, and parameters that it holds nothing of are left out.
    """
    found: dict[str, PlacedState] = {name: {} for name in parameters}
    for update in updates:
        for kind, tensors in update.state.items():
            for segment, tensor in zip(update.segments, tensors, strict=True):
                name = f"optimizer.{kind}.{segment.name}"
                sharding = dataclasses.replace(shardings[segment.name], name=name)
                shape = tuple(parameters[segment.name].shape)
                found[segment.name][name] = _placed(tensor, sharding, shape, segment, update.bucket.sharded)
    return {name: placed for of_one in found.values() for name, placed in of_one.items()}


def _placed(
    tensor: Tensor, sharding: Sharding, shape: tuple[int, ...], segment: Segment, sharded: bool
) -> tuple[Tensor, Sharding | FlatSharding]:
    if sharded:
        return tensor, FlatSharding(sharding, shape, segment.part.begin, segment.part.end)
    return tensor.view(shape), sharding
