"""Who sends what to whom and when: from the actions of all ranks to the program that each rank runs.

A rank's program is its actions and its exchanges, sorted by their time on one clock: that of the schedule run as soon
as possible with a backward pass twice as long as a forward pass. A message has one time, the end of the pass that
makes it. At each such time a rank does one `Exchange`: it sends what it has just made and receives what others have
made at the same time. So

- there is one order of all events, and each rank's program is the part of it that concerns that rank: nobody waits in
  a circle, even if every instruction is run to its end before the next begins, and however long passes really take;
- sends and receives of two ranks have the same order, which is how NCCL, blind to tags, tells messages apart (with two
  stages and virtual chunks a rank has one neighbour on both sides, and needs this most);
- what is ready while a rank computes is received before that pass in its program, so that the transfer runs behind it,
  but nothing is received so early that something which is ready sooner would have to wait behind it;
- a rank makes one output at a time, so an exchange has at most one send, and of each peer at most one message each way.

How to run a program, on any backend that keeps the order of each pair of ranks:

- an `Action`: wait for its input, the message `input_of(...)` (None: the data loader's tokens, or the loss), compute,
  and keep its output under the message `output_of(...)` (None: the loss, or the gradient of the embedding);
- an `Exchange`: start all its sends and receives together (`batch_isend_irecv`) and go on without waiting. A receive
  needs a buffer, which the input of a later action takes over; a send needs its tensor until it is done.
- at the end wait for all that is under way.

Exchanges may be run one after another, each starting when the one before is done (one NCCL stream does this), and may
be waited for as a whole (the works of one batch are one work on NCCL).
"""

from collections.abc import Iterable
from operator import itemgetter

from megatron.pipeline.actions import Action, Exchange, Kind, Message, Payload, Program, Schedule
from megatron.pipeline.simulate import Time, simulate


def input_of(p: int, v: int, rank: int, action: Action) -> Message | None:
    """What must have been received before `rank` runs `action`; None where the action begins on this rank.

    The forward pass of the first stage begins with data, the backward pass of the last stage with the loss.
    """
    stage = action.chunk * p + rank
    return _message(p, v, action.kind, action.micro_batch, stage - 1 if action.kind == "forward" else stage + 1)


def output_of(p: int, v: int, rank: int, action: Action) -> Message | None:
    """What is to be sent after `rank` has run `action`; None where nothing is.

    The forward pass of the last stage ends in the loss, the backward pass of the first stage in the embedding.
    """
    return _message(p, v, action.kind, action.micro_batch, action.chunk * p + rank)


def _message(p: int, v: int, kind: Kind, micro_batch: int, stage: int) -> Message | None:
    """What the pass of `kind` through `stage` hands on; None where there is no such stage, or none to hand it to."""
    to = stage + 1 if kind == "forward" else stage - 1
    if min(stage, to) < 0 or max(stage, to) >= p * v:
        return None
    payload: Payload = "activation" if kind == "forward" else "gradient"
    return Message(payload, micro_batch, stage % p, stage // p, to % p, to // p)


def programs(schedule: Schedule, ranks: Iterable[int] | None = None) -> list[Program]:
    """The programs of `ranks` (all of them if not given), in that order.

    Raises ValueError where the schedule cannot be run to its end.
    """
    p, ends = schedule.pipeline_size, simulate(schedule).ends
    wanted = list(range(p) if ranks is None else ranks)
    near = {rank: sorted({(rank - 1) % p, (rank + 1) % p} - {rank}) for rank in wanted}
    made = {rank: _made_by(schedule, ends, rank) for rank in {*wanted}.union(*near.values())}
    return [
        _program(rank, zip(ends[rank], schedule.actions[rank], strict=True), made[rank], [made[n] for n in near[rank]])
        for rank in wanted
    ]


# The messages that one rank makes, by the time at which they are ready.
_Made = dict[Time, Message]


def _made_by(schedule: Schedule, ends: tuple[list[Time], ...], rank: int) -> _Made:
    p, v = schedule.pipeline_size, schedule.virtual_size
    made = ((end, output_of(p, v, rank, a)) for end, a in zip(ends[rank], schedule.actions[rank], strict=True))
    return {time: message for time, message in made if message is not None}


def _program(rank: int, actions: Iterable[tuple[Time, Action]], sends: _Made, neighbours: Iterable[_Made]) -> Program:
    receives: dict[Time, tuple[Message, ...]] = {}
    for made in neighbours:
        for time, message in made.items():
            if message.destination == rank:
                receives[time] = (*receives.get(time, ()), message)
    exchanges = [
        (time, Exchange((sends[time],) if time in sends else (), receives.get(time, ())))
        for time in {**sends, **receives}
    ]
    # The sort keeps the order of what is at the same time: first the pass that ends then, behind it the exchange.
    events: list[tuple[Time, Action | Exchange]] = [*actions, *exchanges]
    events.sort(key=itemgetter(0))
    return [instruction for _, instruction in events]
