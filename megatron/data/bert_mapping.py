"""Which sentences make which BERT sample, and in what order: the sample mapping.

The layout of the map and the rule by which sentences are gathered are Megatron-LM 2.5's. Its random numbers come from
generators of the C++ library and are not followed: the lengths of short samples and the order of the samples are our
own. Two things are done otherwise: documents with a very long sentence are kept (the sample is cut), and every epoch is
shuffled by itself, so that no sentence comes for the second time before all have come once.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import numpy as np

from megatron.data.bert_draws import Draws, hashed
from megatron.data.cache import Stored

VERSION = 1  # of the rows; part of the key under which they are kept
_BLOCK = 1 << 20  # sentences looked at together
_FEW = 32  # documents too few to be stepped through together
SHORTEST = 2  # tokens of the shortest sample: one for each segment of a pair


@dataclasses.dataclass(frozen=True)
class BertMapping:
    """The samples in the order in which they are given out.

    Attributes:
        rows: uint32 or int64 [n, 3]: first sentence of a sample, one past its last sentence, and the number of tokens
            it is to have, [CLS] and [SEP] not counted.
        epochs: how often the documents are gone through; each time is a run of rows of its own.
        left_out: documents that make no sample of a pair because they have one sentence.
    """

    rows: np.ndarray
    epochs: int
    left_out: int
    source: Stored | None = dataclasses.field(default=None, compare=False, repr=False)

    def stored(self) -> Stored:
        """The rows and numbers as a cache keeps them."""
        return Stored({"rows": self.rows}, {"epochs": self.epochs, "left_out": self.left_out})

    @classmethod
    def from_stored(cls, stored: Stored) -> Self:
        """What `stored` gave."""
        return cls(stored.arrays["rows"], stored.facts["epochs"], stored.facts["left_out"], source=stored)

    def __reduce__(self) -> tuple[Callable[[Stored], Self], tuple[Stored]]:
        # A worker process that does not inherit memory opens the files of the cache itself.
        return type(self).from_stored, (self.source or self.stored(),)


def build_bert_mapping(
    sizes: np.ndarray,
    documents: np.ndarray,
    num_samples: int | None,
    max_tokens: int,
    short_seq_prob: float,
    seed: int,
    *,
    pairs: bool = True,
) -> BertMapping:
    """The map of at least `num_samples` samples (None: one epoch), in whole epochs.

    In each epoch a document is cut into runs of sentences. A run ends where it has its target length, and two sentences
    if `pairs`, unless fewer than two sentences would be left for the next: these it takes too. The target is
    `max_tokens`, or with probability `short_seq_prob` any length from 2 to `max_tokens`, equally likely. So each
    sentence is in exactly one sample an epoch, except those of documents that are left out. Sentences without tokens
    count as absent.

    Args:
        sizes: tokens of every sentence of the set, [N].
        documents: boundaries of the documents to be used, [D+1]: document i is sentences documents[i] to
            documents[i+1]. A slice of the set's document index.
        max_tokens: the most tokens of a sample, at least 2.
        pairs: leave out documents with one sentence, which have no order that could be told.

    No samples come out where every document is left out or empty, however many are asked for. Takes about 40 bytes for
    each of up to a million sentences at a time (of one document if that has more) beside the result.
    """
    assert max_tokens >= SHORTEST, max_tokens
    assert len(documents), "the boundaries of no document are one number"
    dtype = np.dtype(np.uint32 if documents[-1] < 2**32 else np.int64)
    shuffler = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed % 2**64, 1])))
    maps: list[np.ndarray] = []
    while not maps or sum(map(len, maps)) < (num_samples or 0):
        lengths = _Lengths(max_tokens, short_seq_prob, int(Draws(seed, 2, len(maps)).bits(1)[0]))
        blocks = [_block_rows(sizes, block, lengths, pairs).astype(dtype) for block in _blocks(documents)]
        rows = np.concatenate(blocks or [np.empty((0, 3), dtype)])
        if len(rows) == 0:
            maps.append(rows)
            break
        maps.append(rows.take(_shuffled(len(rows), shuffler), axis=0))
    return BertMapping(np.concatenate(maps), len(maps), _lone(sizes, documents) if pairs else 0)


class _Lengths(NamedTuple):
    """Target lengths of one epoch: that of a sample depends on the sentence that it starts with alone."""

    longest: int
    short_seq_prob: float
    salt: int

    def of(self, sentences: np.ndarray) -> np.ndarray:
        """The target length of a sample that starts with each of `sentences`: int64 [n]."""
        words = hashed(sentences, self.salt)
        short = (words >> np.uint64(32)) < round(self.short_seq_prob * 2**32)
        choices = self.longest - SHORTEST + 1
        below = ((words & np.uint64(0xFFFFFFFF)) * np.uint64(choices) >> np.uint64(32)).astype(np.int64)
        return np.where(short, SHORTEST + below, self.longest)


def _shuffled(n: int, shuffler: np.random.RandomState) -> np.ndarray:
    order = np.arange(n, dtype=np.uint32 if n < 2**32 else np.int64)
    shuffler.shuffle(order)
    return order


def _blocks(documents: np.ndarray) -> Iterator[np.ndarray]:
    """The boundaries in runs of about `_BLOCK` sentences; neighbours share the boundary between them."""
    marks = np.arange(int(documents[0]) + _BLOCK, int(documents[-1]), _BLOCK)
    edges = np.unique([0, *np.searchsorted(documents, marks), len(documents) - 1])
    for begin, end in itertools.pairwise(edges):
        yield documents[begin : end + 1]


def _sentences(sizes: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sentences with tokens, int64 [n], and the boundaries of the documents that have any, counted in those."""
    first, end = int(documents[0]), int(documents[-1])
    present = sizes[first:end] > 0
    if present.all():
        sentences, boundaries = np.arange(first, end), documents - first
    else:
        sentences = np.flatnonzero(present) + first
        boundaries = np.concatenate([[0], np.cumsum(present)])[documents - first]
    return sentences, boundaries[np.concatenate([[True], boundaries[1:] > boundaries[:-1]])]


def _lone(sizes: np.ndarray, documents: np.ndarray) -> int:
    """Documents with exactly one sentence that has tokens."""
    return sum(int((np.diff(_sentences(sizes, block)[1]) == 1).sum()) for block in _blocks(documents))


def _block_rows(sizes: np.ndarray, documents: np.ndarray, lengths: _Lengths, pairs: bool) -> np.ndarray:
    """The samples of some documents, in the order of their sentences: int64 [n, 3]."""
    sentences, boundaries = _sentences(sizes, documents)
    if len(sentences) == 0:
        return np.empty((0, 3), np.int64)
    starts = _starts(sizes[sentences], sentences, boundaries, lengths, 2 if pairs else 1)
    ends = np.append(starts[1:], len(sentences))
    if pairs:
        enough = ends - starts >= 2  # only a document with one sentence has fewer
        starts, ends = starts[enough], ends[enough]
    first = sentences[starts]
    return np.stack([first, sentences[ends - 1] + 1, lengths.of(first)], axis=1)


def _starts(
    sizes: np.ndarray, sentences: np.ndarray, boundaries: np.ndarray, lengths: _Lengths, least: int
) -> np.ndarray:
    """Where samples start: rising positions in `sentences`, int64 [n], the start of every document among them.

    All documents take a step from one sample to the next together. When few are left, long ones, the steps from each
    of their sentences are computed at once, and what remains is to follow them.
    """
    tokens = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def next_start(at: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Where the sample that starts at each of `at` ends; `ends` are the ends of their documents."""
        full = np.searchsorted(tokens, tokens[at] + lengths.of(sentences[at]))
        after = np.maximum(full, at + least)
        return np.where(ends - after < 2, ends, after)

    is_start = np.zeros(len(sentences), bool)
    at, ends = boundaries[:-1], boundaries[1:]
    while len(at) > _FEW:
        is_start[at] = True
        at = next_start(at, ends)
        going = at < ends
        at, ends = at[going], ends[going]
    for begin, end in zip(at.tolist(), ends.tolist(), strict=True):
        while begin < end:
            every = np.arange(begin, min(begin + _BLOCK, end))
            reached, after = _followed((next_start(every, np.full_like(every, end)) - begin).tolist())
            is_start[begin + reached] = True
            begin += after
    return np.flatnonzero(is_start)


def _followed(steps: list[int]) -> tuple[np.ndarray, int]:
    """The positions reached from 0 by going from i to steps[i], int64 [n], and the first one past all `steps`."""
    reached, at = [], 0
    while at < len(steps):
        reached.append(at)
        at = steps[at]
    return np.array(reached, np.int64), at
