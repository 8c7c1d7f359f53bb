"""The global norm of gradients: float64 sums of short blocks, and one small all-reduce that is exact."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron.mpu.collectives import all_reduce
from megatron.mpu.initialize import GroupInfo
from megatron.optimizer.buckets import Bucket
from megatron.optimizer.segments import ALIGNMENT

# A float32 norm of one long CPU buffer is off by 1.6e-3 at 30M elements; of a block this short, by some 1e-7.
BLOCK = ALIGNMENT


def squared_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of squares of all elements, float64 and 0-D, on the device of the tensors (the CPU where there is none).

    Each tensor is cut into blocks of 64 elements; a block's norm is taken in the tensor's dtype, at least float32,
    squared in float64 and added in float64.
    """
    sums = [_squared_norm(tensor.detach()) for tensor in tensors if tensor.numel()]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def _squared_norm(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1, dtype=dtype).double()
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype).double()
    return blocks.square().sum() + rest.square()


def shard_norms(buckets: Sequence[Bucket], counted: Collection[str], ranks: Iterable[int]) -> dict[int, Tensor]:
    """The squared norms of the shards of all buckets that belong to some data ranks, by rank.

    Args:
        buckets: with gradients that are summed over the data ranks; perhaps none.
        counted: names of the parameters that this rank counts; another tensor rank or stage counts the others, which
            are only looked at here for what is not finite.
        ranks: this data rank if the optimizer is sharded, all of them if not. The cuts between shards are made in both
            cases, so that the sums are equal bit for bit.
    """
    others = {name for bucket in buckets for name in bucket.parameters} - set(counted)
    # What this rank does not count adds nothing, but 0 times infinity is not a number: it shows here too.
    return {rank: _shard_norm(buckets, counted, rank) + 0.0 * _shard_norm(buckets, others, rank) for rank in ranks}


def _shard_norm(buckets: Sequence[Bucket], names: Collection[str], rank: int) -> Tensor:
    return squared_norm(
        bucket.gradients[run.slice]
        for bucket in buckets
        for run in bucket.layout.runs(names, bucket.layout.shard(rank, bucket.data.size))
    )


def sum_of_places(values: Mapping[int, Tensor], places: int, group: GroupInfo, device: torch.device) -> Tensor:
    """The sum of values that the ranks of `group` have, one for each of `places`; equal on all ranks bit for bit.

    One all-reduce of `places` float64: each place is filled by one rank and zero elsewhere, and adding zeros is exact.
    What is not finite on one rank makes the sum so on all.
    """
    vector = torch.zeros(places, dtype=torch.float64, device=device)
    for place, value in values.items():
        vector[place] = value
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
