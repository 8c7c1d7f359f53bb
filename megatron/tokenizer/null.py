"""For data that is already ids: text of numbers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.tokenizer.special import WithSpecialIds


class NullTokenizer(WithSpecialIds):
    """Text is ids in decimal with blanks between them; of `vocab_size` ids the last one ends a document.

    (Megatron-LM's later tokenizer of this name counts one id more than it is told; here the flag is the number of ids.)
    """

    def __init__(self, vocab_size: int) -> None:
        source = f"--tokenizer-type NullTokenizer --vocab-size {vocab_size}"
        super().__init__(vocab_size, {"eod": vocab_size - 1}, (), source)

    def continues_word(self) -> NDArray[np.bool_]:
        """Raises ValueError: numbers are not parts of words."""
        raise ValueError(f"{self._source}: only WordPiece and SentencePiece mark the ids that continue a word")

    def tokenize(self, text: str) -> list[int]:
        """`"5 0 12"` -> [5, 0, 12]; ValueError for anything but ids of the vocabulary."""
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit()):
                raise ValueError(f"NullTokenizer takes decimal ids with blanks between them, not {word[:40]!r}")
        return self._checked([int(word) for word in words])

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """[5, 0, 12] -> `"5 0 12"`."""
        return " ".join(str(i) for i in self._checked(ids))
