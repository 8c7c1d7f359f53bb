"""The time that a schedule takes: when each action starts and ends, given how long passes and transfers take."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from megatron.pipeline.actions import Schedule

Time = float | Fraction  # whole numbers and fractions are added exactly; whole numbers are many times faster
Times = Time | Sequence[Time]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When each action of a schedule starts and ends: `starts[rank][i]`, `ends[rank][i]` of `actions[rank][i]`."""

    schedule: Schedule
    starts: tuple[list[Time], ...]
    ends: tuple[list[Time], ...]

    @property
    def makespan(self) -> Time:
        """From the first start to the last end."""
        return max(ends[-1] for ends in self.ends)

    def busy(self, rank: int) -> Time:
        """The time that a rank computes."""
        return sum(self.ends[rank]) - sum(self.starts[rank])

    @property
    def bubble(self) -> float:
        """Time lost over the ideal time, which is what the busiest rank computes."""
        ideal = max(map(self.busy, range(self.schedule.pipeline_size)))
        return float((self.makespan - ideal) / ideal)


def simulate(schedule: Schedule, forward: Times = 1, backward: Times = 2, transfer: Time = 0) -> Timeline:
    """Start each action once its rank is free and its input is there.

    Args:
        forward, backward: time of one pass through one stage (a chunk): one number, or one for each of the `p v`
            stages in the order of the model.
        transfer: time from the end of a pass to the arrival of its output on the next rank; ranks go on meanwhile.

    Raises ValueError naming the actions that wait for ever, where the lists cannot be run to their end.
    """
    p, v, m = schedule.pipeline_size, schedule.virtual_size, schedule.num_micro_batches
    stages = p * v
    durations = {"forward": _of_stages(forward, stages), "backward": _of_stages(backward, stages)}
    # Per stage and micro-batch, when the input of the forward and of the backward pass is there. The last stage's
    # backward pass begins with what its forward pass has left.
    activations: list[list[Time | None]] = [[None] * m for _ in range(stages)]
    gradients: list[list[Time | None]] = [[None] * m for _ in range(stages)]
    activations[0] = [0] * m
    starts: tuple[list[Time], ...] = tuple([] for _ in range(p))
    ends: tuple[list[Time], ...] = tuple([] for _ in range(p))
    free: list[Time] = [0] * p
    runnable, asleep = list(range(p)), [False] * p
    while runnable:
        rank = runnable.pop()
        actions, started, ended, now = schedule.actions[rank], starts[rank], ends[rank], free[rank]
        for index in range(len(ended), len(actions)):
            kind, micro_batch, chunk = actions[index]
            stage = chunk * p + rank
            ready = (activations if kind == "forward" else gradients)[stage][micro_batch]
            if ready is None:
                asleep[rank] = True
                break
            start = ready if ready > now else now
            now = start + durations[kind][stage]
            started.append(start)
            ended.append(now)
            if kind == "backward":
                if stage:
                    gradients[stage - 1][micro_batch] = now + transfer
            elif stage + 1 < stages:
                activations[stage + 1][micro_batch] = now + transfer
            else:
                gradients[stage][micro_batch] = now
            other = (rank + 1 if kind == "forward" else rank - 1) % p
            if asleep[other]:
                asleep[other] = False
                runnable.append(other)
        free[rank] = now
    _refuse_unfinished(schedule, [len(ended) for ended in ends])
    return Timeline(schedule, starts, ends)


def _of_stages(times: Times, stages: int) -> list[Time]:
    each = list(times) if isinstance(times, Sequence) else [times] * stages
    if len(each) != stages or min(each) <= 0:
        raise ValueError(f"times of stages {each}: there must be {stages}, all above 0")
    return each


def _refuse_unfinished(schedule: Schedule, done: list[int]) -> None:
    stuck = [
        f"rank {rank} for the input of the {actions[n]}"
        for rank, (actions, n) in enumerate(zip(schedule.actions, done, strict=True))
        if n < len(actions)
    ]
    if stuck:
        raise ValueError(f"the schedule cannot be run to its end, these wait for ever: {', '.join(stuck)}")
