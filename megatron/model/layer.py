"""One transformer layer: attention and MLP, each with its norm, dropout and residual."""

from typing import Unpack

from torch import Tensor, nn

from megatron.model.attention import SelfAttention
from megatron.model.config import TransformerConfig
from megatron.model.documents import DocumentLengths
from megatron.model.functions import bias_dropout_add
from megatron.model.mlp import MLP
from megatron.model.placement import Placement


def layer_norm(config: TransformerConfig, **where: Unpack[Placement]) -> nn.LayerNorm:
    """A norm over h, replicated on the tensor ranks."""
    return nn.LayerNorm(
        config.hidden_size, eps=config.layernorm_epsilon, dtype=where.get("dtype"), device=where.get("device")
    )


class PreNormLayer(nn.Module):
    """`x + f(LN(x))` for attention and then for the MLP.

    Forward two all-reduces, backward two. Arguments as `transformer_layer`.
    """

    def __init__(self, config: TransformerConfig, *, causal: bool, **where: Unpack[Placement]) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.input_layernorm = layer_norm(config, **where)
        self.self_attention = SelfAttention(config, causal=causal, **where)
        self.post_attention_layernorm = layer_norm(config, **where)
        self.mlp = MLP(config, **where)

    def forward(self, hidden: Tensor, document_lengths: DocumentLengths | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        attended, bias = self.self_attention(self.input_layernorm(hidden), document_lengths)
        hidden = bias_dropout_add(attended, bias, hidden, self.dropout, self.training)
        transformed, bias = self.mlp(self.post_attention_layernorm(hidden))
        return bias_dropout_add(transformed, bias, hidden, self.dropout, self.training)


class PostNormLayer(nn.Module):
    """`LN(x + f(x))` for attention and then for the MLP, as the original Transformer and BERT.

    Forward two all-reduces, backward two. Arguments as `transformer_layer`.
    """

    def __init__(self, config: TransformerConfig, *, causal: bool, **where: Unpack[Placement]) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.self_attention = SelfAttention(config, causal=causal, **where)
        self.post_attention_layernorm = layer_norm(config, **where)
        self.mlp = MLP(config, **where)
        self.post_mlp_layernorm = layer_norm(config, **where)

    def forward(self, hidden: Tensor, document_lengths: DocumentLengths | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        attended, bias = self.self_attention(hidden, document_lengths)
        hidden = bias_dropout_add(attended, bias, hidden, self.dropout, self.training)
        hidden = self.post_attention_layernorm(hidden)
        transformed, bias = self.mlp(hidden)
        hidden = bias_dropout_add(transformed, bias, hidden, self.dropout, self.training)
        return self.post_mlp_layernorm(hidden)


def transformer_layer(
    config: TransformerConfig, *, causal: bool, **where: Unpack[Placement]
) -> PreNormLayer | PostNormLayer:
    """One layer of the kind that `config.norm_position` names.

    Args:
        config: the sizes and choices.
        causal: whether a position sees only itself and what is before it.
        where: group, dtype and device of the parameters.
    """
    kind = PreNormLayer if config.norm_position == "pre" else PostNormLayer
    return kind(config, causal=causal, **where)
