"""The step itself, bucket by bucket: master weights and optimizer state of what this rank updates."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.optimizer.adam import make_updater
from megatron.optimizer.buckets import Bucket
from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.segments import Segment

MASTER_WEIGHT = "master_weight"


class BucketUpdate:
    """Moves the elements of one bucket that this rank holds.

    Where parameters have 16 bits their float32 master weights are kept here, and the parameters are their copies;
    elsewhere the parameters themselves are moved.

    Attributes:
        bucket: whose weights are changed.
        segments: the parts of parameters held, those that are decayed first.
        state: by name ("exp_avg", ..., "master_weight"), a 1-D tensor for each of `segments`; a load may fill them.

    Args:
        bucket: the bucket.
        is_decayed: whether weight decay draws a parameter, by its name.
        config: which optimizer, and its constants.
    """

    def __init__(self, bucket: Bucket, is_decayed: Callable[[str], bool], config: OptimizerConfig) -> None:
        self.bucket = bucket
        held = bucket.layout.segments(bucket.held)
        decayed = [segment for segment in held if is_decayed(segment.name)]
        not_decayed = [segment for segment in held if not is_decayed(segment.name)]
        self.segments = decayed + not_decayed
        self._weights = bucket.weights[bucket.held.slice]
        self._main = self._weights.to(main_dtype(self._weights.dtype))  # the same tensor where it is wide enough
        self._updater = make_updater(self._parts(self._main, decayed), self._parts(self._main, not_decayed), config)
        self.state = dict(self._updater.state)
        if self.has_masters:
            self.state[MASTER_WEIGHT] = self._updater.parameters

    @property
    def dtype(self) -> torch.dtype:
        """Of everything in `state`."""
        return self._main.dtype

    @property
    def has_masters(self) -> bool:
        """Whether there are master weights apart from the parameters."""
        return self._main is not self._weights

    def _parts(self, flat: Tensor, segments: list[Segment]) -> list[Tensor]:
        """Views of a tensor of all elements held."""
        return [flat[segment.range.relative_to(self.bucket.held.begin).slice] for segment in segments]

    def step(self, lr: float, factor: float) -> None:
        """Take one step with the gradients times `factor`.

        Gradients of the master weights' dtype are multiplied in place; narrower ones are copied first.
        """
        gradients = self.bucket.gradients[self.bucket.held.slice].to(self._main.dtype)
        if factor != 1.0:
            gradients.mul_(factor)
        self._updater.step(lr, self._parts(gradients, self.segments))
        self.weights_from_masters()

    def weights_from_masters(self) -> None:
        """Round the master weights to the parameters held."""
        if self.has_masters:
            self._weights.copy_(self._main)

    def masters_from_weights(self) -> None:
        """Take the parameters as master weights."""
        if self.has_masters:
            self._main.copy_(self._weights)

    def set_step_count(self, steps: int) -> None:
        """Go on as after `steps` steps."""
        self._updater.set_step_count(steps)


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the master weights and moments of parameters of `dtype`: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)
