"""Runs in which something goes wrong on some ranks: gradients that overflow, losses that are no numbers, full disks."""

import dataclasses
import errno
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

import pretrain_gpt
from megatron.checkpointing import SaveError, save, writer
from megatron.model import Chunk
from megatron.training.pipeline import Batch, ForwardStep
from tests.harness.runs import Outcome, run_pretrain

# Split over the tensor ranks, so that its gradient concerns one of them alone.
_BIAS = "transformer.layers.0.mlp.dense_h_to_4h.bias"


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong: on these ranks, in these training passes (from 0, evaluations not counted).

    `kind`: "gradient" makes that of one bias infinite, "loss" makes the loss of the pass no number.
    """

    kind: str
    ranks: tuple[int, ...]
    passes: tuple[int, ...]


def run_with_fault(rank: int, world_size: int, words: Sequence[str], fault: Fault) -> Outcome:
    """As `run_pretrain`, with `fault`."""
    spoilt = _spoilt(pretrain_gpt.forward_step, fault) if rank in fault.ranks else pretrain_gpt.forward_step
    with mock.patch.object(pretrain_gpt, "forward_step", spoilt):
        return run_pretrain(rank, world_size, words)


def failure_with_fault(rank: int, world_size: int, words: Sequence[str], fault: Fault) -> str:
    """The message of the FloatingPointError with which the run must end on this rank."""
    try:
        run_with_fault(rank, world_size, words, fault)
    except FloatingPointError as error:
        return str(error)
    raise AssertionError("the run came to its end")


def run_with_full_disk(
    rank: int, world_size: int, words: Sequence[str], attempts: Collection[int]
) -> tuple[Outcome | None, str]:
    """As `run_pretrain`, where the disk of the last rank is full at these attempts to save (from 0).

    Returns what came of the run, None where a failed save ended it, and that failure's message.
    """
    write, numbers = writer.write_pieces, itertools.count()

    def written(*arguments: Any) -> Any:
        if next(numbers) in attempts and rank == world_size - 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    with mock.patch.object(save, "write_pieces", written):
        try:
            return run_pretrain(rank, world_size, words), ""
        except SaveError as error:
            return None, str(error)


def _spoilt(forward_step: ForwardStep, fault: Fault) -> ForwardStep:
    numbers = itertools.count()
    factors = {"gradient": 1.0}
    hooked = fault.kind != "gradient"

    def step(stage: Chunk, batch: Batch) -> tuple[Tensor, Tensor] | Tensor:
        nonlocal hooked
        model = stage.model
        if not hooked:
            model.get_parameter(_BIAS).register_hook(lambda gradient: gradient * factors["gradient"])
            hooked = True
        wrong = model.training and next(numbers) in fault.passes
        factors["gradient"] = math.inf if wrong and fault.kind == "gradient" else 1.0
        output = forward_step(stage, batch)
        factor = math.nan if wrong and fault.kind == "loss" else 1.0
        return output * factor if isinstance(output, Tensor) else (output[0] * factor, output[1])

    return step
