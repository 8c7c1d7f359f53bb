"""What programs of evaluation ask of a language model: how likely texts are, and what it writes behind others."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from megatron.tasks.generation import Continuations, Prompt
from megatron.tasks.measures import GUESSES, LOSS, measured
from megatron.tasks.next_token import SplitGPT
from megatron.tasks.sampling import SamplingConfig
from megatron.tasks.windows import Window
from megatron.tasks.writer import write
from megatron.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Wish:
    """What to write: behind which text, how many tokens at most, before the first of which strings, chosen how."""

    context: str
    length: int
    stop: tuple[str, ...] = ()
    sampling: SamplingConfig = dataclasses.field(default_factory=lambda: SamplingConfig(greedy=True))


class Answers:
    """A model that is asked; every rank asks the same, and gets the same answers.

    Args:
        model: split over the current model parallel group; the data-parallel ranks share the texts that are scored.
        tokenizer: of the model.
        micro_batch_size: texts read at the same time.
    """

    def __init__(self, model: SplitGPT, tokenizer: Tokenizer, micro_batch_size: int) -> None:
        self.model, self.tokenizer, self.micro_batch_size = model, tokenizer, micro_batch_size

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """For each (context, continuation) the logarithm of the probability of the latter, and if it is the likeliest.

        That is, whether each token of it is the likeliest one, given the right ones before it. An empty context is the
        end of a document; of a long one the last tokens are read. Raises ValueError for a continuation of more tokens
        than the model reads. Collectives: those of `measured`.
        """
        windows = [self._window(context, continuation) for context, continuation in pairs]
        scored = [window for window in windows if window.scored > 0]
        answers = iter(measured(self.model, scored, self.micro_batch_size, GUESSES)) if scored else iter(())
        found = []
        for window in windows:
            loss, right = next(answers) if window.scored > 0 else (0.0, 0.0)
            found.append((-loss, right == window.scored))
        return found

    def whole_texts(self, texts: Sequence[str]) -> list[float]:
        """The logarithm of the probability of each text behind the end of a document.

        Each token is scored once, in windows that the model reads at once; the last one goes as far back as it can.
        """
        windows = [self._windows(text) for text in texts]
        every = [window for of_text in windows for window in of_text]
        losses = iter(measured(self.model, every, self.micro_batch_size, LOSS)) if every else iter(())
        return [-math.fsum(loss for (loss,) in itertools.islice(losses, len(of_text))) for of_text in windows]

    def written(self, wishes: Sequence[Wish]) -> list[str]:
        """What the model writes for each wish; of a long context the last tokens are read, so that there is room.

        But no fewer than half of what the model reads: a text that is wished longer than the rest ends there.
        Collectives: those of `Continuations.step`. Every data-parallel rank does all the work.
        """
        found = [""] * len(wishes)
        numbers = sorted(range(len(wishes)), key=lambda i: wishes[i].stop)
        for stop, group in itertools.groupby(numbers, key=lambda i: wishes[i].stop):
            alike = list(group)
            prompts = [self._prompt(wishes[i], i) for i in alike]
            longest = max(len(prompt.ids) + prompt.length for prompt in prompts)
            texts = Continuations(self.model, min(self.micro_batch_size, len(prompts)), longest)
            for i, text in zip(alike, write(texts, self.tokenizer, prompts, stop), strict=True):
                found[i] = text.text
        return found

    def _window(self, context: str, continuation: str) -> Window:
        """Blanks at the end of the context belong to the tokens of the continuation."""
        given = context.rstrip()
        ids = self.tokenizer.tokenize(context + continuation)
        scored = len(ids) - (len(self.tokenizer.tokenize(given)) if given else 0)
        if scored > self.model.context:
            raise ValueError(
                f"the continuation {continuation[:40]!r} has {scored} tokens, and the model reads at most "
                f"{self.model.context}"
            )
        if scored == len(ids):
            ids = [self.tokenizer.eod, *ids]
        return Window(np.asarray(ids[-self.model.context - 1 :], np.int64), scored)

    def _windows(self, text: str) -> list[Window]:
        ids = np.asarray([self.tokenizer.eod, *self.tokenizer.tokenize(text)], np.int64)
        length, last = self.model.context, len(ids) - 1
        ends = [min(start + length, last) for start in range(0, last, length)]
        return [
            Window(ids[max(0, end - length) : end + 1], end - before)
            for before, end in zip([0, *ends], ends, strict=False)
        ]

    def _prompt(self, wish: Wish, number: int) -> Prompt:
        ids = self.tokenizer.tokenize(wish.context) or [self.tokenizer.eod]
        kept = ids[-max(self.model.context - wish.length, self.model.context // 2, 1) :]
        return Prompt(kept, wish.length, wish.sampling, {self.tokenizer.eod}, ("answer", number))
