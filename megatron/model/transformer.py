"""The stack of layers and the norm after it."""

from typing import Unpack

from torch import Tensor, nn

from megatron.base.complaints import raise_joined
from megatron.model.config import TransformerConfig
from megatron.model.documents import DocumentLengths
from megatron.model.layer import layer_norm, transformer_layer
from megatron.model.placement import Placement
from megatron.mpu import resolve_group


class Transformer(nn.Module):
    """l layers, and a final norm where the layers are pre-norm.

    The layers are named by their number in the whole model, so that names are equal at any layout.

    Args:
        config: the sizes and choices.
        causal: whether a position sees only itself and what is before it.
        where: group, dtype and device of the parameters.

    Raises `ConfigError` naming each size that does not divide over the tensor group.
    """

    def __init__(self, config: TransformerConfig, *, causal: bool, **where: Unpack[Placement]) -> None:
        super().__init__()
        raise_joined(config.tensor_problems(resolve_group(where.get("group")).size))
        self.layers = nn.ModuleDict(
            {str(number): transformer_layer(config, causal=causal, **where) for number in range(config.num_layers)}
        )
        self.final_layernorm = layer_norm(config, **where) if config.norm_position == "pre" else None

    def forward(self, hidden: Tensor, document_lengths: DocumentLengths | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h]. With `document_lengths` the documents of a sample do not see each other."""
        for layer in self.layers.values():
            hidden = layer(hidden, document_lengths)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)
