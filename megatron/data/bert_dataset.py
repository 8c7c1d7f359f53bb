"""Samples for BERT: pairs of segments whose order is to be told, with tokens to be predicted."""

import os
from collections.abc import Callable, Sequence

import numpy as np

from megatron.data.bert_config import BertDataConfig
from megatron.data.bert_draws import Draws
from megatron.data.bert_mapping import SHORTEST, BertMapping, build_bert_mapping
from megatron.data.bert_masking import NOT_MASKED, BertIds, mask_tokens
from megatron.data.blend import left_out_lines
from megatron.data.identity import SetPart
from megatron.data.indexed import IndexedDataset


class BertDataset:
    """Samples `[CLS] a [SEP] b [SEP]` from the sentences of documents, as Megatron-LM makes them.

    A sample is a run of sentences of one document (`bert_mapping`), cut in two between sentences; in half of the
    samples the parts change places. Where they have more tokens than the sample is to have, the longer part is
    shortened until both fit, at its two ends: where the piece that is kept begins is drawn evenly, so that over the
    epochs every token of a long sentence can be seen. Then tokens are masked (`bert_masking`). Without pairs
    (`--bert-no-binary-head`) a sample is `[CLS] a [SEP]`.

    An item is a dict of arrays of its own, int64 [s] unless said otherwise:
        tokens: what the model sees, filled up with [PAD].
        types: 1 for b and the [SEP] behind it, else 0.
        labels: the token where it is to be predicted, else -1.
        loss_mask: float32 [s], 1 where there is a label.
        padding_mask: 1 for a token, 0 for padding.
        is_random: int64 [], 1 where the parts changed places.

    Item i depends on the seed, on i and on its sentences alone: it is the same on every rank, in every worker and
    after a resume. A document comes back in a later epoch under another number, so with other masks.

    Documents of one sentence have no order that could be told. As in Megatron-LM they make no pairs; `report()` tells
    how many they are. Without pairs they are used.

    Args:
        indexed: a set of sentences (`PREFIX_KEY_sentence`), whose document index says which belong together.
        documents: boundaries of the documents that belong to this dataset, a slice [D+1] of that index.
        num_samples: how many samples will be asked for at least: the documents are repeated as often as it takes. None
            is one pass. `len()` may be larger: it counts all samples of the last pass.
        name: what complaints call it.
        make_mapping: gives the map in place of computing it from the other arguments.
        left_out: sets that `report()` tells beside this one.

    Raises ValueError where no document makes a sample, or tokens are no integers; an item, where it holds an id outside
    the vocabulary.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: np.ndarray,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        ids: BertIds,
        config: BertDataConfig,
        *,
        name: str = "train",
        make_mapping: Callable[[], BertMapping] | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        indexed.check_integers()
        self.indexed = indexed
        self.seq_length = seq_length
        self.name = name
        self.asked = num_samples
        self.documents = len(documents) - 1
        self._span = (int(documents[0]), int(documents[-1]))
        self.left_out = tuple(left_out)
        self._seed = seed
        self._ids = ids
        self._mask_prob = config.mask_prob
        self._pairs = not config.bert_no_binary_head
        room = max_tokens(seq_length, pairs=self._pairs)
        if make_mapping is None:
            sizes, short = indexed.sizes, config.short_seq_prob
            self.mapping = build_bert_mapping(sizes, documents, num_samples, room, short, seed, pairs=self._pairs)
        else:
            self.mapping = make_mapping()
        self._check_has_samples()

    def __len__(self) -> int:
        return len(self.mapping.rows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        first, end, target = self.mapping.rows[i].tolist()
        draws = Draws(self._seed, int(i), first, target)
        segments, swapped = self._segments(first, end, target, draws)
        return self._item(segments, swapped, draws)

    def epochs(self, samples: int) -> float:
        """How often `samples` samples go through the documents."""
        return samples * self.mapping.epochs / len(self)

    def identity(self) -> list[SetPart]:
        """Which sentences it draws from: the only part of the set.

        Each pass is shuffled by itself, in the same order however many there are.
        """
        store, (begin, end) = self.indexed, self._span
        content = (os.path.basename(store.prefix), len(store), store.tokens, store.sizes_checksum)
        return [SetPart(*content, begin, end, share=1.0, epochs=1, last_apart=False)]

    def report(self) -> list[str]:
        """What was made of the documents: a line, and one more where some are left out."""
        samples = len(self) if self.asked is None else self.asked
        found = [
            f"{self.name}: {samples:,} samples from {self.indexed.prefix}, {self.epochs(samples):.3f} epochs of "
            f"{self.documents:,} documents"
        ]
        if self.mapping.left_out:
            found.append(
                f"{self.name}: {self.mapping.left_out:,} of these documents are left out, as they have one sentence "
                "and so no order to predict"
            )
        return found + left_out_lines(self.left_out)

    def _check_has_samples(self) -> None:
        if len(self):
            return
        what, help_ = "a sentence with tokens", ""
        if self._pairs:
            what = "two sentences, which the prediction of their order takes"
            help_ = (
                ": preprocess with --split-sentences, give the share more documents (--split), or train with "
                "--bert-no-binary-head"
            )
        raise ValueError(
            f"{self.indexed.prefix}: none of the {self.documents} documents of its {self.name} share has {what}{help_}"
        )

    def _segments(self, first: int, end: int, target: int, draws: Draws) -> tuple[list[np.ndarray], bool]:
        """The one or two segments of a sample, `target` tokens at most in all, and whether they changed places."""
        sizes = self.indexed.sizes[first:end]
        present = np.flatnonzero(sizes)
        if not self._pairs:
            total = int(sizes.sum(dtype=np.int64))
            return [self._window(first, end, total, min(total, target), draws)], False
        middle = first + int(present[1 + draws.below(len(present) - 1)])
        swapped = draws.below(2) == 1
        parts = [(middle, end), (first, middle)] if swapped else [(first, middle), (middle, end)]
        totals = [int(self.indexed.sizes[begin:stop].sum(dtype=np.int64)) for begin, stop in parts]
        kept = shortened(totals[0], totals[1], target)
        segments = [
            self._window(begin, stop, total, keep, draws)
            for (begin, stop), total, keep in zip(parts, totals, kept, strict=True)
        ]
        return segments, swapped

    def _window(self, first: int, end: int, total: int, keep: int, draws: Draws) -> np.ndarray:
        """`keep` consecutive ones of the `total` tokens of sentences `first` to `end`: int64 [keep]."""
        skip = draws.below(total - keep + 1)
        pieces: list[np.ndarray] = []
        for sentence, size in enumerate(self.indexed.sizes[first:end].tolist(), first):
            if skip < size and keep:
                pieces.append(self.indexed.get(sentence, skip, min(size - skip, keep)))
                keep -= len(pieces[-1])
            skip = max(skip - size, 0)
        return np.concatenate(pieces, dtype=np.int64)

    def _item(self, segments: list[np.ndarray], swapped: bool, draws: Draws) -> dict[str, np.ndarray]:
        ids, sep = self._ids, np.array([self._ids.sep])
        plain = np.concatenate([[ids.cls], *(piece for segment in segments for piece in (segment, sep))])
        n = len(plain)
        if int(plain.view(np.uint64).max()) >= ids.vocab_size:
            low, high = plain.min(), plain.max()
            raise ValueError(
                f"{self.indexed.prefix}: ids {low} to {high} in a sample, but the tokenizer's vocabulary has "
                f"{ids.vocab_size}: it was tokenized with another one"
            )
        tokens = np.full(self.seq_length, ids.pad, np.int64)
        labels = np.full(self.seq_length, NOT_MASKED, np.int64)
        types, padding_mask = np.zeros((2, self.seq_length), np.int64)
        tokens[:n], labels[:n] = mask_tokens(plain, ids, self._mask_prob, draws)
        types[len(segments[0]) + 2 : n] = 1
        padding_mask[:n] = 1
        return {
            "tokens": tokens,
            "types": types,
            "labels": labels,
            "loss_mask": (labels != NOT_MASKED).astype(np.float32),
            "padding_mask": padding_mask,
            "is_random": np.array(int(swapped), np.int64),
        }


def max_tokens(seq_length: int, *, pairs: bool) -> int:
    """Tokens that a sample has room for beside [CLS] and one [SEP] or two; ValueError where they are too few."""
    room = seq_length - (3 if pairs else 2)
    if room < SHORTEST:
        raise ValueError(f"--seq-length {seq_length}: a sample for BERT takes at least {seq_length - room + SHORTEST}")
    return room


def shortened(a: int, b: int, target: int) -> tuple[int, int]:
    """Lengths of two segments after tokens are taken, one by one, from the longer (b if equal) down to `target`."""
    if a + b <= target:
        return a, b
    shorter = min(a, b, target // 2)
    return (shorter, target - shorter) if shorter == a < b else (target - shorter, shorter)
