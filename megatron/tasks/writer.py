"""Texts in, texts out: what a trained model adds to prompts."""

import dataclasses
from collections.abc import Callable, Sequence

from megatron.tasks.generation import Chosen, Continuations, Finish, Prompt, continue_prompts
from megatron.tasks.texts import TextStream
from megatron.tokenizer import Tokenizer

# Told of each piece of text as soon as it is certain.
Piece = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Written:
    """What was added to a prompt: the text, how many ids that took (one that stops it included), and why it ended."""

    text: str
    tokens: int
    finish: Finish


class _Growing:
    """The text that is added to one prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, stop: Sequence[str], piece: Piece) -> None:
        self.stream, self.piece = TextStream(tokenizer, prompt.ids, stop), piece
        self.tokens = 0
        self.finish: Finish = "length"

    def ends(self, chosen: Chosen) -> bool:
        """Take in an id; whether a string stops the text there."""
        self.tokens += 1
        if chosen.finish != "stop":  # else the id stands for no text
            self.piece(self.stream.add(chosen.token))
        return self.stream.stopped

    @property
    def written(self) -> Written:
        return Written(self.stream.text, self.tokens, self.finish)


def write(
    texts: Continuations,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    stop: Sequence[str] = (),
    piece: Piece = lambda text: None,
) -> list[Written]:
    """Continue prompts until they end by themselves, or before the first of the strings `stop`.

    Every rank of the model makes the same call. `piece` is told what comes, of whichever text. Raises ValueError naming
    the number of a prompt that is none for the model. Collectives: those of `Continuations.step`.
    """
    for number, prompt in enumerate(prompts, 1):
        problems = prompt.problems(texts.model.context, texts.model.vocab_size)
        if problems:
            raise ValueError(f"prompt {number}: {'; '.join(problems)}")
    growing = [_Growing(tokenizer, prompt, stop, piece) for prompt in prompts]
    for chosen in continue_prompts(texts, prompts, lambda one: growing[one.number].ends(one)):
        if chosen.finish is not None:
            one = growing[chosen.number]
            one.finish = chosen.finish
            one.piece(one.stream.end())
    return [one.written for one in growing]
