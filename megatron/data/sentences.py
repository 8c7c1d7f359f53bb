"""Texts cut into sentences by the rules of `sentencex`, which knows the abbreviations of many languages."""

import re
from collections.abc import Iterator

import sentencex

_PARAGRAPH_END = re.compile(r"\n\s*\n")
# The rules take time that grows with the square of an odd text (thousands of opening quotes), so they see windows.
WINDOW = 8_192


class SentenceSplitter:
    """Cuts texts of `language` (a code of two or three letters, such as "en") into sentences.

    Blank lines end a sentence, other line breaks do not; blanks around a sentence are dropped. A sentence of more than
    `WINDOW` characters is cut at a blank.
    """

    def __init__(self, language: str) -> None:
        self.language = language

    def __call__(self, text: str) -> list[str]:
        """The sentences of `text`, none of them empty."""
        stripped = (s.strip() for paragraph in _paragraphs(text) for s in self._sentences(paragraph))
        return [sentence for sentence in stripped if sentence]

    def _sentences(self, paragraph: str) -> Iterator[str]:
        start = 0
        while len(paragraph) - start > WINDOW:
            window = paragraph[start : start + WINDOW]
            found = sentencex.segment(self.language, window)
            # The last one may go on behind the window: it is looked at again from its start.
            keep = window.rfind(found[-1])
            if keep <= 0:
                keep = window.rfind(" ") + 1 or WINDOW
                yield window[:keep]
            else:
                yield from found[:-1]
            start += keep
        yield from sentencex.segment(self.language, paragraph[start:])


def _paragraphs(text: str) -> Iterator[str]:
    start = 0
    for end in _PARAGRAPH_END.finditer(text):
        yield text[start : end.start()]
        start = end.end()
    yield text[start:]
