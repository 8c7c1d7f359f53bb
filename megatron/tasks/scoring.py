"""The scores of every example of a set, whatever the ranks and batches: each is scored once, and known to all ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.tasks.epochs import OncePadded
from megatron.tasks.examples import ExampleSet
from megatron.tasks.predictions import Prediction
from megatron.training.losses import Losses
from megatron.training.pipeline import Batch
from megatron.training.run import Run


def scores_of(stage: Any, batch: Batch) -> Tensor:
    """Scores [b, classes] of a micro-batch, or the hidden states of a stage before the last."""
    ids = (batch[name] for name in ("tokens", "types", "padding_mask"))  # [b, s] or [b, choices, s] each
    return stage(*ids, hidden=batch.get("hidden"))


def loss_of(scores: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies of the right answers, and how many examples count. Filling does not."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    losses = F.cross_entropy(wide, batch["label"], reduction="none")  # [b]
    return (losses * batch["weight"]).sum(), batch["weight"].sum()


def forward_step(stage: Any, batch: Batch) -> tuple[Tensor, Tensor] | Tensor:
    """Loss of a micro-batch and what it counts; hidden states before the last stage."""
    scores = scores_of(stage, batch)
    return loss_of(scores, batch) if stage.last else scores


def score(run: Run, examples: ExampleSet, classes: int) -> tuple[Tensor, float]:
    """Scores of all examples, float64 [examples, classes] on this rank's device, and the mean loss; equal on all ranks.

    Two all-reduces of as many numbers, over data and pipeline group, beside those of the model. Raises
    FloatingPointError, on all ranks, naming the first example whose scores are not finite.
    """
    sizes, ranks, device = run.sizes(), run.pipeline.loss_ranks, run.world.device
    padded = OncePadded(examples, batch=sizes.global_batch_size)
    table = torch.zeros(len(examples), classes + 1, dtype=torch.float64, device=device)  # scores, and how often

    def keep(stage: Any, batch: Batch) -> tuple[Tensor, Tensor] | Tensor:
        scores = scores_of(stage, batch)
        if not stage.last:
            return scores
        real = batch["weight"] > 0
        numbers = batch["number"][real]
        table[numbers, :-1] = scores[real].double()
        table[numbers, -1] += 1
        return loss_of(scores, batch)

    losses = Losses("tokens", ranks, device)
    batches = run.batches(padded, 0, len(padded))
    for _ in range(len(padded) // sizes.global_batch_size):
        run.pipeline.evaluate(batches, keep, losses.add, sizes.num_micro_batches)
    ranks.sum(table)  # of an example all ranks but one have zeros
    assert bool((table[:, -1] == 1).all()), "an example was left out or scored twice"
    finite = table.isfinite().all(dim=1)
    if not bool(finite.all()):
        wrong = int((~finite).nonzero()[0].item())
        raise FloatingPointError(f"the scores of {examples.examples[wrong].name} are not finite")
    return table[:, :-1], losses.total().mean


def predictions_of(examples: ExampleSet, scores: Tensor, classes: tuple[str, ...]) -> list[Prediction]:
    """The predictions of scores [examples, classes], as probabilities."""
    rows = scores.softmax(dim=1).tolist()
    return [
        Prediction(example.name, example.group, tuple(row), classes[example.label], classes)
        for example, row in zip(examples.examples, rows, strict=True)
    ]
