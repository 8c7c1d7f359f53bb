"""Keys and values of sequences that are continued, so that each new token asks for its own alone."""

import dataclasses
import functools
from collections.abc import Iterable

import torch
from torch import Tensor


class KeyValueCache:
    """Room for the keys and values of `rows` sequences of up to `columns` tokens each, in every layer of this rank.

    It is handed to a model by `behind`, for each call. It is filled in place and has no gradients; it belongs to
    nobody but the caller, and a model keeps nothing of it.

    Args:
        layers: names of the layers.
        rows, heads, columns, head_size: sizes; the heads are those of this tensor rank, n/t.
        dtype, device: those of the keys.
    """

    def __init__(
        self,
        layers: Iterable[str],
        *,
        rows: int,
        heads: int,
        columns: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.columns, self.device = columns, device
        shape = (2, rows, heads, columns, head_size)
        # Zeros: what was never written is hidden by a weight of 0, and 0 times NaN would be seen.
        self.layers = {name: torch.zeros(shape, dtype=dtype, device=device) for name in layers}

    def behind(self, first: int, lengths: Tensor | None, longest: int) -> "CachedRows":
        """The rows from `first` on, to be continued behind the tokens that they have.

        Args:
            lengths: those tokens of each row, int64 [b]; the call brings one more for each. None where the rows are
                new: then the call brings all [b, s] of their tokens, padded on the right.
            longest: columns that are looked at: the largest of the lengths and 1, or s.
        """
        return CachedRows(self, first, lengths, longest)

    def clear(self, row: int, kept: int) -> None:
        """Forget what row `row` holds behind its first `kept` columns."""
        for held in self.layers.values():
            held[:, row, :, kept:].zero_()

    def move(self, source: int, target: int) -> None:
        """Put the sequence of row `source` into row `target`."""
        for held in self.layers.values():
            held[:, target].copy_(held[:, source])


@dataclasses.dataclass(frozen=True)
class CachedRows:
    """What the tokens of one call see: the rows of a cache, see `KeyValueCache.behind`."""

    cache: KeyValueCache
    first: int
    lengths: Tensor | None
    longest: int

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """Bool [b, 1, 1, longest], true for the tokens that a row has, the one that comes included; None for new rows.

        New rows need none: what is padded on the right lies in every token's future.
        """
        if self.lengths is None:
            return None
        columns = torch.arange(self.longest, device=self.lengths.device)
        return (columns <= self.lengths[:, None])[:, None, None, :]

    @property
    def position_ids(self) -> Tensor | None:
        """Positions of the tokens that come, [b, 1]; None where they are 0, 1, 2, ..."""
        return None if self.lengths is None else self.lengths[:, None]

    def of(self, layer: str) -> "LayerCache":
        """The part of one layer."""
        return LayerCache(self, self.cache.layers[layer])


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The rows of a call in one layer; `held` is [2, all rows, n/t, columns, d]."""

    rows: CachedRows
    held: Tensor

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keep the keys and values [b, n/t, s, d] of the tokens that come; gives all that they see, and a mask of it.

        Keys and values are [b, n/t, longest, d] and the mask is that of `CachedRows`.
        """
        first, lengths, (b, _, s, _) = self.rows.first, self.rows.lengths, key.shape
        rows = self.held[:, first : first + b]  # [2, b, n/t, columns, d]
        if lengths is None:
            rows[:, :, :, :s] = torch.stack([key, value])
            return key, value, None
        index = torch.arange(b, device=lengths.device)
        for part, new in zip(rows, (key, value), strict=True):
            part[index, :, lengths] = new[:, :, 0]
        keys, values = rows[:, :, :, : self.rows.longest]
        return keys, values, self.rows.mask
