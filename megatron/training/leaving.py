"""Leaving a run before its end: at SIGTERM on any rank or after a time, at an iteration on which all ranks agree."""

import contextlib
import datetime
import enum
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist

from megatron.training.config import RunConfig
from megatron.training.setup import World

# Seconds in which a second SIGTERM is the first one over again: a scheduler and a launcher may both send it.
_SAME_NOTICE = 5.0


class Reason(enum.IntEnum):
    """Why a run leaves; the highest that any rank has is that of all."""

    TIME = 1
    SIGTERM = 2
    INTERVAL = 3  # which every rank knows by itself


class Leaving:
    """Finds out whether the ranks of a run are to leave it, all after the same iteration.

    Args:
        rank, world_size: this rank's number among all. The time of the first rank counts.
        minutes: after so many, since `began` by `clock` (in seconds), the run leaves; None for no such end.
        group: all ranks, on gloo; the default group if None.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        minutes: float | None = None,
        *,
        began: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._world_size = world_size
        self._group = group
        self._clock = clock
        self._ends_at = began + 60.0 * minutes if minutes is not None and rank == 0 else None
        self._noted_at: float | None = None  # of the first SIGTERM
        self._before: Any = signal.SIG_DFL
        self._asked = torch.zeros((), dtype=torch.uint8)
        self._work: dist.Work | None = None

    def ask(self) -> None:
        """Begin to agree on what each rank knows now: one all-reduce of a byte over everyone, in the background."""
        self._asked = torch.tensor(self._own_reason(), dtype=torch.uint8)
        if self._world_size > 1:
            self._work = dist.all_reduce(self._asked, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def answer(self) -> Reason | None:
        """Why all ranks leave now, by what they knew when they asked last; None where they stay. Waits for the others.

        One answer a question.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        reason = int(self._asked.item())
        return Reason(reason) if reason else None

    def _own_reason(self) -> int:
        if self._noted_at is not None:
            return Reason.SIGTERM
        return Reason.TIME if self._ends_at is not None and self._clock() >= self._ends_at else 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block the first SIGTERM is a wish to leave, and one that comes later is what it was before.

        Only where signals can be listened to, which is Python's main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._note)
        self._before = signal.SIG_DFL if before is None else before
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_: object) -> None:
        if self._noted_at is None:
            self._noted_at = self._clock()
        elif self._clock() - self._noted_at > _SAME_NOTICE:
            signal.signal(signal.SIGTERM, self._before)
            signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def leaving_together(config: RunConfig, world: World, began: float) -> Iterator[Leaving]:
    """A `Leaving` that listens to SIGTERM inside the block. Collective where it needs a group of gloo for itself.

    `began`: when the run did, in seconds of `time.monotonic`.
    """
    timeout = datetime.timedelta(minutes=config.distributed.distributed_timeout_minutes)
    needs_group = world.size > 1 and "gloo" not in dist.get_backend_config()
    group = dist.new_group(backend="gloo", timeout=timeout) if needs_group else None
    leaving = Leaving(world.rank, world.size, config.training.exit_duration_in_mins, began=began, group=group)
    with leaving.listening():
        yield leaving
    if group is not None:  # after a failure the peers may wait in it
        dist.destroy_process_group(group)


def words_on(reason: Reason, iteration: int, config: RunConfig) -> str:
    """A sentence for the end of a run that leaves after `iteration`."""
    training, save = config.training, config.checkpoint.save
    why = {
        Reason.TIME: f"--exit-duration-in-mins {training.exit_duration_in_mins or 0:g} are over",
        Reason.SIGTERM: "SIGTERM came",
        Reason.INTERVAL: f"--exit-interval {training.exit_interval} asks for it",
    }[reason]
    then = "nothing is saved, for there is no --save" if save is None else f"--load {save} goes on from here"
    return f"the run ends after iteration {iteration}, because {why}; {then}"
