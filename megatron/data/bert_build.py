"""From a `DataConfig` to the training, validation and test set of a BERT: split, blended, the map kept in files."""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from pathlib import Path

from megatron.data.bert_config import BertDataConfig
from megatron.data.bert_dataset import BertDataset, max_tokens
from megatron.data.bert_mapping import VERSION, BertMapping, build_bert_mapping
from megatron.data.bert_masking import BertIds
from megatron.data.blend import BlendedDataset
from megatron.data.cache import ArrayCache, Stored
from megatron.data.config import DataConfig
from megatron.data.indexed import IndexedDataset
from megatron.data.shares import Asked, Member, ShareMaker, index_cache

BertData = BertDataset | BlendedDataset


def build_bert_datasets(
    config: DataConfig,
    choices: BertDataConfig,
    *,
    num_samples: Asked,
    seed: int,
    ids: BertIds,
    builds_indices: bool = True,
    verify: bool = False,
) -> tuple[BertData | None, BertData | None, BertData | None]:
    """Train, validation and test dataset of the sets of sentences that `config` names.

    Each set of `--data-path` is split over its documents. Sets of `--train-data-path` and so on are used whole. None
    stands for a dataset of which 0 samples are asked, and for a share without documents or sets.

    Args:
        num_samples: samples asked for of each; None is one pass over its documents, which a blend has not.
        builds_indices: whether this process computes maps that the cache lacks (one process of a node should), or waits
            for them.
        verify: read all of the maps that the cache has.

    Raises ValueError where a set cannot be read, the train share is empty or any share that is asked for makes no
    sample, and where maps do not appear in time.
    """
    cache = functools.partial(index_cache, config, builds=builds_indices, thorough=verify)
    maker = _Maker(config.seq_length, choices, seed, ids, cache)
    train, valid, test = ShareMaker(config, _documents, maker.make, cache).datasets(num_samples)
    return train, valid, test


def _documents(indexed: IndexedDataset) -> int:
    return len(indexed.document_indices) - 1


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Makes the dataset of one set."""

    seq_length: int
    choices: BertDataConfig
    seed: int
    ids: BertIds
    cache: "functools.partial[ArrayCache]"

    def make(self, member: Member, num_samples: int | None, name: str, left_out: Sequence[str]) -> BertDataset:
        """The dataset `name` ("train", ...) of `num_samples` samples of `member`."""
        return BertDataset(
            member.indexed,
            member.indexed.document_indices[member.begin : member.end + 1],
            num_samples,
            self.seq_length,
            self.seed,
            self.ids,
            self.choices,
            name=name,
            make_mapping=lambda: self._mapping(member, num_samples, name),
            left_out=left_out,
        )

    def _mapping(self, member: Member, num_samples: int | None, name: str) -> BertMapping:
        """The map of a set's documents, from the cache if it has it."""
        indexed, pairs = member.indexed, not self.choices.bert_no_binary_head
        documents = indexed.document_indices[member.begin : member.end + 1]
        room, short = max_tokens(self.seq_length, pairs=pairs), self.choices.short_seq_prob
        determined_by = {
            "kind": "bert",
            "version": VERSION,
            "sizes": indexed.sizes_checksum,
            "documents": zlib.crc32(indexed.document_indices.data),
            "begin": member.begin,
            "end": member.end,
            "samples": num_samples,
            "max_tokens": room,
            "short_seq_prob": short,
            "pairs": pairs,
            "seed": self.seed,
        }

        def build() -> Stored:
            indexed.verify()
            return build_bert_mapping(
                indexed.sizes, documents, num_samples, room, short, self.seed, pairs=pairs
            ).stored()

        stored = self.cache(indexed.prefix).get(f"{Path(indexed.prefix).name}-{name}", determined_by, build)
        return BertMapping.from_stored(stored)
