"""What a GPT says of windows: losses and right guesses, each window scored once on all data-parallel ranks together."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import mpu
from megatron.model import gather_logits
from megatron.tasks.next_token import SplitGPT
from megatron.tasks.windows import Window, WindowBatch, batch_numbers, make_batch

# A number for each window of a batch, float64 [b], on the ranks of the last stage, None on the others.
Measure = Callable[[SplitGPT, WindowBatch], Tensor | None]
# Told how many of how many batches are done.
Progress = Callable[[int, int], None]


def loss_sums(model: SplitGPT, batch: WindowBatch) -> Tensor | None:
    """The sum of the cross entropies of the scored tokens. Logits are calculated for these alone."""
    losses = model.forward(batch.tokens, labels=batch.labels, logits_at=batch.places)  # [b, k]
    return None if losses is None else losses.double().sum(dim=1)


def right_guesses(model: SplitGPT, batch: WindowBatch) -> Tensor | None:
    """How many of the scored tokens are the likeliest, given those before them; NaN where logits are no numbers.

    One all-gather of the logits of these tokens, beside the collectives of the model.
    """
    split = model.forward(batch.tokens, logits_at=batch.places)
    if split is None:
        return None
    logits = gather_logits(split, model.vocab_size)  # [b, k, v]
    right = (logits.argmax(dim=-1) == batch.labels).double().sum(dim=1)
    return right.where(logits.isfinite().flatten(1).all(dim=1), float("nan"))


@torch.no_grad()
def measured(
    model: SplitGPT, windows: Sequence[Window], micro_batch_size: int, measure: Measure, progress: Progress
) -> list[float]:
    """The number that `measure` gives for each window, the same on all ranks.

    The data-parallel ranks deal the batches out. One all-reduce of two float64 numbers a window over the world, beside
    the collectives of `measure`. Raises FloatingPointError on all ranks where a number is not finite.
    """
    batches = batch_numbers(windows, micro_batch_size)
    rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    mine = batches[rank::ranks]
    table = torch.zeros(len(windows), 2, dtype=torch.float64, device=model.device)  # the number, and how often
    for done, numbers in enumerate(mine, 1):
        values = measure(model, make_batch(windows, numbers, model.device))
        if values is not None and model.chooses:
            table[numbers, 0] = values
            table[numbers, 1] += 1
        progress(done, len(mine))
    dist.all_reduce(table)  # of a window all ranks but one have zeros
    assert bool((table[:, 1] == 1).all()), "a window was left out or scored twice"
    if not bool(table.isfinite().all()):
        raise FloatingPointError("the model gives logits that are no numbers: its weights are no longer sound")
    found: list[float] = table[:, 0].tolist()
    return found
