"""Samples for a GPT: tokens, labels, loss mask and documents cut from the stream of documents of a token set."""

import dataclasses
import os
from collections.abc import Callable, Sequence

import numpy as np

from megatron.data.blend import left_out_lines
from megatron.data.gpt_indices import GPTIndices, build_gpt_indices, samples_of_whole_epochs
from megatron.data.identity import SetPart
from megatron.data.indexed import IndexedDataset

# Arrays of a batch that the host reads and no device needs: lengths are what kernels are called with.
HOST_KEYS = frozenset({"document_lengths"})


@dataclasses.dataclass(frozen=True)
class DocumentRules:
    """What the end of a document within a sample means.

    Attributes:
        eod_id: the token that ends a document, None where there is none.
        mask_loss: leave that token's own prediction out of the loss.
        reset_positions: positions begin at 0 after it.
        reset_attention: what follows does not see what is before.
    """

    eod_id: int | None = None
    mask_loss: bool = False
    reset_positions: bool = False
    reset_attention: bool = False

    def __post_init__(self) -> None:
        if self.mask_loss and self.eod_id is None:
            raise ValueError("--eod-mask-loss: the tokenizer has no end-of-document token")

    @property
    def divide(self) -> bool:
        """Whether it matters where in a sample documents begin."""
        return self.reset_positions or self.reset_attention


class GPTDataset:
    """Samples of `seq_length` tokens and their successors, in the order of Megatron-LM 2.5.

    An item is a dict of arrays of its own: `tokens` int64 [s], `labels` int64 [s] (the token after each) and
    `loss_mask` float32 [s], which is 1, or 0 with `eod_mask_loss` where the input token is `eod_id` (as in Megatron-LM:
    the first token of a document cannot be foretold from the document before). With `reset_position_ids` there are
    `position_ids` int64 [s], which begin at 0 in each document; with `reset_attention_mask` `document_lengths` int32
    [s], the tokens of each document in the sample, and zeros behind them. A document ends after `eod_id`, and where the
    token set's own does.

    Args:
        indexed: the token set.
        documents: numbers of its sequences that belong to this dataset.
        num_samples: how many samples will be asked for at least: the documents are repeated as often as it takes.
            None is one pass. `len()` may be larger: it counts all samples of the last pass.
        name: what complaints call it.
        make_indices: gives the arrays in place of computing them from the other arguments.
        left_out: sets that `report()` tells beside this one.

    Raises ValueError where the documents do not fill one sample, or are no integers.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: Sequence[int] | np.ndarray,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        *,
        eod_id: int | None = None,
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        name: str = "train",
        make_indices: Callable[[], GPTIndices] | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        self.rules = DocumentRules(eod_id, eod_mask_loss, reset_position_ids, reset_attention_mask)
        indexed.check_integers()
        self.indexed = indexed
        self.seq_length = seq_length
        self.name = name
        self.asked = num_samples
        self.left_out = tuple(left_out)
        self._span = (int(documents[0]), int(documents[-1]) + 1) if len(documents) else (0, 0)
        if make_indices is None:
            numbers = np.asarray(documents, dtype=np.int64)
            check_fills_a_sample(indexed, indexed.sizes[numbers], seq_length, name)
            self.indices = build_gpt_indices(indexed.sizes, numbers, num_samples, seq_length, seed)
        else:
            self.indices = make_indices()

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        pieces = self._pieces(int(self.indices.shuffle[i]))
        stream = np.concatenate(pieces, dtype=np.int64)  # [s+1]
        tokens = stream[:-1]
        mask = np.ones(len(tokens), np.float32)
        if self.rules.mask_loss:
            mask[tokens == self.rules.eod_id] = 0.0
        item: dict[str, np.ndarray] = {"tokens": tokens, "labels": stream[1:].copy(), "loss_mask": mask}
        return (item | self._documents(tokens, pieces)) if self.rules.divide else item

    def _pieces(self, sample: int) -> list[np.ndarray]:
        """The s+1 tokens of a sample: views of the file, one for each document that it touches."""
        (first, start), (last, end) = self.indices.samples[sample : sample + 2].tolist()
        documents = self.indices.documents[first : last + 1].tolist()
        if first == last:
            return [self.indexed.get(documents[0], start, end - start + 1)]
        pieces = [self.indexed.get(documents[0], start)]
        pieces += [self.indexed.get(document) for document in documents[1:-1]]
        pieces.append(self.indexed.get(documents[-1], 0, end + 1))
        return pieces

    def _documents(self, tokens: np.ndarray, pieces: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """What an item says about the documents in it."""
        starts = document_starts(tokens, [len(piece) for piece in pieces], self.rules.eod_id)
        lengths = np.diff(starts, append=len(tokens))
        said: dict[str, np.ndarray] = {}
        if self.rules.reset_positions:
            said["position_ids"] = np.arange(len(tokens)) - np.repeat(starts, lengths)
        if self.rules.reset_attention:
            said["document_lengths"] = np.zeros(len(tokens), np.int32)
            said["document_lengths"][: len(lengths)] = lengths
        return said

    def epochs(self, samples: int) -> float:
        """How often `samples` samples go through the documents."""
        return samples * self.seq_length / self.indices.tokens

    def identity(self) -> list[SetPart]:
        """Which documents it draws from in which order: the only part of the set."""
        epochs, tokens, store = self.indices.epochs, self.indices.tokens, self.indexed
        apart = samples_of_whole_epochs(tokens, self.seq_length, epochs, self.asked) is not None
        content = (os.path.basename(store.prefix), len(store), store.tokens, store.sizes_checksum)
        return [SetPart(*content, *self._span, share=1.0, epochs=epochs, last_apart=apart)]

    def report(self) -> list[str]:
        """What the dataset is, in a line; one more where sets are left out beside it."""
        samples = len(self) if self.asked is None else self.asked
        return [
            f"{self.name}: {samples:,} samples from {self.indexed.prefix}, {self.epochs(samples):.3f} epochs of "
            f"{self.indices.tokens:,} tokens",
            *left_out_lines(self.left_out),
        ]


def document_starts(tokens: np.ndarray, pieces: Sequence[int], eod_id: int | None) -> np.ndarray:
    """Where documents begin among `tokens` [s], which are cut from pieces of these lengths: int64, rising, 0 first."""
    starts = [np.zeros(1, np.int64), np.cumsum(pieces)]
    if eod_id is not None:
        starts.append(np.flatnonzero(tokens == eod_id) + 1)
    found = np.unique(np.concatenate(starts))
    return found[found < len(tokens)]


def check_fills_a_sample(indexed: IndexedDataset, sizes: np.ndarray, seq_length: int, name: str) -> None:
    """ValueError where documents of `indexed` with these `sizes` have too few tokens for one sample."""
    tokens = int(sizes.sum(dtype=np.int64))
    if tokens < seq_length + 1:
        raise ValueError(
            f"{indexed.prefix}: its {name} share has {len(sizes)} documents with {tokens} tokens, but one sample "
            f"of --seq-length {seq_length} takes {seq_length + 1}: give more text, another --split or a shorter sample"
        )
