"""Continuing prompts with a GPT, several at a time, a token each at each step."""

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

import torch

from megatron import mpu
from megatron.tasks.next_token import NextToken
from megatron.tasks.sampling import NO_NUMBERS, SamplingConfig, choose
from megatron.training.memory import memory_needed

# stop: an id that ends a text has come; length: as many ids as were asked for; context: the model takes no more;
# failure: the logits are no numbers, and so no id was chosen.
Finish = Literal["stop", "length", "context", "failure"]
_NO_NUMBER = -1  # in place of an id, where the logits are no numbers


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What is to be continued, and how.

    Attributes:
        ids: at least one, of the vocabulary.
        length: ids to add at most.
        sampling: how they are chosen.
        stop_ids: each of these ends the text, and is its last id.
        seed: what the draws depend on, by `mpu.derive_seed`, and on nothing else: neither on the other prompts nor on
            the layout.
    """

    ids: Sequence[int]
    length: int
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    stop_ids: Collection[int] = ()
    seed: tuple[int | str, ...] = (0,)

    def problems(self, context: int, vocab_size: int) -> list[str]:
        """A sentence for each thing that a model of this context and vocabulary cannot do."""
        found = [] if self.ids else ["the prompt is empty: at least one token is needed to go on from"]
        if len(self.ids) > context:
            found.append(f"the prompt has {len(self.ids)} tokens: the model takes {context} at most")
        for name, ids in (("token", self.ids), ("stop token", self.stop_ids)):
            wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
            if wrong is not None:
                found.append(f"{name} {wrong}: the vocabulary has ids 0 to {vocab_size - 1}")
        return found


@dataclasses.dataclass(frozen=True)
class Chosen:
    """An id that was added to the prompt of this number, and whether the text ends with it; with a failure none was."""

    number: int
    token: int
    finish: Finish | None


class _Row:
    """A prompt that is being continued."""

    def __init__(self, number: int, prompt: Prompt, columns: int) -> None:
        self.number, self.prompt = number, prompt
        self.ids = list(prompt.ids)
        self.generator = torch.Generator().manual_seed(mpu.derive_seed(*prompt.seed))
        # The last id is only chosen, not read any more.
        self.room = columns + 1 - len(prompt.ids)
        self.added = 0

    def add(self, token: int) -> Chosen:
        """Take in the id that was chosen."""
        if token == _NO_NUMBER:
            return Chosen(self.number, token, "failure")
        self.ids.append(token)
        self.added += 1
        finish: Finish | None = None
        if token in self.prompt.stop_ids:
            finish = "stop"
        elif self.added == self.prompt.length:
            finish = "length"
        elif self.added == self.room:
            finish = "context"
        return Chosen(self.number, token, finish)


class Continuations:
    """Texts that grow side by side; one may begin or end at any step, and none depends on the others.

    Every rank of the model makes the same calls. Raises `ConfigError` where there is no memory for so many.

    Args:
        model: what continues them.
        rows: how many at most.
        columns: the longest prompt with what is added, or the model's context by default.
        recompute: keep no keys and values, and read whole sequences for every token.
    """

    def __init__(self, model: NextToken, rows: int, columns: int | None = None, *, recompute: bool = False) -> None:
        self.model, self.size = model, rows
        self.columns = model.context if columns is None else min(columns, model.context)
        with memory_needed(f"the keys and values of {rows} texts (--micro-batch-size) of {self.columns} tokens"):
            self.cache = None if recompute else model.new_cache(rows, self.columns)
        self._rows: list[_Row] = []

    @property
    def room(self) -> int:
        """How many more may begin."""
        return self.size - len(self._rows)

    def drop(self, numbers: Collection[int]) -> None:
        """Take out the texts of these numbers, where they are there."""
        self._remove([at for at, row in enumerate(self._rows) if row.number in numbers])

    @torch.no_grad()
    def step(self, new: Mapping[int, Prompt] | None = None) -> list[Chosen]:
        """Begin new texts, and add an id to each; what ends is taken out.

        Collectives: those of `NextToken.logits`, once for the texts that are there and once for the new ones, and one
        of `NextToken.share` for each.
        """
        begun = [_Row(number, prompt, self.columns) for number, prompt in (new or {}).items()]
        assert len(begun) <= self.room
        chosen = self._continue(self._rows, fresh=False)
        self._rows += begun
        chosen += self._continue(begun, fresh=True)
        self._forget_failures(chosen)
        self._remove([at for at, one in enumerate(chosen) if one.finish is not None])
        return chosen

    def _continue(self, rows: Sequence[_Row], *, fresh: bool) -> list[Chosen]:
        """An id more for each of some rows: all, or those that are new, which come behind the others."""
        if not rows:
            return []
        model, lengths = self.model, [len(row.ids) for row in rows]
        if self.cache is None or fresh:
            tokens = [row.ids for row in rows]
            seen = None if self.cache is None else self.cache.behind(len(self._rows) - len(rows), None, max(lengths))
        else:
            tokens = [row.ids[-1:] for row in rows]
            held = torch.tensor(lengths, device=self.cache.device) - 1
            seen = self.cache.behind(0, held, max(lengths))
        logits = model.logits(tokens, seen)
        ids = None
        if model.chooses:
            assert logits is not None
            ids = [self._choose(row, one) for row, one in zip(rows, logits, strict=True)]
        return [row.add(token) for row, token in zip(rows, model.share(ids, len(rows)), strict=True)]

    def _choose(self, row: _Row, logits: torch.Tensor) -> int:
        try:
            return choose(logits, row.prompt.sampling, row.generator)
        except FloatingPointError:  # to be known to all ranks
            return _NO_NUMBER

    def _forget_failures(self, chosen: Sequence[Chosen]) -> None:
        """Where logits were no numbers, so may be keys and values, behind the tokens of other texts too.

        They would be seen there, hidden as they are, for 0 times NaN is NaN.
        """
        if self.cache is None or all(one.finish != "failure" for one in chosen):
            return
        for at, (row, one) in enumerate(zip(self._rows, chosen, strict=True)):
            self.cache.clear(at, 0 if one.finish == "failure" else len(row.ids) - 1)

    def _remove(self, places: Sequence[int]) -> None:
        """Take rows out; the last ones fill their places."""
        for at in sorted(places, reverse=True):
            last = len(self._rows) - 1
            if at != last and self.cache is not None:
                self.cache.move(last, at)
            self._rows[at] = self._rows[last]
            self._rows.pop()


def continue_prompts(
    texts: Continuations, prompts: Sequence[Prompt], ends: Callable[[Chosen], bool] = lambda chosen: False
) -> Iterator[Chosen]:
    """Continue all prompts, as many at a time as there is room for; gives every id, with the number of its prompt.

    `ends` is asked of every id whether a text ends with it for the caller's reasons; then it ends by "stop". It must
    say the same on every rank. A prompt that wants no ids gives none. Raises FloatingPointError, on every rank, where
    logits are no numbers.
    """
    waiting = deque((number, prompt) for number, prompt in enumerate(prompts) if prompt.length > 0)
    while waiting or texts.room < texts.size:
        new = dict(waiting.popleft() for _ in range(min(texts.room, len(waiting))))
        for one in texts.step(new):
            if one.finish == "failure":
                raise FloatingPointError(NO_NUMBERS)
            if ends(one):
                texts.drop([one.number])
                one = dataclasses.replace(one, finish="stop")
            yield one
