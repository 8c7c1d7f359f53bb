"""The stages of a pipeline that one model holds, each called as if it were a model."""

import dataclasses
from typing import Any

from torch import nn

from megatron.base.stages import StagePart


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One stage of `model`, which has several perhaps; it holds nothing itself.

    Called with what the model's `forward` takes, and as `hidden` what the stage before has given unless it is the
    first, it gives hidden states for the stage behind it unless it is the last.

    Attributes:
        model: holds the layers and parameters of all stages of this rank.
        number: which of them it is, from 0 in the order of the model.
        part: what it has of the model.
    """

    model: nn.Module
    number: int
    part: StagePart

    @property
    def first(self) -> bool:
        """Whether it begins with token ids."""
        return self.part.embedding

    @property
    def last(self) -> bool:
        """Whether it ends with losses or logits."""
        return self.part.head

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The model's `forward` of this stage, the model's hooks included."""
        return self.model(*args, **named, chunk=self.number)
