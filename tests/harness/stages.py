"""A GPT cut into stages and run one stage after another in one process, as a pipeline would run one micro-batch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron import mpu
from megatron.base.stages import StagePart
from megatron.model import Chunk, GPTModel, RecomputeConfig, TransformerConfig, build_gpt
from megatron.model.staged import StagedModel

VOCAB, S, B = 61, 12, 3
WORDS = "embedding.word_embeddings.weight"


@dataclasses.dataclass(frozen=True)
class Result:
    """What one pass forward and back gave: losses, gradients by name, and the shapes that went between stages."""

    losses: Tensor
    gradients: dict[str, Tensor]
    boundaries: list[tuple[int, ...]]


def cut(counts: Sequence[int]) -> list[StagePart]:
    """Stages of so many layers, in the order of the model."""
    ends = [sum(counts[: k + 1]) for k in range(len(counts))]
    last = len(counts) - 1
    return [
        StagePart(range(end - n, end), k == 0, k == last) for k, (n, end) in enumerate(zip(counts, ends, strict=True))
    ]


def build(config: TransformerConfig, stages: Sequence[StagePart] | None = None, **given: Any) -> GPTModel:
    """A model in float64 of these stages, or the whole; the seed is the same."""
    recompute = RecomputeConfig(**given.pop("recompute", {}))
    return build_gpt(config, VOCAB, 1, dtype=torch.float64, device="cpu", recompute=recompute, stages=stages, **given)


def deal(config: TransformerConfig, counts: Sequence[int], ranks: int, **given: Any) -> list[GPTModel]:
    """The models of all pipeline ranks, each with every `ranks`-th of the stages."""
    stages = cut(counts)
    return [build(config, stages[rank::ranks], **given) for rank in range(ranks)]


def in_order(models: Sequence[StagedModel]) -> list[Chunk]:
    """The chunks of all pipeline ranks in the order of the model."""
    chunks = [model.chunks for model in models]
    return [of_rank[k] for k in range(len(chunks[0])) for of_rank in chunks if k < len(of_rank)]


def ids(seed: int) -> Tensor:
    """Token ids [b, s]."""
    return torch.randint(VOCAB, (B, S), generator=torch.Generator().manual_seed(seed))


def document_lengths() -> Tensor:
    """[b, s]: samples of one, two and three documents."""
    lengths = torch.tensor([[12, 0, 0], [4, 8, 0], [3, 1, 8]])
    return torch.nn.functional.pad(lengths, (0, S - 3))


def run(models: Sequence[GPTModel]) -> Result:
    """Forward through all chunks and back, in the order of the model, with the streams of dropout begun anew.

    What is handed on is cut off from what made it, and the gradient that comes back is handed to that. Gradients of a
    parameter that several ranks have are summed up.
    """
    mpu.model_parallel_manual_seed(1234)
    received: list[Tensor | None] = [None]
    outputs: list[Tensor] = []
    for chunk in in_order(models):
        outputs.append(chunk(ids(0), labels=ids(1), document_lengths=document_lengths(), hidden=received[-1]))
        received.append(outputs[-1].detach().requires_grad_())
    losses = outputs[-1].detach()
    gradient = losses.cos()  # each token has another
    for output, source in zip(reversed(outputs), reversed(received[:-1]), strict=True):
        output.backward(gradient)
        if source is not None:
            assert source.grad is not None
            gradient = source.grad
    return Result(losses, summed_gradients(models), [tuple(output.shape) for output in outputs[:-1]])


def summed_gradients(models: Sequence[GPTModel]) -> dict[str, Tensor]:
    """The gradients by name; of one that several models have their sum."""
    found: dict[str, Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found
