"""Several token sets as one: their weights, and the dataset that draws from them in turn."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from megatron.base.complaints import raise_joined
from megatron.data.cache import ArrayCache, Stored
from megatron.data.identity import SetPart

_VERSION = 1  # of the rule; part of the key under which an order is kept
_NAMED = 10  # of the sets that are left out


@dataclasses.dataclass(frozen=True)
class Blend:
    """Token sets by their prefixes, and the share of the samples that comes from each."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...]  # as they were given

    def shares(self) -> list[float]:
        """The weights divided by their exact sum, so that weights which add up to 1 stay what they are."""
        total = math.fsum(self.weights)
        return [weight / total for weight in self.weights]


def parse_blend(words: Sequence[str], name: str) -> Blend:
    """`["p"]` or `["w1", "p1", "w2", "p2", ...]` as flag `name` takes them.

    Raises `ConfigError` with a sentence for each weight that is no number above 0, and for words that do not pair.
    """
    if len(words) == 1:
        return Blend((words[0],), (1.0,))
    if len(words) % 2:
        raise ValueError(
            f"{name} {' '.join(words[:4])}{' ...' if len(words) > 4 else ''}: it takes one token set, or pairs of a "
            f"weight and a token set; here are {len(words)} words"
        )
    weights = [_number(word) for word in words[::2]]
    prefixes = tuple(words[1::2])
    raise_joined(
        f"{name} {word} {prefix}: the weight {word} must be a finite number above 0"
        for word, weight, prefix in zip(words[::2], weights, prefixes, strict=True)
        if not 0 < weight < math.inf
    )
    return Blend(prefixes, tuple(weights))


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def samples_of_each(shares: Sequence[float], num_samples: int) -> list[int]:
    """Samples to prepare of each set, as 2.5 does: 0.5 % more than its share, rounded up."""
    return [math.ceil(num_samples * share * 1.005) for share in shares]


def left_out_lines(prefixes: Sequence[str]) -> list[str]:
    """A line of a report that names sets of a blend which have no part in a share; nothing where there are none."""
    if not prefixes:
        return []
    more = f" and {len(prefixes) - _NAMED} more" if len(prefixes) > _NAMED else ""
    return [f"  left out, as --split gives this share none of their documents: {', '.join(prefixes[:_NAMED])}{more}"]


class BlendMember(Protocol):
    """A dataset that can be part of a blend."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> dict[str, np.ndarray]: ...

    def epochs(self, samples: int) -> float: ...

    def identity(self) -> list[SetPart]: ...


class TokenStore(Protocol):
    """The tokens that a dataset cuts its samples from."""

    def max_token_id(self, part: int = 0, parts: int = 1) -> int: ...


class TokenStores:
    """The tokens of several sets, asked as if they were one."""

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        self._stores = list(stores)

    def max_token_id(self, part: int = 0, parts: int = 1) -> int:
        """The largest id in share `part` of `parts` equal shares of each set; -1 where there are no tokens."""
        return max(store.max_token_id(part, parts) for store in self._stores)


class BlendedDataset:
    """`num_samples` samples drawn from `datasets` in turn, by 2.5's greedy rule.

    Sample i comes from the set with the largest `share * max(i, 1) - samples taken from it`; from each set they come in
    the set's own order. So no set is ever more than one sample ahead of its share or two behind.

    Args:
        datasets: one for each share; each must have as many samples as `samples_of_each` says.
        prefixes: what reports call them.
        shares: parts of the samples, which add up to 1.
        indexed: the tokens of all of them.
        cache: where the order is kept; nowhere by default.
        name: what reports call the whole.
        left_out: sets of the blend that have no part in it, which reports tell.
    """

    def __init__(
        self,
        datasets: Sequence[BlendMember],
        prefixes: Sequence[str],
        shares: Sequence[float],
        num_samples: int,
        *,
        indexed: TokenStore,
        cache: ArrayCache | None = None,
        name: str = "train",
        left_out: Sequence[str] = (),
    ) -> None:
        assert len(datasets) == len(shares) == len(prefixes) and num_samples >= 1
        self.datasets = list(datasets)
        self.prefixes = list(prefixes)
        self.shares = list(shares)
        self.indexed = indexed
        self.name = name
        self.left_out = tuple(left_out)
        key = {"kind": "blend", "version": _VERSION, "shares": self.shares, "samples": num_samples}
        self._order = (cache or ArrayCache([])).get("blend", key, lambda: _draw(self.shares, num_samples))

    @property
    def set_numbers(self) -> np.ndarray:
        """The set that each sample comes from: unsigned integers [n]."""
        return self._order.arrays["sets"]

    @property
    def sample_numbers(self) -> np.ndarray:
        """The number of each sample in its set: int64 [n]."""
        return self._order.arrays["numbers"]

    def __len__(self) -> int:
        return len(self.set_numbers)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self.datasets[int(self.set_numbers[i])][int(self.sample_numbers[i])]

    def identity(self) -> list[SetPart]:
        """Which documents it draws from in which order: a part for each set."""
        shared = zip(self.shares, self.datasets, strict=True)
        return [dataclasses.replace(part, share=share) for share, dataset in shared for part in dataset.identity()]

    def report(self) -> list[str]:
        """The largest deviation from the asked shares; of each set its samples and how often it is gone through; sets
        that are left out."""
        facts, n = self._order.facts, len(self)
        lines = [
            f"{self.name}: {n:,} samples from {len(self.datasets)} token sets; at any time each set is at most "
            f"{facts['ahead']:.2f} samples ahead of its share and {facts['behind']:.2f} behind"
        ]
        for share, prefix, dataset, taken in zip(
            self.shares, self.prefixes, self.datasets, facts["taken"], strict=True
        ):
            lines.append(
                f"  {prefix}: {taken:,} samples, {taken / n:.4%} for the asked {share:.4%}, "
                f"{dataset.epochs(taken):.3f} epochs"
            )
        return lines + left_out_lines(self.left_out)


def _draw(shares: Sequence[float], num_samples: int) -> Stored:
    # It needs numba, which takes a moment to load: a run that finds the order in the cache does without.
    from megatron.data.blend_order import draw_order

    sets, numbers, ahead, behind = draw_order(np.array(shares, np.float64), num_samples)
    taken: list[Any] = np.bincount(sets, minlength=len(shares)).tolist()
    return Stored({"sets": sets, "numbers": numbers}, {"ahead": ahead, "behind": behind, "taken": taken})
