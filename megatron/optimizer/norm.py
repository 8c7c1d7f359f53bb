"""The global norm of gradients: float64 sums of short blocks, and one small all-reduce that is exact."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from megatron.mpu.collectives import all_reduce
from megatron.mpu.initialize import GroupInfo
from megatron.optimizer.buckets import Bucket
from megatron.optimizer.segments import ALIGNMENT

# A float32 norm of one long CPU buffer is off by 1.6e-3 at 30M elements; of a block this short, by some 1e-7.
# Parameters and shards begin at multiples of it, so that no block has elements of two.
BLOCK = ALIGNMENT


def squares_of_blocks(flat: Tensor) -> Tensor:
    """The squared norms of the blocks of 64 elements of `flat` [n], n a multiple of 64: float64 [n / 64].

    A block's norm is taken in the tensor's dtype, at least float32, and squared in float64.
    """
    dtype = torch.promote_types(flat.dtype, torch.float32)
    return torch.linalg.vector_norm(flat.view(-1, BLOCK), dim=1, dtype=dtype).double().square_()


class ShardNorms:
    """The squared norms of the gradients that this rank holds, shard by shard.

    The cuts between the shards of the data ranks are made where one rank holds them all, too, so that the sums of a
    sharded and a plain optimizer are equal bit for bit.

    Args:
        buckets: with gradients that will be summed over the data ranks; perhaps none.
        counted: names of the parameters that this rank counts. Another tensor rank or stage counts the others, which
            are only looked at here for what is not finite.
        shards: how many it holds: one if the optimizer is sharded, that of every data rank if not.
        device: of the buckets.
    """

    def __init__(self, buckets: Sequence[Bucket], counted: Collection[str], shards: int, device: torch.device) -> None:
        self._buckets, self._shards, self._device = buckets, shards, device
        self._counted = [_counted_blocks(bucket, counted) for bucket in buckets]

    def squared(self) -> Tensor:
        """float64 [shards], in their order. The number of operations does not depend on that of the parameters."""
        total = torch.zeros(self._shards, dtype=torch.float64, device=self._device)
        for bucket, counted in zip(self._buckets, self._counted, strict=True):
            squares = squares_of_blocks(bucket.gradients[bucket.held.slice])
            if counted is not None:
                squares.mul_(counted)  # 0 times infinity is not a number: what is not finite shows here too
            total += torch.stack([shard.sum() for shard in squares.view(self._shards, -1).unbind()])
        return total


def _counted_blocks(bucket: Bucket, names: Collection[str]) -> Tensor | None:
    """Which of the blocks held are those of the parameters `names`: bool [blocks]; None where all are."""
    if bucket.parameters.keys() <= set(names):
        return None
    counted = torch.zeros(bucket.held.size // BLOCK, dtype=torch.bool)
    for run in bucket.layout.runs(names, bucket.held):
        own = run.relative_to(bucket.held.begin)
        counted[own.begin // BLOCK : own.end // BLOCK] = True
    return counted.to(bucket.gradients.device)


def sum_of_places(values: Tensor, first: int, places: int, group: GroupInfo) -> Tensor:
    """The sum of values that the ranks of `group` have, one for each of `places`; equal on all ranks bit for bit.

    `values` [n], float64, are for the places from `first` on. One all-reduce of `places` float64: each place is filled
    by one rank and zero elsewhere, and adding zeros is exact. What is not finite on one rank makes the sum so on all.
    """
    vector = values.new_zeros(places)
    vector[first : first + len(values)] = values
    return all_reduce(vector, group).sum()


def words_on_non_finite(buckets: Sequence[Bucket]) -> str:
    """Which parameters' gradients, as far as this rank holds them, are not finite, in the model's order."""
    names = [
        segment.name
        for bucket in reversed(buckets)
        for segment in reversed(bucket.layout.segments(bucket.held))
        if not torch.isfinite(bucket.gradients[segment.range.slice]).all()
    ]
    if not names:
        return "all gradients of this rank are finite"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"not finite on this rank: the gradients of {', '.join(names[:3])}{more}"
