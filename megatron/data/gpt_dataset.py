"""Samples for a GPT: tokens, labels and loss mask cut from the stream of documents of a token set."""

from collections.abc import Sequence

import numpy as np

from megatron.data.config import DataConfig, open_token_set
from megatron.data.gpt_indices import build_gpt_indices
from megatron.data.indexed import IndexedDataset
from megatron.data.splits import SPLIT_NAMES, parse_split, split_boundaries


class GPTDataset:
    """Samples of `seq_length` tokens and their successors, in the order of Megatron-LM 2.5.

    An item is a dict of arrays of its own: `tokens` int64 [s], `labels` int64 [s] (the token after each) and
    `loss_mask` float32 [s], which is 1, or 0 with `eod_mask_loss` where the input token is `eod_id` (as in Megatron-LM:
    the first token of a document cannot be foretold from the document before).

    Args:
        indexed: the token set.
        documents: numbers of its sequences that belong to this dataset.
        num_samples: how many samples will be asked for at least: the documents are repeated as often as it takes.
            None is one pass. `len()` may be larger: it counts all samples of the last pass.
        name: what complaints call it.

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
        name: str = "train",
    ) -> None:
        if eod_mask_loss and eod_id is None:
            raise ValueError("--eod-mask-loss: the tokenizer has no end-of-document token")
        if indexed.dtype.kind == "f":
            raise ValueError(f"{indexed.prefix}.bin holds {indexed.dtype.name} numbers: token ids are integers")
        numbers = np.asarray(documents, dtype=np.int64)
        _check_fills_a_sample(indexed, numbers, seq_length, name)
        self.indexed = indexed
        self.seq_length = seq_length
        self.name = name
        self.indices = build_gpt_indices(indexed.sizes, numbers, num_samples, seq_length, seed)
        self._masked_id = eod_id if eod_mask_loss else None

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        stream = self._sample_tokens(int(self.indices.shuffle[i]))  # [s+1]
        tokens = stream[:-1]
        mask = np.ones(len(tokens), np.float32)
        if self._masked_id is not None:
            mask[tokens == self._masked_id] = 0.0
        return {"tokens": tokens, "labels": stream[1:].copy(), "loss_mask": mask}

    def _sample_tokens(self, sample: int) -> np.ndarray:
        """The s+1 tokens of a sample, int64, gathered from the documents that it touches."""
        (first, start), (last, end) = self.indices.samples[sample : sample + 2].tolist()
        documents = self.indices.documents[first : last + 1].tolist()
        if first == last:
            return self.indexed.get(documents[0], start, end - start + 1).astype(np.int64)
        pieces = [self.indexed.get(documents[0], start)]
        pieces += [self.indexed.get(document) for document in documents[1:-1]]
        pieces.append(self.indexed.get(documents[-1], 0, end + 1))
        return np.concatenate(pieces, dtype=np.int64)


def _check_fills_a_sample(indexed: IndexedDataset, documents: np.ndarray, seq_length: int, name: str) -> None:
    tokens = int(indexed.sizes[documents].sum(dtype=np.int64))
    if tokens < seq_length + 1:
        raise ValueError(
            f"{indexed.prefix}: its {name} share has {len(documents)} documents with {tokens} tokens, but one sample "
            f"of --seq-length {seq_length} takes {seq_length + 1}: give more text, another --split or a shorter sample"
        )


def build_gpt_datasets(
    config: DataConfig, *, num_samples: tuple[int | None, int | None, int | None], seed: int, eod_id: int | None
) -> tuple[GPTDataset | None, GPTDataset | None, GPTDataset | None]:
    """Train, validation and test dataset of `config.data_path`.

    The set is split over its sequences, as 2.5 does; without sentence splitting these are its documents. None stands
    for a dataset of which 0 samples are asked, and for a validation or test share without documents.

    Args:
        num_samples: samples asked for of each; None is one pass over its documents.
        eod_id: the tokenizer's end of document, None where it has none.

    Raises ValueError where the set cannot be read, and where the train share is empty or any share that is asked for
    does not fill one sample.
    """
    indexed = open_token_set(config)
    boundaries = split_boundaries(parse_split(config.split), len(indexed))
    if num_samples[0] != 0 and boundaries[1] == 0:
        raise ValueError(
            f"--split {config.split}: it leaves none of the {len(indexed)} documents of {config.data_path} for training"
        )

    def build(share: int) -> GPTDataset | None:
        documents = np.arange(boundaries[share], boundaries[share + 1])
        if num_samples[share] == 0 or len(documents) == 0:
            return None
        return GPTDataset(
            indexed,
            documents,
            num_samples[share],
            config.seq_length,
            seed,
            eod_id=eod_id,
            eod_mask_loss=config.eod_mask_loss,
            name=SPLIT_NAMES[share],
        )

    return build(0), build(1), build(2)
