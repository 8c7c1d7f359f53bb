"""The stack of layers, or the stages of it that a rank holds, and the norm after it."""

import functools
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.base.complaints import raise_joined
from megatron.base.stages import StagePart, part_problems, whole_model
from megatron.model.cache import CachedRows
from megatron.model.config import TransformerConfig
from megatron.model.documents import Visible
from megatron.model.layer import transformer_layer
from megatron.model.norm import LayerNorm
from megatron.model.placement import Placement
from megatron.model.recompute import RecomputeConfig


class Transformer(nn.Module):
    """l layers, and a final norm where the layers are pre-norm.

    Of a pipeline a rank holds the layers of its own stages, and the norm where one of these is the last. The layers are
    named by their number in the whole model, so that names are equal at any layout. Full recomputation runs a layer's
    forward collectives once more in the backward pass, and with distributed inputs an all-gather for each input that is
    kept.

    Args:
        config: the sizes and choices.
        causal: whether a position sees only itself and what is before it.
        recompute: what is computed again in the backward pass, by each stage for itself.
        stages: what this rank holds, in the order of the model; the whole model by default.
        where: group, dtype and device of the parameters, and whether hidden states are a shard of the sequence.

    Raises `ConfigError` naming each size that does not divide over the tensor group, and what does not fit in
    `recompute` or `stages`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        causal: bool,
        recompute: RecomputeConfig | None = None,
        stages: Sequence[StagePart] | None = None,
        **where: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.group = mpu.resolve_group(where.get("group"))
        self.recompute = recompute or RecomputeConfig()
        ranks, shards = self.group.size, where.get("sequence_parallel", False)
        fit = self.recompute.layout_problems(config.num_layers, ranks, shards)
        self.stages = (whole_model(config.num_layers),) if stages is None else tuple(stages)
        raise_joined(config.tensor_problems(ranks) + fit + part_problems(self.stages, config.num_layers))
        make = functools.partial(
            transformer_layer,
            config,
            causal=causal,
            recompute_core=self.recompute.granularity == "selective",
            **where,
        )
        self.layers = nn.ModuleDict({str(number): make() for stage in self.stages for number in stage.layers})
        normed = self.stages[-1].head and config.norm_position == "pre"
        self.final_layernorm = LayerNorm(config, **where) if normed else None

    def modules_of(self, chunk: int) -> list[nn.Module]:
        """The layers of the stage `chunk`, and the norm after them where it has one."""
        part = self.stages[chunk]
        layers = [self.layers[str(number)] for number in part.layers]
        return [*layers, self.final_layernorm] if part.head and self.final_layernorm is not None else layers

    def forward(self, hidden: Tensor, visible: Visible | CachedRows = None, chunk: int = 0) -> Tensor:
        """[s, b, h] -> [s, b, h], or this rank's [s/t, b, h] of both, through the layers of its stage `chunk`.

        `visible` says what a position sees of its sample.
        """
        part = self.stages[chunk]
        for names, again in self.recompute.groups([str(number) for number in part.layers]):
            run = functools.partial(self.run, names, visible)
            if again and torch.is_grad_enabled():
                distribute = self.recompute.distribute_saved_activations
                hidden = mpu.checkpoint(run, hidden, distribute=distribute, group=self.group)
            else:
                hidden = run(hidden)
        return self.final_layernorm(hidden) if part.head and self.final_layernorm is not None else hidden

    def run(self, names: Sequence[str], visible: Visible | CachedRows, hidden: Tensor) -> Tensor:
        """The layers of these names, one after another."""
        for name in names:
            seen = visible.of(name) if isinstance(visible, CachedRows) else visible
            hidden = self.layers[name](hidden, seen)
        return hidden
