"""What every tokenizer can do: `Tokenizer`."""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def eod(self) -> int:
        """The id that ends a document; ValueError where the vocabulary has none."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`. Names of special tokens in it are text, and none are added around it."""
        ...

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, together faster than one by one."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens by their names; ValueError for ids outside the vocabulary."""
        ...
