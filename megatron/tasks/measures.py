"""What a GPT says of windows: losses and right guesses, each window scored once on all data-parallel ranks together."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megatron import mpu
from megatron.model import gather_logits
from megatron.tasks.next_token import SplitGPT
from megatron.tasks.sampling import NO_NUMBERS
from megatron.tasks.windows import Window, WindowBatch, batch_numbers, make_batch

# Told how many of how many batches are done.
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Measure:
    """So many numbers for each window, by `of`: float64 [b, numbers] on the ranks of the last stage, None elsewhere."""

    numbers: int
    of: Callable[[SplitGPT, WindowBatch], Tensor | None]


def _losses(model: SplitGPT, batch: WindowBatch) -> Tensor | None:
    losses = model.forward(batch.tokens, labels=batch.labels, logits_at=batch.places)  # [b, k]
    return None if losses is None else losses.double().sum(dim=1, keepdim=True)


def _guesses(model: SplitGPT, batch: WindowBatch) -> Tensor | None:
    split = model.forward(batch.tokens, logits_at=batch.places)
    if split is None:
        return None
    logits = gather_logits(split, model.vocab_size)  # [b, k, v]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide.transpose(1, 2), batch.labels, reduction="none")  # [b, k]
    right = wide.argmax(dim=-1) == batch.labels
    return torch.stack([losses.double().sum(dim=1), right.double().sum(dim=1)], dim=1)


# The sum of the cross entropies of the scored tokens. Logits are calculated for these alone, and never gathered.
LOSS = Measure(1, _losses)
# That sum, and how many of the scored tokens are the likeliest, given the right ones before them. One all-gather of the
# logits of these tokens, beside the collectives of the model.
GUESSES = Measure(2, _guesses)


@torch.no_grad()
def measured(
    model: SplitGPT,
    windows: Sequence[Window],
    micro_batch_size: int,
    measure: Measure,
    progress: Progress = lambda done, batches: None,
) -> list[list[float]]:
    """The numbers that `measure` gives for each window, the same on all ranks.

    The data-parallel ranks deal the batches out. One all-reduce over the world of these and one more float64 number a
    window, beside the collectives of `measure`. Raises FloatingPointError on all ranks where a number is not finite.
    """
    batches = batch_numbers(windows, micro_batch_size)
    rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    mine = batches[rank::ranks]
    table = torch.zeros(len(windows), measure.numbers + 1, dtype=torch.float64, device=model.device)  # and how often
    for done, numbers in enumerate(mine, 1):
        values = measure.of(model, make_batch(windows, numbers, model.device))
        if values is not None and model.chooses:
            table[numbers, :-1] = values
            table[numbers, -1] += 1
        progress(done, len(mine))
    dist.all_reduce(table)  # of a window all ranks but one have zeros
    assert bool((table[:, -1] == 1).all()), "a window was left out or scored twice"
    if not bool(table.isfinite().all()):
        raise FloatingPointError(NO_NUMBERS)
    found: list[list[float]] = table[:, :-1].tolist()
    return found
