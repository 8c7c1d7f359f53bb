"""A BERT for tests: whole or cut into stages that run one after another, with given weights, over a padded batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.model import BertEncoder, BertModel, RecomputeConfig, TransformerConfig, build_bert
from tests.harness.stages import cut, in_order
from tests.harness.whole_tensors import load_whole, whole_gradients

VOCAB, S, B = 97, 24, 3
LENGTHS = (24, 15, 6)  # real tokens of each sample


def batch(vocab: int = VOCAB) -> dict[str, Tensor]:
    """Padded samples of two segments, with about a third of the real tokens to be predicted; [b, s] each, order [b]."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(vocab, (2, B, S), generator=generator)
    real = torch.arange(S) < torch.tensor(LENGTHS)[:, None]  # [b, s]
    masked = (torch.rand(B, S, generator=generator) < 0.3) & real
    types = (torch.arange(S) >= torch.tensor(LENGTHS)[:, None] // 2) & real
    return {
        "tokens": tokens.where(real, 0),
        "types": types.long(),
        "padding_mask": real.long(),
        "labels": labels.where(masked, -1),
        "order": torch.tensor([1, 0, 1]),
    }


def build(
    config: TransformerConfig,
    counts: Sequence[int] = (),
    ranks: int = 1,
    *,
    kind: type[BertEncoder] = BertModel,
    dtype: torch.dtype = torch.float64,
    recompute: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[BertEncoder]:
    """The models of all `ranks` of a pipeline whose stages have `counts` layers; without counts the whole model."""
    again = RecomputeConfig(**(recompute or {}))
    stages = cut(counts) if counts else None
    return [
        build_bert(
            config,
            VOCAB,
            1,
            dtype=dtype,
            device="cpu",
            kind=kind,
            recompute=again,
            stages=None if stages is None else stages[rank::ranks],
            **options,
        )
        for rank in range(ranks)
    ]


def load(models: Sequence[BertEncoder], weights: Mapping[str, Tensor]) -> None:
    """Deal whole weights out to the models; asserts that all of them are used."""
    for model in models:
        load_whole(model, {name: weights[name] for name, _ in model.named_parameters()})
    assert {name for model in models for name, _ in model.named_parameters()} == weights.keys()


def run(models: Sequence[BertEncoder], *args: Tensor, **named: Tensor) -> Any:
    """What the last stage gives, with a graph through all stages."""
    hidden = None
    for chunk in in_order(models):
        hidden = chunk(*args, **named, hidden=hidden)
    return hidden


def gradients(models: Sequence[BertEncoder]) -> dict[str, Tensor]:
    """Whole gradients by name, those of parameters with a term of it on each tensor rank summed; of a parameter that
    two stages have, the sum. Collective over the ranks of the harness."""
    found: dict[str, Tensor] = {}
    for model in models:
        sum_partial_gradients(model)
        for name, gradient in whole_gradients(model).items():
            found[name] = found[name] + gradient if name in found else gradient
    return found


def sum_partial_gradients(model: BertEncoder) -> None:
    """What the optimizer does for parameters that work on a shard of the sequence."""
    from megatron import mpu

    shardings = mpu.parameter_shardings(model)
    for name, parameter in model.named_parameters():
        if shardings[name].partial_gradient and parameter.grad is not None:
            mpu.all_reduce(parameter.grad, model.group)
