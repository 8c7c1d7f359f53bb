"""Dropout that keeps a mask of one byte a value, and the stream of random numbers that it draws from."""

import contextlib

import torch
from torch import Tensor

from megatron import mpu


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """`x` with each value dropped with probability `p` and the others divided by 1 - p; `x` itself outside training.

    What is kept for the backward pass is one byte a value on every device; `torch.nn.functional.dropout` keeps its
    mask in the dtype of `x` on a CPU.
    """
    if not training or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0]


def dropout_stream(sharded: bool) -> contextlib.AbstractContextManager[None]:
    """The stream to draw from inside `with`.

    A tensor that is equal on the tensor ranks draws from the default generator, so that the masks are equal too. Where
    each rank has a part of its own (`sharded`: a shard of the sequence, other heads) it draws from its own stream.
    """
    return mpu.get_rng_tracker().fork() if sharded else contextlib.nullcontext()
