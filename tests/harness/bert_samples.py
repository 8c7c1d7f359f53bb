"""BERT's samples for tests: sets whose tokens tell where they stood, and what must hold of every sample."""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.bert_config import BertDataConfig
from megatron.data.bert_dataset import BertDataset
from megatron.data.bert_masking import BertIds
from megatron.data.indexed import IndexedDataset
from tests.harness.token_files import write_token_files

CLS, SEP, MASK, PAD = 2, 3, 4, 0
SPECIAL = frozenset({0, 1, 2, 3, 4})
FIRST = 10  # the tokens of a corpus are FIRST, FIRST+1, ...: each of them tells where it stood
VOCABULARY = 60_000
INT32 = 4
CONTINUES = np.arange(VOCABULARY) % 4 == 1
CONTINUES[:FIRST] = False
IDS = BertIds(CLS, SEP, MASK, PAD, SPECIAL, CONTINUES)
Item = dict[str, np.ndarray]


def numbered(sizes: list[list[int]]) -> list[list[list[int]]]:
    """Documents of sentences with so many tokens each, every token another id."""
    following = iter(range(FIRST, VOCABULARY))
    return [[[next(following) for _ in range(size)] for size in document] for document in sizes]


def a_corpus(documents: int, seed: int = 0) -> list[list[int]]:
    random = np.random.RandomState(seed)
    return [random.randint(1, 13, random.randint(1, 12)).tolist() for _ in range(documents)]


def a_dataset(
    folder: Path,
    sizes: list[list[int]],
    seq_length: int = 64,
    num_samples: int | None = None,
    seed: int = 1234,
    **config: Any,
) -> BertDataset:
    indexed = IndexedDataset(write_token_files(folder / "set_text_sentence", numbered(sizes), INT32))
    documents = indexed.document_indices
    return BertDataset(indexed, documents, num_samples, seq_length, seed, IDS, BertDataConfig(**config))


def plain_tokens(item: Item) -> np.ndarray:
    """The real tokens as they were before they were masked."""
    tokens = np.where(item["labels"] >= 0, item["labels"], item["tokens"])
    return tokens[: item["padding_mask"].sum()]


def segments_of(item: Item) -> list[list[int]]:
    """The one or two segments, unmasked, in the order of the text."""
    tokens = plain_tokens(item)
    ends = np.flatnonzero(tokens == SEP)
    segments = [tokens[1 : ends[0]].tolist()] + [tokens[ends[0] + 1 : end].tolist() for end in ends[1:]]
    return segments[::-1] if item["is_random"] else segments


def check_structure(item: Item, special: frozenset[int] = SPECIAL, pairs: bool = True) -> None:
    """What must hold of every sample, whatever the text."""
    tokens, types, labels, padding = (item[name] for name in ("tokens", "types", "labels", "padding_mask"))
    n = int(padding.sum())
    assert (padding[:n] == 1).all()
    assert not padding[n:].any()
    assert (tokens[n:] == PAD).all()
    assert (labels[n:] == -1).all()
    assert tokens[0] == CLS
    assert tokens[n - 1] == SEP
    plain = plain_tokens(item)
    ends = np.flatnonzero(plain == SEP)
    assert len(ends) == (2 if pairs else 1)
    assert (np.diff([0, *ends]) > 1).all(), "an empty segment"
    assert ((types == 1) == ((np.arange(len(types)) > ends[0]) & (padding == 1))).all()
    assert (types[: ends[0] + 1] == 0).all()
    masked = labels >= 0
    assert not set(labels[masked].tolist()) & special, "a special token masked"
    assert masked.any()


def check_item(item: Item, seq_length: int, pairs: bool = True) -> None:
    for name in ("tokens", "types", "labels", "padding_mask"):
        assert item[name].shape == (seq_length,)
        assert item[name].dtype == np.int64
    assert item["loss_mask"].dtype == np.float32
    np.testing.assert_array_equal(item["loss_mask"], item["labels"] >= 0)
    assert item["is_random"].shape == ()
    assert item["is_random"] in (0, 1)
    assert set(item) == {"tokens", "types", "labels", "loss_mask", "padding_mask", "is_random"}
    seen = item["tokens"][item["labels"] >= 0]
    assert not set(seen.tolist()) & (SPECIAL - {MASK}), "a special token as a random one"
    check_structure(item, pairs=pairs)


def within(count: int, trials: int, probability: float) -> bool:
    """Whether a binomial count is as near to its mean as sampling lets it be: 4 standard deviations."""
    return abs(count - trials * probability) <= 4 * math.sqrt(trials * probability * (1 - probability))


def digest(item: Item) -> str:
    return hashlib.sha256(b"".join(item[name].tobytes() for name in sorted(item))).hexdigest()


def digests(dataset: BertDataset, numbers: list[int]) -> list[str]:
    return [digest(dataset[i]) for i in numbers]
