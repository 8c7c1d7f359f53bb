"""WikiText-103: the perplexity of a text for each of its words, by windows that overlap."""

import functools
import math
from collections.abc import Sequence

import numpy as np

from megatron.tasks.detokenizing import detokenize
from megatron.tasks.evaluation import Evaluation, Figures
from megatron.tasks.measures import LOSS
from megatron.tasks.text_files import read_utf8
from megatron.tasks.windows import Window
from megatron.tokenizer import Tokenizer


def read_text(path: str) -> str:
    """The text of a file of WikiText's. Raises ValueError where it is no UTF-8 or holds no word."""
    text = read_utf8("--valid-data", path)
    if not text.strip():
        raise ValueError(f"--valid-data {path}: there is no text in it")
    return text


def count_words(text: str) -> int:
    """Words of a text by the rule of the published figures: what stands between blanks, line ends among them."""
    return len(text.strip().split(" "))


def overlapping_windows(ids: Sequence[int], length: int, stride: int) -> list[Window]:
    """Windows that read up to `length` tokens, each `stride` further, and score what none before them has scored.

    So each token but the first, which has nothing before it, is scored once. `stride` is at most `length`.
    """
    whole = np.asarray(ids, np.int64)
    last = len(whole) - 1
    ends = [*range(min(length, last), last, stride), last]  # the last token of each
    already = [0, *ends[:-1]]
    return [
        Window(whole[number * stride : end + 1], end - before)
        for number, (end, before) in enumerate(zip(ends, already, strict=True))
    ]


def wikitext(path: str, text: str, tokenizer: Tokenizer, length: int, stride: int) -> Evaluation:
    """The evaluation of the text of a file of WikiText's, in windows of up to `length` tokens.

    Raises ValueError where there are no two tokens.
    """
    ids = tokenizer.tokenize(detokenize(text))
    if len(ids) < 2:
        raise ValueError(f"--valid-data {path}: it has {len(ids)} tokens, and at least 2 are needed: one to be scored")
    windows = overlapping_windows(ids, length, stride)
    told = f"{len(windows)} windows of up to {length} tokens, each {stride} further"
    return Evaluation(windows, LOSS, functools.partial(figures, count_words(text), len(ids), told))


def figures(words: int, tokens: int, told: str, losses: Sequence[Sequence[float]]) -> Figures:
    """Losses and perplexities for each scored token and for each of the original words, from each window's loss."""
    loss, scored = math.fsum(one for (one,) in losses), tokens - 1
    numbers: dict[str, float] = {"loss": loss, "words": words, "tokens": tokens, "scored": scored}
    lines = [
        f"WIKITEXT103: {words} words, {tokens} tokens, {tokens / words:.4f} tokens a word; {told}; "
        "every token but the first is scored once"
    ]
    for name, count, what in (("token", scored, "scored tokens"), ("word", words, "original words")):
        mean = loss / count
        numbers |= {f"{name}_loss": mean, f"{name}_perplexity": _exp(mean)}
        lines.append(f"per {name}: perplexity {_exp(mean):.6g}, loss {mean:.6f} = {loss:.4f} / {count} {what}")
    return Figures(numbers, lines)


def _exp(value: float) -> float:
    return math.exp(value) if value < math.log(1e308) else math.inf
