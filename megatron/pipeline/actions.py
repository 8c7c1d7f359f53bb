"""The plain data of pipeline parallelism: what a rank does, what it exchanges, and who does what in which order.

Letters: `p` pipeline size, `v` virtual size (model chunks of a rank), `m` micro-batches. The model is cut into `p v`
stages; stage `s` is chunk `s // p` of pipeline rank `s % p`, so that activations go round the ranks `v` times.
"""

import dataclasses
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward"]
Payload = Literal["activation", "gradient"]


class Action(NamedTuple):
    """The forward or backward pass of one micro-batch through one of the rank's chunks."""

    kind: Kind
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} in chunk {self.chunk}"


class Message(NamedTuple):
    """A boundary tensor on its way: an activation to the next stage, or its gradient back to the one before.

    `source` and `destination` are pipeline ranks, each with the chunk on its side. Equal on both of them, and no two of
    a schedule are alike, so that it can be the key of its tensor.
    """

    payload: Payload
    micro_batch: int
    source: int
    source_chunk: int
    destination: int
    destination_chunk: int

    def __str__(self) -> str:
        places = f"chunk {self.source_chunk} of rank {self.source} to chunk {self.destination_chunk} of rank"
        return f"{self.payload} of micro-batch {self.micro_batch} from {places} {self.destination}"


class Exchange(NamedTuple):
    """What one rank sends and receives at one time: to be started together, as one batch."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


# What one rank does from the start of an iteration to its end, in order.
Program = list[Action | Exchange]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """For each pipeline rank its actions in order; made by `schedules.py`, or by hand.

    With `forward_only` there is no backward pass (evaluation). Making one checks nothing: `validate.py` does.
    """

    pipeline_size: int
    virtual_size: int
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    forward_only: bool = False
