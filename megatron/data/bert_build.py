"""From a set of sentences to the training, validation and test set of a BERT: split, the map kept in files."""

import zlib
from pathlib import Path

from megatron.data.bert_config import BertDataConfig
from megatron.data.bert_dataset import BertDataset, max_tokens
from megatron.data.bert_mapping import VERSION, BertMapping, build_bert_mapping
from megatron.data.bert_masking import BertIds
from megatron.data.cache import ArrayCache, Stored
from megatron.data.indexed import IndexedDataset
from megatron.data.splits import SPLIT_NAMES, parse_split, split_boundaries


def build_bert_datasets(
    indexed: IndexedDataset,
    split: str,
    seq_length: int,
    config: BertDataConfig,
    *,
    num_samples: tuple[int | None, int | None, int | None],
    seed: int,
    ids: BertIds,
    cache: ArrayCache | None = None,
) -> tuple[BertDataset | None, BertDataset | None, BertDataset | None]:
    """Train, validation and test dataset of one set of sentences, split over its documents as `--split` says.

    None stands for a dataset of which 0 samples are asked, and for a validation or test share without documents.

    Args:
        num_samples: samples asked for of each; None is one pass over its documents.
        cache: where the maps are kept; nowhere by default.

    Raises ValueError where the train share is empty or any share that is asked for makes no sample.
    """
    count = len(indexed.document_indices) - 1
    boundaries = split_boundaries(parse_split(split), count)
    if num_samples[0] != 0 and boundaries[1] == 0:
        raise ValueError(f"--split {split}: it leaves none of the {count} documents of {indexed.prefix} for training")

    def build(share: int) -> BertDataset | None:
        begin, end, asked, name = boundaries[share], boundaries[share + 1], num_samples[share], SPLIT_NAMES[share]
        if asked == 0 or begin == end:
            return None

        def make_mapping() -> BertMapping:
            return bert_mapping_of(indexed, begin, end, asked, seq_length, config, seed, cache or ArrayCache([]), name)

        documents = indexed.document_indices[begin : end + 1]
        return BertDataset(
            indexed, documents, asked, seq_length, seed, ids, config, name=name, make_mapping=make_mapping
        )

    return build(0), build(1), build(2)


def bert_mapping_of(
    indexed: IndexedDataset,
    begin: int,
    end: int,
    num_samples: int | None,
    seq_length: int,
    config: BertDataConfig,
    seed: int,
    cache: ArrayCache,
    name: str,
) -> BertMapping:
    """The map of documents `begin` to `end`, from the cache if it has it."""
    documents = indexed.document_indices[begin : end + 1]
    pairs = not config.bert_no_binary_head
    room = max_tokens(seq_length, pairs=pairs)
    determined_by = {
        "kind": "bert",
        "version": VERSION,
        "sizes": indexed.sizes_checksum,
        "documents": zlib.crc32(indexed.document_indices.data),
        "begin": begin,
        "end": end,
        "samples": num_samples,
        "max_tokens": room,
        "short_seq_prob": config.short_seq_prob,
        "pairs": pairs,
        "seed": seed,
    }

    def build() -> Stored:
        indexed.verify()
        return build_bert_mapping(
            indexed.sizes, documents, num_samples, room, config.short_seq_prob, seed, pairs=pairs
        ).stored()

    return BertMapping.from_stored(cache.get(f"{Path(indexed.prefix).name}-{name}", determined_by, build))
