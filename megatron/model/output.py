"""From the last hidden states to logits or losses, with the matrix of the word embedding or one of its own."""

from typing import Unpack

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.base.formulas import padded_vocab_size
from megatron.model.config import TransformerConfig
from megatron.model.embedding import word_embeddings
from megatron.model.init import Fill
from megatron.model.placement import Placement
from megatron.mpu.initialize import Group
from megatron.mpu.sharding import Sharding


class OutputLayer(nn.Module):
    """The output projection and the loss. weight: [v/t, h] if it is untied from the word embedding, else none; bias
    [v/t] if asked for, cut and padded as the rows of the weight.

    Forward the small all-reduces of the loss, backward one all-reduce; with sequence parallelism forward an all-gather
    as well, backward an all-gather and a reduce-scatter.

    Args:
        config: the sizes, and whether the projection has a matrix of its own.
        vocab_size: rows that are weights, the columns of the loss; one for each token id, and perhaps more.
        bias: whether there is one; it begins at zero.
        where: group, dtype and device of the parameters, and whether hidden states are a shard of the sequence.
    """

    def __init__(
        self, config: TransformerConfig, vocab_size: int, *, bias: bool = False, **where: Unpack[Placement]
    ) -> None:
        super().__init__()
        self.vocab_size, self.chunk_size = vocab_size, config.cross_entropy_chunk_size
        self.group = mpu.resolve_group(where.get("group"))
        self.sequence_parallel = where.get("sequence_parallel", False)
        self.sharding: dict[str, Sharding] = {}
        self.initializers: dict[str, Fill] = {}
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if config.untie_embeddings_and_output_weights:
            rows = word_embeddings(config, vocab_size, **where)  # as many, as they lie on the ranks, drawn as they are
            self.weight, self.sharding, self.initializers = rows.weight, rows.sharding, rows.initializers
        if bias:
            self._add_bias(padded_vocab_size(vocab_size, config.make_vocab_size_divisible_by, self.group.size), where)

    def _add_bias(self, padded: int, where: Placement) -> None:
        part = padded // self.group.size
        values = torch.zeros(part, dtype=where.get("dtype"), device=where.get("device"))
        self.bias = nn.Parameter(values)
        self.sharding["bias"] = Sharding(
            "bias", (self.vocab_size,), 0, self.group.rank * part, partitions=self.group.size
        )
        self.initializers["bias"] = nn.init.zeros_

    def forward(self, hidden: Tensor, labels: Tensor | None, tied: Tensor | None = None) -> Tensor:
        """This rank's logits [b, s, v/t] of hidden states [s, b, h] or [s/t, b, h], or the losses [b, s] of `labels`.

        `tied` is the matrix [v/t, h] where there is none here.
        """
        weight = self.weight if tied is None else tied
        return self.logits(hidden, weight) if labels is None else self.losses(hidden, labels, weight)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """This rank's logits [b, s, v/t] of the last hidden states [s, b, h] or [s/t, b, h]."""
        logits = mpu.parallel_linear(
            hidden, weight, self.bias, group=self.group, sequence_parallel=self.sequence_parallel
        )  # [s, b, v/t]
        return logits.transpose(0, 1)

    def losses(self, hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """Cross entropy [b, s] of `labels` [b, s] from the last hidden states [s, b, h] or [s/t, b, h]."""
        losses = mpu.vocab_parallel_linear_cross_entropy(
            hidden.flatten(0, 1),
            weight,
            labels.t().flatten(),
            bias=self.bias,
            chunk_size=self.chunk_size,
            vocab_size=self.vocab_size,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
        )  # [s * b]
        return losses.view(labels.t().shape).t()


def gather_logits(logits: Tensor, vocab_size: int, group: Group = None) -> Tensor:
    """Logits [..., v/t] of every tensor rank -> [..., vocab_size] without the padding columns.

    Forward one all-gather, backward none (each rank keeps its part of the gradient).
    """
    return mpu.gather_from_tensor_model_parallel_region(logits, group)[..., :vocab_size]
