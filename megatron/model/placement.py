"""Where parameters are: keyword arguments that modules pass down unread; and a tensor rank's share of a sequence."""

from typing import TypedDict

import torch

from megatron.mpu.initialize import Group


class Placement(TypedDict, total=False):
    """Keyword arguments of every module of a model.

    group: the tensor group that the parameters are split over; the current one by default.
    dtype: of the parameters; PyTorch's default dtype by default.
    device: of the parameters; "meta" to build without memory and fill later (`initialize_parameters`).
    sequence_parallel: what lies between the split matrices is each rank's shard of the sequence, [s/t, b, h] in place
        of [s, b, h]; False by default.
    """

    group: Group
    dtype: torch.dtype | None
    device: torch.device | str | None
    sequence_parallel: bool


def shard_length(length: int, ranks: int) -> int:
    """s/t, the tokens of a sequence that each of the tensor ranks has with sequence parallelism.

    Raises ValueError where they cannot be equally many.
    """
    if length % ranks:
        raise ValueError(
            f"--seq-length {length}: with --sequence-parallel it must be a multiple of "
            f"--tensor-model-parallel-size {ranks}"
        )
    return length // ranks
