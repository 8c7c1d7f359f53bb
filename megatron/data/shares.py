"""From the sets that a `DataConfig` names to a dataset for training, validation and test: split, and blended."""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from megatron.base.complaints import problems_of, raise_joined
from megatron.data.blend import Blend, BlendedDataset, BlendMember, TokenStore, TokenStores, samples_of_each
from megatron.data.cache import ArrayCache
from megatron.data.config import DataConfig
from megatron.data.indexed import IndexedDataset
from megatron.data.splits import SPLIT_NAMES, parse_split, split_boundaries
from megatron.data.token_sets import open_token_sets

# Samples asked for of training, validation and test set; None is one pass over its documents, which a blend has not.
Asked = tuple[int | None, int | None, int | None]
# How many units of a set a split divides: its sequences, or its documents.
Count = Callable[[IndexedDataset], int]


@dataclasses.dataclass(frozen=True)
class Member:
    """Units `begin` to `end` of a token set, and the set's part of the samples."""

    indexed: IndexedDataset
    begin: int
    end: int
    weight: float


@dataclasses.dataclass(frozen=True)
class _Sets:
    """What a dataset is drawn from."""

    members: tuple[Member, ...]
    tokens: TokenStore
    left_out: tuple[str, ...] = ()  # sets without a document in this share

    def shares(self) -> list[float]:
        """The weights of the members, which add up to 1; where none is left out they stay what they are."""
        weights = [member.weight for member in self.members]
        total = math.fsum(weights) if self.left_out else 1.0
        return [weight / total for weight in weights]

    @classmethod
    def open(cls, blend: Blend, name: str, count: Count) -> "_Sets":
        opened = open_token_sets(blend, name)
        members = (
            Member(indexed, 0, count(indexed), weight) for indexed, weight in zip(opened, blend.shares(), strict=True)
        )
        return cls(tuple(members), opened[0] if len(opened) == 1 else TokenStores(opened))

    def share(self, split: str, number: int) -> "_Sets | None":
        """The share with that number of every set; sets that have no document in it are left out."""
        weights = parse_split(split)
        parts, left_out = [], []
        for member in self.members:
            begin, end = split_boundaries(weights, member.end)[number : number + 2]
            if begin < end:
                parts.append(dataclasses.replace(member, begin=begin, end=end))
            else:
                left_out.append(member.indexed.prefix)
        return _Sets(tuple(parts), self.tokens, tuple(left_out)) if parts else None


Made = TypeVar("Made", bound=BlendMember)
# (a set, samples asked, name of the share, sets that have no part in it) -> the dataset of one set
Make = Callable[[Member, int | None, str, Sequence[str]], Made]


@dataclasses.dataclass(frozen=True)
class ShareMaker(Generic[Made]):
    """Makes the datasets of a kind.

    Attributes:
        config: names the sets, and how they are split.
        count: how many units of a set a split divides.
        make: makes the dataset of one set.
        cache: where what belongs to a set is kept, by its prefix.
    """

    config: DataConfig
    count: Count
    make: Make[Made]
    cache: Callable[[str], ArrayCache]

    def datasets(self, asked: Asked) -> tuple[Made | BlendedDataset | None, ...]:
        """Training, validation and test set of so many samples.

        Each set of `--data-path` is split; sets of `--train-data-path` and so on are used whole. None stands for a
        dataset of which 0 samples are asked, and for a share without documents or sets.

        Raises ValueError where a set cannot be read or a set for training is empty, and what `make` raises.
        """
        parts = self._split(asked) if self.config.data_path is not None else self._given()
        return tuple(
            None if part is None or samples == 0 else self._dataset(part, samples, share)
            for part, samples, share in zip(parts, asked, SPLIT_NAMES, strict=True)
        )

    def _split(self, asked: Asked) -> list[_Sets | None]:
        (name, blend), *_ = self.config.blends().items()
        sets = _Sets.open(blend, name, self.count)
        parts = [sets.share(self.config.split, share) for share in range(3)]
        if asked[0] != 0 and parts[0] is None:
            first = sets.members[0]
            raise ValueError(
                f"--split {self.config.split}: it leaves none of the {first.end} documents of {first.indexed.prefix} "
                "for training"
            )
        return parts

    def _given(self) -> list[_Sets | None]:
        blends = self.config.blends()
        names = [f"--{name}-data-path" for name in SPLIT_NAMES]
        return [_Sets.open(blends[name], name, self.count) if name in blends else None for name in names]

    def _dataset(self, sets: _Sets, samples: int | None, name: str) -> Made | BlendedDataset:
        if len(sets.members) == 1:
            return self.make(sets.members[0], samples, name, sets.left_out)
        if samples is None:
            raise ValueError(f"{name}: a blend of token sets has no single pass; ask for a number of samples")
        return self._blended(sets, samples, name)

    def _blended(self, sets: _Sets, samples: int, name: str) -> BlendedDataset:
        shares = sets.shares()
        datasets, found = [], []
        for member, part in zip(sets.members, samples_of_each(shares, samples), strict=True):
            try:
                datasets.append(self.make(member, part, name, ()))
            except ValueError as error:
                found += problems_of(error)
        raise_joined(found)
        return BlendedDataset(
            datasets,
            [member.indexed.prefix for member in sets.members],
            shares,
            samples,
            indexed=sets.tokens,
            cache=self.cache(sets.members[0].indexed.prefix),
            name=name,
            left_out=sets.left_out,
        )


def index_cache(config: DataConfig, prefix: str, *, builds: bool = True, thorough: bool = False) -> ArrayCache:
    """Where indices of the set `prefix` are kept: the folder that the user named, else beside the set, else at home."""
    named = config.data_cache_path
    folders = [Path(named)] if named is not None else [Path(prefix).parent / "index_cache", user_cache()]
    return ArrayCache(folders, builds, config.data_cache_timeout_minutes * 60, named is not None, thorough)


def user_cache() -> Path:
    """This user's folder for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "megatron" / "index_cache"
