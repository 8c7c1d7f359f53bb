"""From ids that come one by one to the text that they add to a prompt, cut where a string stops it."""

from collections.abc import Sequence

from megatron.tokenizer import Tokenizer

# Ids before a text that are decoded along, so that blanks and letters of several ids come out right behind them.
_TAIL = 16
# New ids that are decoded again with every one that comes, before their text is settled.
_WINDOW = 32
_BROKEN = "\ufffd"  # what a decoder gives for a letter of which only some bytes are there


class TextStream:
    """The text that grows behind a prompt.

    What may still change is held back: a letter of which bytes are missing, and what may be the beginning of a string
    that stops the text.

    Args:
        tokenizer: of the model.
        prompt: ids before the text.
        stop: strings none of which is empty; the text ends before the first of them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.text = ""  # what was given so far
        self.stopped = False
        self._decode = tokenizer.detokenize
        self._stop, self._settled = tuple(stop), ""
        self._begin_window(prompt)

    def add(self, token: int) -> str:
        """Take in an id; what the text is longer by for certain. Nothing comes after a stop."""
        if len(self._ids) >= _WINDOW and not (decoded := self._decoded()).endswith(_BROKEN):
            self._settled += decoded
            self._begin_window([*self._tail, *self._ids])
        self._ids.append(token)
        return self._give(hold=True)

    def end(self) -> str:
        """What was held back until the end."""
        return self._give(hold=False)

    def _give(self, hold: bool) -> str:
        if self.stopped:
            return ""
        text = self._settled + self._decoded()
        if hold:
            text = text.rstrip(_BROKEN)  # it may become a letter
        # What was given holds no beginning of a stop.
        found = [at for at in (text.find(word, len(self.text)) for word in self._stop) if at >= 0]
        if found:
            self.stopped = True
            text = text[: min(found)]
        elif hold:
            text = text[: self._begun(text)]
        if not text.startswith(self.text):  # decoders may change what is before; what was given stands
            return ""
        more = text[len(self.text) :]
        self.text = text
        return more

    def _begin_window(self, before: Sequence[int]) -> None:
        """Decode what comes from now on behind the last of these ids alone, so that an id costs the same anywhere."""
        self._tail = list(before[-_TAIL:])
        self._before = self._decode(self._tail)
        self._ids: list[int] = []

    def _decoded(self) -> str:
        whole = self._decode([*self._tail, *self._ids])
        return whole[len(self._before) :] if whole.startswith(self._before) else self._decode(self._ids)

    def _begun(self, text: str) -> int:
        """Where in it something begins that may become a stop; its end where nothing does.

        Only what was not given yet is looked at, so that a stop costs no more than the text, however long it is.
        """
        places = range(len(self.text), len(text))
        return next((at for at in places if any(word.startswith(text[at:]) for word in self._stop)), len(text))
