"""WikiText as its authors would have typed it: the marks and blanks that were put in between its words are taken out.

WikiText sets punctuation, brackets and quotation marks apart as words, and writes signs within a word, as in 1,000 or
well-known, as ` @,@ ` and ` @-@ `. Nothing else is changed: what is left out are blanks and those `@`.
"""

_JOINED = {"@-@": "-", "@,@": ",", "@.@": "."}
_ENDING = frozenset([",", ".", ":", ";", "!", "?", ")", "]", "}"])
_OPENING = frozenset(["(", "[", "{"])
_CONTRACTED = frozenset(["'s", "'t", "'m", "'d", "'ve", "'re", "'ll", "'S", "'T", "'M", "'D", "'VE", "'RE", "'LL"])


def detokenize(text: str) -> str:
    """A text of WikiText without the blanks and marks of its tokenization; lines stay lines."""
    return "\n".join(_line([word for word in line.strip().split(" ") if word]) for line in text.split("\n"))


def _line(words: list[str]) -> str:
    level = _heading_level(words)
    if level:
        sign = "=" * level
        return " ".join([sign, _typed(words[level:-level]), sign])
    return _typed(words)


def _heading_level(words: list[str]) -> int:
    """Of a heading `= = Plot = =` the number of signs on each side, of another line 0."""
    inner = [i for i, word in enumerate(words) if word != "="]
    if not inner or inner[0] != len(words) - 1 - inner[-1]:
        return 0
    return inner[0]


def _typed(words: list[str]) -> str:
    """The words with blanks between those that would have one."""
    glued_left, glued_right = _glue(words)
    pieces: list[str] = []
    for i, word in enumerate(words):
        if i > 0 and i not in glued_left and i - 1 not in glued_right:
            pieces.append(" ")
        pieces.append(_JOINED.get(word, word))
    return "".join(pieces)


def _glue(words: list[str]) -> tuple[set[int], set[int]]:
    """The numbers of the words that stand close to the word before, and of those close to the word behind."""
    before = {i for i, word in enumerate(words) if word in _ENDING or word in _CONTRACTED or word in _JOINED}
    behind = {i for i, word in enumerate(words) if word in _OPENING or word in _JOINED}
    for opening, closing in _pairs([i for i, word in enumerate(words) if word == '"']):
        behind.add(opening)
        before.add(closing)
    left = _apostrophes(words, before)
    for opening, closing in _pairs(left):
        behind.add(opening)
        before.add(closing)
    return before, behind


def _pairs(places: list[int]) -> list[tuple[int, int]]:
    """Opening and closing ones in turn; the last of an odd number has no partner and stays alone."""
    return list(zip(places[::2], places[1::2], strict=False))


def _apostrophes(words: list[str], before: set[int]) -> list[int]:
    """The places of single quotation marks; those that end a genitive, as in Linnaeus ', go to `before`.

    An apostrophe behind an s ends a genitive where no quotation is open; where one is, it closes that.
    """
    marks: list[int] = []
    for i, word in enumerate(words):
        if word != "'":
            continue
        if len(marks) % 2 == 0 and i > 0 and words[i - 1].endswith("s"):
            before.add(i)
        else:
            marks.append(i)
    return marks
