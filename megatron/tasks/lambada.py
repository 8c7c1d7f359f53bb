"""LAMBADA: how often the last word of a passage is what the model would say."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from megatron.base.words import counted
from megatron.tasks.evaluation import Evaluation, Figures
from megatron.tasks.measures import GUESSES
from megatron.tasks.text_files import read_objects
from megatron.tasks.windows import Window
from megatron.tokenizer import Tokenizer

_RULES = {
    True: "strict: each subword of the last word is the likeliest one, given the right ones before it",
    False: "not strict: the last subword of the text is the likeliest one, given all before it",
}


@dataclasses.dataclass(frozen=True)
class Passage:
    """A text without the blanks around it, where it stands, and whether blanks stood behind it."""

    line: int
    text: str
    blanks_behind: bool = False

    @property
    def parts(self) -> list[str]:
        """What stands before the last word, if anything does, and the last word."""
        return self.text.rsplit(None, 1)


def read_passages(path: str) -> list[Passage]:
    """The passages of a file with an object {"text": ...} on each line; lines of blanks are passed over.

    Raises ValueError naming the file, and the line where it is one that is wrong.
    """
    passages = [_passage(number, value["text"]) for number, value in read_objects("--valid-data", path, "text")]
    if not passages:
        raise ValueError(f"--valid-data {path}: there is no passage in it")
    return passages


def _passage(number: int, text: str) -> Passage:
    return Passage(number, text.strip(), text != text.rstrip())


def lambada(path: str, passages: Sequence[Passage], tokenizer: Tokenizer, length: int, *, strict: bool) -> Evaluation:
    """The evaluation of passages, of each of which the model reads up to `length` tokens, the last ones.

    A passage of one word has nothing to guess it from, and is not scored. Raises ValueError where none can be.
    """
    several = [one for one in passages if len(one.parts) == 2]
    left_out = {one.line: "it has less than two words" for one in passages if len(one.parts) < 2}
    windows = []
    for one, window in zip(several, _windows(several, tokenizer, strict), strict=True):
        if 0 < window.scored < len(window.ids) and window.scored <= length:
            windows.append(Window(window.ids[-length - 1 :], window.scored))
        else:
            left_out[one.line] = f"its last word has {window.scored} of its {len(window.ids)} tokens, too many to read"
    notes = [f"line {line}: it is not scored, for {why}" for line, why in sorted(left_out.items())]
    if not windows:
        raise ValueError(f"--valid-data {path}: no passage in it can be scored; {notes[0]}")
    blanks = sum(one.blanks_behind for one in passages)
    cut = [f"the blanks at the end of {counted(blanks, 'passage')} are left out"] if blanks else []
    told = [f"{path}: {note}" for note in notes + cut]
    return Evaluation(windows, GUESSES, functools.partial(figures, windows, told, len(left_out), strict))


def _windows(passages: Sequence[Passage], tokenizer: Tokenizer, strict: bool) -> Iterator[Window]:
    """All tokens of each, and how many of them are to be guessed."""
    if not strict:
        for ids in tokenizer.tokenize_batch([one.text for one in passages]):
            yield Window(np.asarray(ids, np.int64), 1)
        return
    contexts = tokenizer.tokenize_batch([one.parts[0] for one in passages])
    words = tokenizer.tokenize_batch([" " + one.parts[1] for one in passages])
    for context, word in zip(contexts, words, strict=True):
        yield Window(np.asarray(context + word, np.int64), len(word))


def figures(
    windows: Sequence[Window], notes: list[str], left_out: int, strict: bool, guesses: Sequence[Sequence[float]]
) -> Figures:
    """The share of windows all of whose scored tokens are right, from each one's loss and number of right tokens."""
    hits = sum(right == window.scored for (_, right), window in zip(guesses, windows, strict=True))
    accuracy, loss = hits / len(windows), math.fsum(loss for loss, _ in guesses) / len(windows)
    told = f"LAMBADA: accuracy {accuracy:.6f}, {hits} right of {counted(len(windows), 'passage')}"
    unscored = f", {left_out} not scored" if left_out else ""
    numbers = {"accuracy": accuracy, "right": hits, "passages": len(windows), "left_out": left_out, "loss": loss}
    return Figures(
        numbers, [*notes, f"{told}{unscored}; {_RULES[strict]}", f"loss of what is to be guessed: {loss:.6f} a passage"]
    )
