"""From a `DataConfig` to the training, validation and test set of a GPT: split, blended, indices kept in files."""

import dataclasses
import math
import os
from pathlib import Path

import numpy as np

from megatron.base.complaints import problems_of, raise_joined
from megatron.data.blend import Blend, BlendedDataset, TokenStore, TokenStores, samples_of_each
from megatron.data.cache import ArrayCache, Stored
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import GPTDataset, check_fills_a_sample
from megatron.data.gpt_indices import VERSION, GPTIndices, build_gpt_indices
from megatron.data.indexed import IndexedDataset
from megatron.data.splits import SPLIT_NAMES, parse_split, split_boundaries
from megatron.data.token_sets import open_token_sets

GPTData = GPTDataset | BlendedDataset


def build_gpt_datasets(
    config: DataConfig,
    *,
    num_samples: tuple[int | None, int | None, int | None],
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
    maker = _Maker(config, seed, eod_id, builds_indices, verify)
    if config.data_path is not None:
        (name, blend), *_ = config.blends().items()
        sets = _Sets.open(blend, name)
        parts: list[_Sets | None] = [sets.share(config.split, share) for share in range(3)]
        if num_samples[0] != 0 and parts[0] is None:
            raise ValueError(
                f"--split {config.split}: it leaves none of the {len(sets.members[0].indexed)} documents of "
                f"{sets.members[0].indexed.prefix} for training"
            )
    else:
        blends = config.blends()
        names = [f"--{name}-data-path" for name in SPLIT_NAMES]
        parts = [_Sets.open(blends[name], name) if name in blends else None for name in names]
    train, valid, test = (
        None if part is None or samples == 0 else maker.make(part, samples, share)
        for part, samples, share in zip(parts, num_samples, SPLIT_NAMES, strict=True)
    )
    return train, valid, test


@dataclasses.dataclass(frozen=True)
class _Member:
    """Sequences `begin` to `end` of a token set, and the set's part of the samples."""

    indexed: IndexedDataset
    begin: int
    end: int
    weight: float


@dataclasses.dataclass(frozen=True)
class _Sets:
    """What a dataset is drawn from."""

    members: tuple[_Member, ...]
    tokens: TokenStore
    left_out: tuple[str, ...] = ()  # sets without a document in this share

    def shares(self) -> list[float]:
        """The weights of the members, which add up to 1; where none is left out they stay what they are."""
        weights = [member.weight for member in self.members]
        total = math.fsum(weights) if self.left_out else 1.0
        return [weight / total for weight in weights]

    @classmethod
    def open(cls, blend: Blend, name: str) -> "_Sets":
        opened = open_token_sets(blend, name)
        members = (
            _Member(indexed, 0, len(indexed), weight) for indexed, weight in zip(opened, blend.shares(), strict=True)
        )
        return cls(tuple(members), opened[0] if len(opened) == 1 else TokenStores(opened))

    def share(self, split: str, number: int) -> "_Sets | None":
        """The share with that number of every set; sets that have no document in it are left out."""
        weights = parse_split(split)
        parts, left_out = [], []
        for member in self.members:
            begin, end = split_boundaries(weights, len(member.indexed))[number : number + 2]
            if begin < end:
                parts.append(dataclasses.replace(member, begin=begin, end=end))
            else:
                left_out.append(member.indexed.prefix)
        return _Sets(tuple(parts), self.tokens, tuple(left_out)) if parts else None


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Makes datasets from sets."""

    config: DataConfig
    seed: int
    eod_id: int | None
    builds: bool
    verify: bool

    def make(self, sets: _Sets, num_samples: int | None, name: str) -> GPTData:
        """The dataset `name` ("train", ...) of `num_samples` samples of `sets`."""
        if len(sets.members) == 1:
            return self._single(sets.members[0], num_samples, name, sets.left_out)
        if num_samples is None:
            raise ValueError(f"{name}: a blend of token sets has no single pass; ask for a number of samples")
        return self._blended(sets, num_samples, name)

    def _blended(self, sets: _Sets, num_samples: int, name: str) -> BlendedDataset:
        shares = sets.shares()
        datasets, found = [], []
        for member, samples in zip(sets.members, samples_of_each(shares, num_samples), strict=True):
            try:
                datasets.append(self._single(member, samples, name))
            except ValueError as error:
                found += problems_of(error)
        raise_joined(found)
        return BlendedDataset(
            datasets,
            [member.indexed.prefix for member in sets.members],
            shares,
            num_samples,
            indexed=sets.tokens,
            cache=self._cache(sets.members[0].indexed.prefix),
            name=name,
            left_out=sets.left_out,
        )

    def _single(
        self, member: _Member, num_samples: int | None, name: str, left_out: tuple[str, ...] = ()
    ) -> GPTDataset:
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

    def _indices(self, member: _Member, num_samples: int | None, name: str) -> GPTIndices:
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
        stored = self._cache(indexed.prefix).get(f"{Path(indexed.prefix).name}-{name}", determined_by, build)
        return GPTIndices.from_stored(stored)

    def _cache(self, prefix: str) -> ArrayCache:
        return index_cache(self.config, prefix, builds=self.builds, thorough=self.verify)


def index_cache(config: DataConfig, prefix: str, *, builds: bool = True, thorough: bool = False) -> ArrayCache:
    """Where indices of the set `prefix` are kept: the folder that the user named, else beside the set, else at home."""
    named = config.data_cache_path
    folders = [Path(named)] if named is not None else [Path(prefix).parent / "index_cache", user_cache()]
    return ArrayCache(folders, builds, config.data_cache_timeout_minutes * 60, named is not None, thorough)


def user_cache() -> Path:
    """This user's folder for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "megatron" / "index_cache"
