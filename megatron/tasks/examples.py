"""Examples of a task, ready to be put into samples: pairs of texts as ids, and the right answer."""

import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.identity import SetPart
from megatron.tokenizer import Tokenizer

Ids = NDArray[np.int32]

# [CLS] and two [SEP].
_AROUND = 3
_TOGETHER = 1000


class PairIds(NamedTuple):
    """The special ids of `[CLS] a [SEP] b [SEP] [PAD] ...`."""

    cls: int
    sep: int
    pad: int


def pair_ids(tokenizer: Tokenizer) -> PairIds:
    """Those of a tokenizer; ValueError where it lacks one."""
    return PairIds(tokenizer.cls, tokenizer.sep, tokenizer.pad)


def as_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[Ids]:
    """The ids of each text, tokenized so many at a time: as arrays they take a tenth of the memory."""
    left = iter(texts)
    while block := list(itertools.islice(left, _TOGETHER)):
        yield from (np.array(ids, np.int32) for ids in tokenizer.tokenize_batch(block))


def room_for_pair(seq_length: int) -> int:
    """Tokens that the two texts of a sample may have together."""
    return seq_length - _AROUND


@dataclasses.dataclass(frozen=True)
class Example:
    """One question of a task.

    Attributes:
        name: tells it from all others of its set, and is the same in every run.
        group: what it is counted in: middle or high, the name of a GLUE file.
        label: number of the right answer.
        pairs: ids of text a and text b; one pair for each option that is to be scored, or a single one that is to be
            classified. Of a only as much is used as b leaves room for.
    """

    name: str
    group: str
    label: int
    pairs: tuple[tuple[Ids, Ids], ...]


class ExampleSet:
    """Examples as samples of one length, each a dict of arrays of its own.

    tokens, types, padding_mask: int64 [s], or [choices, s] where an example has several pairs: `[CLS] a [SEP] b [SEP]`
        filled up with [PAD]; 1 for b and the [SEP] behind it; 1 for a token and 0 for padding. A text a that is too
        long loses its end.
    label: int64 [].

    Raises ValueError, naming it, where an example's text b has no room.
    """

    def __init__(self, examples: Sequence[Example], seq_length: int, ids: PairIds) -> None:
        self.examples = examples
        self._seq_length = seq_length
        self._ids = ids
        self._check()

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> dict[str, NDArray[np.int64]]:
        example = self.examples[i]
        rows = np.stack([self._row(a, b) for a, b in example.pairs])  # [choices, 3, s]
        arrays = rows[0] if len(rows) == 1 else rows.swapaxes(0, 1)  # [3, s] or [3, choices, s]
        named = dict(zip(("tokens", "types", "padding_mask"), map(np.ascontiguousarray, arrays), strict=True))
        return {**named, "label": np.array(example.label, np.int64)}

    def identity(self) -> SetPart:
        """What tells it from other sets: how many examples and tokens, and a checksum of labels and lengths."""
        sizes = [(e.label, *(len(ids) for pair in e.pairs for ids in pair)) for e in self.examples]
        count, tokens = len(sizes), sum(sum(lengths) for _, *lengths in sizes)
        return SetPart("examples", count, tokens, zlib.crc32(repr(sizes).encode()), 0, count, 1.0, 1, False)

    def _row(self, a: Ids, b: Ids) -> NDArray[np.int64]:
        """Tokens, types and padding mask of one pair: [3, s]."""
        a = a[: room_for_pair(self._seq_length) - len(b)]
        row = np.zeros((3, self._seq_length), np.int64)
        n, second = _AROUND + len(a) + len(b), len(a) + 2
        row[0, :n] = np.concatenate([[self._ids.cls], a, [self._ids.sep], b, [self._ids.sep]])
        row[0, n:] = self._ids.pad
        row[1, second:n] = 1
        row[2, :n] = 1
        return row

    def _check(self) -> None:
        room = room_for_pair(self._seq_length)
        for example in self.examples:
            longest = max(len(b) for _, b in example.pairs)
            if longest > room:
                raise ValueError(
                    f"--seq-length {self._seq_length}: {example.name} needs at least {longest + _AROUND}, for a "
                    "question with its option is never cut"
                )
