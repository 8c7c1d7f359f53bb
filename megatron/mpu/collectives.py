"""The collectives that the parallel layers are made of; each returns at once in a group of one rank."""

import torch
import torch.distributed as dist

from megatron.mpu.initialize import Group, GroupInfo, resolve_group

# PyTorch 2.13 renamed these two and warns about the old names; nothing else in the library calls either.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def process_group(info: GroupInfo) -> dist.ProcessGroup:
    """The process group of `info`, which has several ranks; `RuntimeError` where their number was set by hand."""
    if info.group is None:
        raise RuntimeError(
            f"a collective over {info.size} tensor-parallel ranks without processes: their number was set by hand, "
            "call mpu.initialize_model_parallel to make the group"
        )
    return info.group


def all_reduce(x: torch.Tensor, group: Group = None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce `x` over the group, in place, and return it. Contiguous or not."""
    info = resolve_group(group)
    if info.size == 1:
        return x
    if x.is_contiguous():
        dist.all_reduce(x, op, group=process_group(info))
        return x
    packed = x.contiguous()
    dist.all_reduce(packed, op, group=process_group(info))
    return x.copy_(packed)


def all_gather_first_dim(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """`[n, ...]` on each rank -> `[size * n, ...]`, in rank order."""
    info = resolve_group(group)
    if info.size == 1:
        return x
    gathered = x.new_empty((info.size * x.size(0), *x.shape[1:]))
    _all_gather_single(gathered, x.contiguous(), group=process_group(info))
    return gathered


def reduce_scatter_first_dim(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """`[size * n, ...]` on each rank -> this rank's `[n, ...]` of the sum; `ValueError` if it does not divide."""
    info = resolve_group(group)
    if info.size == 1:
        return x
    if x.size(0) % info.size:
        raise ValueError(f"first dimension of size {x.size(0)}: it must be divisible by the group's {info.size} ranks")
    part = x.new_empty((x.size(0) // info.size, *x.shape[1:]))
    _reduce_scatter_single(part, x.contiguous(), group=process_group(info))
    return part
