"""The stack of layers and the norm after it."""

import functools
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.base.complaints import raise_joined
from megatron.model.config import TransformerConfig
from megatron.model.documents import DocumentLengths
from megatron.model.layer import transformer_layer
from megatron.model.norm import LayerNorm
from megatron.model.placement import Placement
from megatron.model.recompute import RecomputeConfig


class Transformer(nn.Module):
    """l layers, and a final norm where the layers are pre-norm.

    The layers are named by their number in the whole model, so that names are equal at any layout. Full recomputation
    runs a layer's forward collectives once more in the backward pass, and with distributed inputs an all-gather for
    each input that is kept.

    Args:
        config: the sizes and choices.
        causal: whether a position sees only itself and what is before it.
        recompute: what is computed again in the backward pass.
        where: group, dtype and device of the parameters, and whether hidden states are a shard of the sequence.

    Raises `ConfigError` naming each size that does not divide over the tensor group, and what does not fit in
    `recompute`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        causal: bool,
        recompute: RecomputeConfig | None = None,
        **where: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.group = mpu.resolve_group(where.get("group"))
        self.recompute = recompute or RecomputeConfig()
        ranks, shards = self.group.size, where.get("sequence_parallel", False)
        fit = self.recompute.layout_problems(config.num_layers, ranks, shards)
        raise_joined(config.tensor_problems(ranks) + fit)
        make = functools.partial(
            transformer_layer,
            config,
            causal=causal,
            recompute_core=self.recompute.granularity == "selective",
            **where,
        )
        self.layers = nn.ModuleDict({str(number): make() for number in range(config.num_layers)})
        self.final_layernorm = LayerNorm(config, **where) if config.norm_position == "pre" else None

    def forward(self, hidden: Tensor, document_lengths: DocumentLengths | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h], or this rank's [s/t, b, h] of both.

        With `document_lengths` the documents of a sample do not see each other.
        """
        for names, again in self.recompute.chunks(list(self.layers)):
            run = functools.partial(self.run, names, document_lengths)
            if again and torch.is_grad_enabled():
                distribute = self.recompute.distribute_saved_activations
                hidden = mpu.checkpoint(run, hidden, distribute=distribute, group=self.group)
            else:
                hidden = run(hidden)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)

    def run(self, names: Sequence[str], document_lengths: DocumentLengths | None, hidden: Tensor) -> Tensor:
        """The layers of these names, one after another."""
        for name in names:
            hidden = self.layers[name](hidden, document_lengths)
        return hidden
