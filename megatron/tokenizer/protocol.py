"""What every tokenizer can do: `Tokenizer`."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Tokenizer(Protocol):
    """Text to ids and back. A special id that the vocabulary lacks raises ValueError where it is asked for."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        ...

    @property
    def cls(self) -> int:
        """The id that opens a sequence of BERT's."""
        ...

    @property
    def sep(self) -> int:
        """The id that ends each sentence of a pair."""
        ...

    @property
    def mask(self) -> int:
        """The id that stands for a token that is to be predicted."""
        ...

    @property
    def pad(self) -> int:
        """The id that fills a sequence up."""
        ...

    @property
    def bos(self) -> int:
        """The id that opens a text."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """All ids that stand for no text: the special ids above that there are, the unknown word's, and others."""
        ...

    def continues_word(self) -> NDArray[np.bool_]:
        """For each id whether it goes on with the word of the id before it. bool [vocab_size].

        False for special ids. ValueError for vocabularies that do not mark it.
        """
        ...

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`; none are added around it.

        Names of special tokens in it are text, unless the tokenizer was built with `parse_special_tokens`.
        """
        ...

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, together faster than one by one."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens by their names; ValueError for ids outside the vocabulary."""
        ...
