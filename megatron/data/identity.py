"""What a dataset draws from and in which order, in a few numbers: equal ones mean equal samples."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SetPart:
    """The part of a token set that is drawn from. Where the files lie does not matter.

    Attributes:
        name: the last part of the set's prefix, for people.
        sequences, tokens, checksum: of the whole set, to tell it from others; the last is that of the sequences' sizes.
        begin, end: the sequences `begin` to `end` (not included) are drawn from.
        share: of the dataset's samples.
        epochs: passes over them that are shuffled, however many samples are asked for in them.
        last_apart: whether the last pass is shuffled by itself.
    """

    name: str
    sequences: int
    tokens: int
    checksum: int
    begin: int
    end: int
    share: float
    epochs: int
    last_apart: bool

    @property
    def content(self) -> tuple[int, int, int]:
        """Equal for equal token sets."""
        return self.sequences, self.tokens, self.checksum

    @property
    def span(self) -> tuple[int, int]:
        """The sequences drawn from."""
        return self.begin, self.end

    @property
    def passes(self) -> tuple[int, bool]:
        """What the order depends on beside the sequences, the length of a sample and the seed."""
        return self.epochs, self.last_apart

    def __str__(self) -> str:
        return f"{self.name} ({self.sequences:,} documents, {self.tokens:,} tokens)"
