"""Which texts the model continues at each step: between the threads that hear requests and the one that computes."""

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from megatron.tasks.generation import Chosen, Finish, Prompt
from megatron.tasks.texts import TextStream
from megatron.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Update:
    """What is new of a text: a piece of it, an id more or none, and, when it has ended, why."""

    text: str
    tokens: int
    finish: Finish | None


Hear = Callable[[Update], None]


class Full(Exception):
    """There are as many texts waiting as may wait."""


class Closed(Exception):
    """The server is about to end."""


class _Job:
    """A text that somebody waits for."""

    def __init__(self, prompt: Prompt, stream: TextStream, hear: Hear) -> None:
        self.prompt, self.stream, self.hear = prompt, stream, hear


def _plain(prompt: Prompt) -> dict[str, Any]:
    sampling = dataclasses.asdict(prompt.sampling)
    return vars(prompt) | {"ids": list(prompt.ids), "stop_ids": list(prompt.stop_ids), "sampling": sampling}


class Scheduler:
    """Lets texts begin in the order in which they came, as soon as there is room, and tells what comes of them.

    `submit`, `cancel` and `close` may be called by any thread; `command`, `heard` and `fail` by the one that computes.
    """

    def __init__(self, tokenizer: Tokenizer, max_waiting: int) -> None:
        self._tokenizer, self._max_waiting = tokenizer, max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, _Job]] = deque()
        self._running: dict[int, _Job] = {}
        self._dropped: set[int] = set()
        self._numbers = 0
        self._closed = False

    @property
    def counts(self) -> tuple[int, int]:
        """How many texts are being continued, and how many wait."""
        with self._changed:
            return len(self._running), len(self._waiting)

    def submit(self, prompts: Sequence[Prompt], stop: Sequence[str], hear: Sequence[Hear]) -> list[int]:
        """Take in the prompts of a request, all of them or, raising `Full` or `Closed`, none; returns their numbers.

        `hear` is called for each text by the thread that computes, and must not wait.
        """
        streams = [TextStream(self._tokenizer, prompt.ids, stop) for prompt in prompts]
        with self._changed:
            if self._closed:
                raise Closed
            if len(self._waiting) + len(prompts) > self._max_waiting:
                raise Full
            numbers = list(range(self._numbers, self._numbers + len(prompts)))
            self._numbers += len(prompts)
            self._waiting.extend(zip(numbers, map(_Job, prompts, streams, hear), strict=True))
            self._changed.notify_all()
        return numbers

    def cancel(self, numbers: Collection[int]) -> None:
        """Nobody waits for these texts any more."""
        with self._changed:
            self._waiting = deque(one for one in self._waiting if one[0] not in numbers)
            for number in numbers:
                self._drop(number)
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing begins any more: `command` gives None, and what was not written to its end has failed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def command(self, room: int) -> dict[str, Any] | None:
        """What all ranks do next, where `room` more texts could be continued; waits until there is something to do.

        None to end. Else, in plain values, the numbers of texts to take out ("drop") and the numbers and prompts of
        those to begin ("begin"), to go on with all that are there then.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._running or self._dropped)
            if self._closed:
                return None
            dropped, self._dropped = sorted(self._dropped), set()
            begun = [self._waiting.popleft() for _ in range(min(room + len(dropped), len(self._waiting)))]
            self._running |= dict(begun)
            return {"drop": dropped, "begin": [(number, _plain(job.prompt)) for number, job in begun]}

    def heard(self, chosen: Sequence[Chosen]) -> None:
        """Tell what the model has chosen to those who wait for it."""
        with self._changed:
            jobs = [(job, one) for one in chosen if (job := self._job(one)) is not None]
        # Without the lock, for which those who submit and cancel would have to wait while the ids are decoded.
        updates = [(one.number, job, _update(job.stream, one)) for job, one in jobs]
        with self._changed:
            for number, _, update in updates:
                if update.finish is not None:
                    self._drop(number)
        for _, job, update in updates:
            job.hear(update)

    def fail(self) -> None:
        """All texts that are not written to their end have failed; nothing continues them any more."""
        with self._changed:
            for job in (*self._running.values(), *(job for _, job in self._waiting)):
                job.hear(Update("", 0, "failure"))
            self._dropped.clear()
            self._running.clear()
            self._waiting.clear()

    def _job(self, one: Chosen) -> _Job | None:
        """Who waits for it, if anybody does.

        One that has ended has left its place: to take it out too, now or when its client leaves, would be a place too
        many, for `command` counts those that taking out makes.
        """
        if one.finish is None:
            return self._running.get(one.number)
        self._dropped.discard(one.number)
        return self._running.pop(one.number, None)

    def _drop(self, number: int) -> None:
        if self._running.pop(number, None) is not None:
            self._dropped.add(number)


def _update(stream: TextStream, one: Chosen) -> Update:
    """What an id adds to a text; one that stops it, or is none, stands for no text."""
    if one.finish == "failure":
        return Update("", 0, "failure")
    text = "" if one.finish == "stop" else stream.add(one.token)
    finish = "stop" if stream.stopped else one.finish
    return Update(text if finish is None else text + stream.end(), 1, finish)
