"""Dividing sizes, tensors and vocabularies among ranks."""

import torch

from megatron.mpu.collectives import all_gather_first_dim
from megatron.mpu.initialize import Group, resolve_group


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """`ValueError` unless `denominator` divides `numerator`."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The exact quotient; `ValueError` where there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Cut the last dimension in equal parts: views, or contiguous copies with `contiguous_split_chunks`."""
    parts = torch.split(tensor, divide(tensor.size(-1), num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def split_tensor_into_1d_equal_chunks(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """This rank's equal share of the flattened tensor, `[numel / size]`; a view where `tensor` is contiguous."""
    info = resolve_group(group)
    share = divide(tensor.numel(), info.size)
    return tensor.reshape(-1)[info.rank * share : (info.rank + 1) * share]


def gather_split_1d_tensor(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The opposite of `split_tensor_into_1d_equal_chunks`: `[n]` on each rank -> `[size * n]`. One all-gather."""
    return all_gather_first_dim(tensor.reshape(-1), group)


class VocabUtility:
    """Which rows of a vocabulary a rank holds: `first <= id < last`."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """First id and end of the range of `rank`, each rank holding `per_partition_vocab_size` rows."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """First id and end of the range of `rank` in a vocabulary cut in `world_size` equal parts."""
        share = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(share, rank, world_size)


_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)


def check_id_dtype(ids: torch.Tensor, what: str) -> None:
    """`ValueError` for ids that are no integers, or do not all fit in int64: they would be changed silently."""
    if ids.dtype not in _ID_DTYPES:
        raise ValueError(f"{what}s of {ids.dtype}: ids must be integers that fit in torch.int64")


def check_ids(ids: torch.Tensor, vocab_size: int, lowest: int, what: str) -> None:
    """`ValueError` where an id lies outside `lowest <= id < vocab_size`, for int64 tensors on the CPU.

    On other devices looking would make the host wait for the device: there the lookup that follows is left to fail,
    see `local_rows`.
    """
    if ids.device.type != "cpu" or ids.numel() == 0 or torch.compiler.is_compiling():
        return
    low, high = (int(x) for x in torch.aminmax(ids))
    if low < lowest or high >= vocab_size:
        worst = low if low < lowest else high
        least = "negative (not counted)" if lowest < 0 else "at least 0"
        raise ValueError(
            f"{what} {worst}: it must be {least} {'or' if lowest < 0 else 'and'} below the vocabulary size {vocab_size}"
        )


def local_rows(
    ids: torch.Tensor, first: int, rows: int, vocab_size: int, lowest: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where ids are found among this rank's `rows` rows that begin at id `first`.

    Returns the row of each id (0 for ids that other ranks hold) and a mask, true for ids that others hold. An id
    outside the vocabulary gets row `rows`, which does not exist: the lookup then fails on the device itself (a
    device-side assertion on CUDA), so that a bad id is never taken for somebody else's, without a synchronisation.
    """
    ids = ids.long()
    elsewhere = (ids < first) | (ids >= first + rows)
    outside = (ids < lowest) | (ids >= vocab_size)
    index = (ids - first).masked_fill(elsewhere, 0).masked_fill(outside, rows)
    return index, elsewhere
