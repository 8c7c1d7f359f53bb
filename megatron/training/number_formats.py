"""From a checkpoint in one number format into a run in another: where float32 weights are kept in each."""

from collections.abc import Mapping
from typing import Any

from megatron.checkpointing import Placed
from megatron.mpu.sharding import Sharding
from megatron.optimizer.placement import FlatSharding
from megatron.optimizer.state import OPTIMIZER_STATE
from megatron.optimizer.updates import MASTER_WEIGHT

_MASTER = f"{OPTIMIZER_STATE}{MASTER_WEIGHT}."


def has_weights_alone(wanted: Placed, stored: Mapping[str, Any]) -> bool:
    """Whether no state of an optimizer is `stored`, by name, although moments are `wanted`."""
    moments = [name for name in wanted if name.startswith(OPTIMIZER_STATE) and not name.startswith(_MASTER)]
    return bool(moments) and not any(name.startswith(OPTIMIZER_STATE) for name in stored)


def across_formats(wanted: Placed, stored: Mapping[str, Any]) -> Placed:
    """`wanted` under the names of what is `stored`: what a 16-bit run keeps as master weight is float32's weight.

    So master weights come from stored float32 weights, and float32 weights from stored master weights, bit for bit.
    The stored 16-bit weights, which are these rounded, are not read then; neither are 16-bit weights, which follow
    their master weights.
    """
    found = dict(wanted)
    for name, (tensor, place) in wanted.items():
        master = f"{_MASTER}{name}"
        if master in wanted and master not in stored:
            found[name] = found.pop(master)
        elif master in stored and master not in wanted:
            assert isinstance(place, Sharding), f"{name} is a weight"
            found[master] = (tensor, place)
            found[name] = (tensor.new_empty(0), FlatSharding(place, tuple(tensor.shape), 0, 0))
    return found
