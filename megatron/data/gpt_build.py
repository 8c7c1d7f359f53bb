"""From a `DataConfig` to the training, validation and test set of a GPT: split, blended, indices kept in files."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.data.blend import BlendedDataset
from megatron.data.cache import ArrayCache, Stored
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import GPTDataset, check_fills_a_sample
from megatron.data.gpt_indices import VERSION, GPTIndices, build_gpt_indices
from megatron.data.shares import Asked, Member, ShareMaker, index_cache

GPTData = GPTDataset | BlendedDataset


def build_gpt_datasets(
    config: DataConfig,
    *,
    num_samples: Asked,
    seed: int,
    eod_id: int | None,
    builds_indices: bool = True,
    verify: bool = False,
) -> tuple[GPTData | None, GPTData | None, GPTData | None]:
    """Train, validation and test dataset of the sets that `config` names.

    Each set of `--data-path` is split over its sequences, as 2.5 does; without sentence splitting these are its
    documents. Sets of `--train-data-path` and so on are used whole. None stands for a dataset of which 0 samples are
    asked, and for a share without documents or sets.

    Args:
        num_samples: samples asked for of each; None is one pass over its documents, which a blend has not.
        eod_id: the tokenizer's end of document, None where it has none.
        builds_indices: whether this process computes sample indices that the cache lacks (one process of a node
            should), or waits for them.
        verify: read all of the indices that the cache has.

    Raises ValueError where a set cannot be read or a set for training is empty, where one that is asked for does not
    fill a sample, and where indices do not appear in time.
    """
    cache = functools.partial(index_cache, config, builds=builds_indices, thorough=verify)
    maker = _Maker(config, seed, eod_id, cache)
    train, valid, test = ShareMaker(config, len, maker.make, cache).datasets(num_samples)
    return train, valid, test


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Makes the dataset of one set."""

    config: DataConfig
    seed: int
    eod_id: int | None
    cache: "functools.partial[ArrayCache]"

    def make(self, member: Member, num_samples: int | None, name: str, left_out: Sequence[str]) -> GPTDataset:
        """The dataset `name` ("train", ...) of `num_samples` samples of `member`."""
        config = self.config
        return GPTDataset(
            member.indexed,
            range(member.begin, member.end),
            num_samples,
            config.seq_length,
            self.seed,
            eod_id=self.eod_id,
            eod_mask_loss=config.eod_mask_loss,
            reset_position_ids=config.reset_position_ids,
            reset_attention_mask=config.reset_attention_mask,
            name=name,
            make_indices=lambda: self._indices(member, num_samples, name),
            left_out=left_out,
        )

    def _indices(self, member: Member, num_samples: int | None, name: str) -> GPTIndices:
        indexed, seq_length = member.indexed, self.config.seq_length

        def build() -> Stored:
            documents = np.arange(member.begin, member.end)
            indexed.verify()
            return build_gpt_indices(indexed.sizes, documents, num_samples, seq_length, self.seed).stored()

        # Told by every process alike, before one of them builds and the others wait.
        check_fills_a_sample(indexed, indexed.sizes[member.begin : member.end], seq_length, name)
        determined_by = {
            "kind": "gpt",
            "version": VERSION,
            "sequences": len(indexed),
            "sizes": indexed.sizes_checksum,
            "begin": member.begin,
            "end": member.end,
            "samples": num_samples,
            "seq_length": seq_length,
            "seed": self.seed,
        }
        stored = self.cache(indexed.prefix).get(f"{Path(indexed.prefix).name}-{name}", determined_by, build)
        return GPTIndices.from_stored(stored)
