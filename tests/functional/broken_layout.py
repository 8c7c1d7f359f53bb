"""A training script that goes wrong on more than one rank, in the way that the variable BROKEN says."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

import pretrain_gpt
from megatron.optimizer import Optimizer, gradients, optimizer
from megatron.training.config import RunConfig
from megatron.training.observers import Observer
from megatron.training.state import Trainee

SCALED = "transformer.layers.1.mlp.dense_h_to_4h.weight"


def _not_summed(tensor: Tensor, *_: object) -> Tensor:
    """Takes the place of an all-reduce."""
    return tensor


def _nothing(*_: object) -> None:
    """Takes the place of a sum in place."""


def _scaled(reduce: Callable[[Optimizer, float], None]) -> Callable[[Optimizer, float], None]:
    """A reduction of gradients after which one parameter's are wrong by a thousandth."""

    def broken(trained: Optimizer, divisor: float) -> None:
        reduce(trained, divisor)
        for name, gradient in trained.gradients().items():
            if name == SCALED:
                gradient.mul_(1.001)

    return broken


def _raising(*_: object) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError("the last stage is broken")


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "partial": (optimizer, "sum_over_group", _nothing),
    "tied": (gradients, "all_reduce", _not_summed),
    "scaled": (Optimizer, "reduce_gradients", _scaled(Optimizer.reduce_gradients)),
    "raising": (Optimizer, "zero_grad", _raising),
}


@contextlib.contextmanager
def broken(how: str) -> Iterator[None]:
    """Inside the block the library is wrong."""
    with mock.patch.object(*PATCHES[how]):
        yield


def train(config: RunConfig, observers: Sequence[Observer] = ()) -> Trainee:
    """As pretrain_gpt.py in one process, else broken."""
    with broken(os.environ["BROKEN"]) if dist.get_world_size() > 1 else contextlib.nullcontext():
        return pretrain_gpt.train(config, observers)
