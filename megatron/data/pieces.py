"""Huge texts cut where every piece has the ids that it has within the whole, so that memory stays small."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence

PIECE = 1 << 17  # characters
_CONTEXT = 256  # characters on both sides of a cut on which it is tried
_TRIED = 8  # places of each sort in a stretch of a piece's length

# No tokenizer that looks for words first has one across these: before a blank between two words, and before a
# punctuation mark behind a letter (for writing without blanks).
_PLACES = (re.compile(r"(?<=[A-Za-z0-9])[ \n](?=[A-Za-z])"), re.compile(r"(?<=[^\W\d_])[^\w\s'\u2019](?=[^\W\d_])"))

Tokenize = Callable[[str], Sequence[int]]


def pieces(text: str, tokenize: Tokenize, length: int = PIECE) -> Iterator[str]:
    """`text` in pieces of about `length` characters whose ids, one after another, are the ids of `text`.

    Each cut is tried first: the text around it must have the same ids cut and uncut, which fails where `tokenize` puts
    something in front of a text or knows no words. A text without a good place stays whole.
    """
    start = 0
    while len(text) - start > 2 * length:
        end = next(_cuts(text, start + length, tokenize, length), len(text))
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def _cuts(text: str, begin: int, tokenize: Tokenize, length: int) -> Iterator[int]:
    """Good places from `begin` on."""
    for stretch in range(begin, len(text), length):
        for place in _PLACES:
            for found in itertools.islice(place.finditer(text, stretch, stretch + length), _TRIED):
                if _is_good(text, found.start(), tokenize):
                    yield found.start()


def _is_good(text: str, at: int, tokenize: Tokenize) -> bool:
    before, after = text[max(at - _CONTEXT, 0) : at], text[at : at + _CONTEXT]
    try:
        return list(tokenize(before + after)) == [*tokenize(before), *tokenize(after)]
    except ValueError:
        return False
