"""Which tokens make which GPT sample, and in what order: document, sample and shuffle index of Megatron-LM 2.5.

The stream of a set is its documents, repeated once an epoch and shuffled. Sample i is its tokens i*S to (i+1)*S, both
included: S inputs and, shifted by one, S targets. The same seed, sizes and counts give 2.5's arrays, value for value.
"""

import dataclasses
from collections.abc import Callable
from typing import Self

import numpy as np

from megatron.data.cache import Stored

VERSION = 1  # of the arrays; part of the key under which they are kept
_CHUNK = 1 << 16  # documents looked at together: what is made of them stays in the processor's cache


@dataclasses.dataclass(frozen=True)
class GPTIndices:
    """The three arrays.

    Attributes:
        documents: int32 or int64 [E * docs], the documents in the order of the stream.
        samples: int32 or int64 [n+1, 2]: position in `documents` and token offset in that document where sample i
            starts; sample i ends on the token where sample i+1 starts.
        shuffle: uint32 or int64 [n], the samples in the order in which they are given out.
        epochs: E.
        tokens: of one epoch.
    """

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray
    epochs: int
    tokens: int
    source: Stored | None = dataclasses.field(default=None, compare=False, repr=False)

    def stored(self) -> Stored:
        """The arrays and numbers as a cache keeps them."""
        arrays = {"documents": self.documents, "samples": self.samples, "shuffle": self.shuffle}
        return Stored(arrays, {"epochs": self.epochs, "tokens": self.tokens})

    @classmethod
    def from_stored(cls, stored: Stored) -> Self:
        """What `stored` gave."""
        arrays, facts = stored.arrays, stored.facts
        return cls(
            arrays["documents"], arrays["samples"], arrays["shuffle"], facts["epochs"], facts["tokens"], source=stored
        )

    def __reduce__(self) -> tuple[Callable[[Stored], Self], tuple[Stored]]:
        # A worker process that does not inherit memory opens the files of the cache itself.
        return type(self).from_stored, (self.source or self.stored(),)


def epochs_needed(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """Least E >= 1 with `(E * tokens_per_epoch - 1) // seq_length >= num_samples`."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def build_gpt_indices(
    sizes: np.ndarray, documents: np.ndarray, num_samples: int | None, seq_length: int, seed: int
) -> GPTIndices:
    """Indices for at least `num_samples` samples (None: one epoch) of `seq_length` + 1 tokens from `documents`.

    `sizes` [N] are the tokens of every sequence of the set, `documents` [docs] the numbers of those to be used. One
    `RandomState(seed)` shuffles the documents, then the samples.
    """
    random = np.random.RandomState(seed)
    tokens = int(sizes[documents].sum(dtype=np.int64))
    epochs = 1 if num_samples is None else epochs_needed(tokens, seq_length, num_samples)
    whole = samples_of_whole_epochs(tokens, seq_length, epochs, num_samples)
    order = _document_order(documents, epochs, whole is not None, random)
    samples = _sample_starts(sizes, order, epochs * tokens, seq_length)
    return GPTIndices(order, samples, _sample_order(len(samples) - 1, whole, random), epochs, tokens)


def samples_of_whole_epochs(tokens: int, seq_length: int, epochs: int, num_samples: int | None) -> int | None:
    """Samples in all epochs but the last where the last is kept apart, None where it is mixed with the others.

    It is kept apart when less than 80 % of it is asked for: mixed in, some documents would be seen once more than
    others long before the end.
    """
    if epochs == 1 or num_samples is None:
        return None
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    per_epoch = (tokens - 1) // seq_length
    return before_last if num_samples - before_last < int(0.80 * per_epoch) else None


def _document_order(
    documents: np.ndarray, epochs: int, separate_last: bool, random: np.random.RandomState
) -> np.ndarray:
    total = epochs * len(documents)
    limit = max(total, int(documents.max(initial=0)))
    order = np.tile(documents.astype(np.int32 if limit < 2**31 else np.int64), epochs)
    apart = total - len(documents) if separate_last else total
    random.shuffle(order[:apart])
    if separate_last:
        random.shuffle(order[apart:])
    return order


def _sample_starts(sizes: np.ndarray, order: np.ndarray, tokens: int, seq_length: int) -> np.ndarray:
    """Where token i * seq_length of the `tokens` of the stream lies: rows (position in `order`, offset in it)."""
    total = (tokens - 1) // seq_length + 1
    samples = np.empty((total, 2), np.int32 if len(order) < 2**31 else np.int64)
    begun, passed = 0, 0  # samples and tokens before the chunk
    for chunk in range(0, len(order), _CHUNK):
        ends = passed + np.cumsum(sizes[order[chunk : chunk + _CHUNK]], dtype=np.int64)
        # samples that start before the end of each document, and so in each document
        until = np.minimum((ends + (seq_length - 1)) // seq_length, total)
        counts = np.diff(until, prepend=begun)
        positions = np.repeat(np.arange(len(ends)), counts)
        before = np.concatenate([[passed], ends[:-1]])
        stop = begun + len(positions)
        samples[begun:stop, 0] = positions + chunk
        samples[begun:stop, 1] = np.arange(begun, stop) * seq_length - before[positions]
        begun, passed = stop, int(ends[-1])
    samples[0] = 0  # 2.5 starts on the first document even where that is empty
    return samples


def _sample_order(total: int, whole: int | None, random: np.random.RandomState) -> np.ndarray:
    order = np.arange(total, dtype=np.uint32 if total < 2**32 - 2 else np.int64)
    random.shuffle(order[:whole])
    if whole is not None:
        random.shuffle(order[whole:])
    return order
