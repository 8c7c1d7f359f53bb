"""Where the parameters of a module are: keyword arguments that modules pass down unread."""

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
