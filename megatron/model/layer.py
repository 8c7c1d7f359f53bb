"""One transformer layer: attention and MLP, each with its norm, dropout and residual."""

from typing import Unpack

from torch import Tensor, nn

from megatron.model.attention import SelfAttention
from megatron.model.config import TransformerConfig
from megatron.model.documents import Visible
from megatron.model.dropout import dropout_stream
from megatron.model.functions import bias_dropout_add
from megatron.model.mlp import MLP
from megatron.model.norm import LayerNorm
from megatron.model.placement import Placement


class _Layer(nn.Module):
    """What both kinds of layer share: the addition to the residual.

    Forward two all-reduces, backward two. With sequence parallelism forward two all-gathers and two reduce-scatters,
    backward four (two of them of inputs that are gathered again) and two.
    """

    def __init__(self, config: TransformerConfig, **where: Unpack[Placement]) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.sequence_parallel = where.get("sequence_parallel", False)

    def add(self, residual: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        """`residual + dropout(x + bias)`; the masks are equal on the tensor ranks, unless each has a shard."""
        drops = self.training and self.dropout > 0
        with dropout_stream(sharded=drops and self.sequence_parallel):
            return bias_dropout_add(x, bias, residual, self.dropout, drops)


class PreNormLayer(_Layer):
    """`x + f(LN(x))` for attention and then for the MLP. Arguments as `transformer_layer`."""

    def __init__(
        self, config: TransformerConfig, *, causal: bool, recompute_core: bool = False, **where: Unpack[Placement]
    ) -> None:
        super().__init__(config, **where)
        self.input_layernorm = LayerNorm(config, **where)
        self.self_attention = SelfAttention(config, causal=causal, recompute_core=recompute_core, **where)
        self.post_attention_layernorm = LayerNorm(config, **where)
        self.mlp = MLP(config, **where)

    def forward(self, hidden: Tensor, visible: Visible = None) -> Tensor:
        """[s, b, h] -> [s, b, h], or this rank's [s/t, b, h] of both."""
        # What the two give is handed on without a name: nobody needs it after the addition.
        hidden = self.add(hidden, *self.self_attention(self.input_layernorm(hidden), visible))
        return self.add(hidden, *self.mlp(self.post_attention_layernorm(hidden)))


class NormedResidualLayer(PreNormLayer):
    """`y = LN(x); y + f(y)` for attention and then for the MLP: the residual is what the norm gives, not what it got.

    Megatron-LM's `--apply-residual-connection-post-layernorm`. Arguments as `transformer_layer`.
    """

    def forward(self, hidden: Tensor, visible: Visible = None) -> Tensor:
        """[s, b, h] -> [s, b, h], or this rank's [s/t, b, h] of both."""
        hidden = self.input_layernorm(hidden)
        hidden = self.post_attention_layernorm(self.add(hidden, *self.self_attention(hidden, visible)))
        return self.add(hidden, *self.mlp(hidden))


class PostNormLayer(_Layer):
    """`LN(x + f(x))` for attention and then for the MLP, as the original Transformer and BERT.

    Arguments as `transformer_layer`.
    """

    def __init__(
        self, config: TransformerConfig, *, causal: bool, recompute_core: bool = False, **where: Unpack[Placement]
    ) -> None:
        super().__init__(config, **where)
        self.self_attention = SelfAttention(config, causal=causal, recompute_core=recompute_core, **where)
        self.post_attention_layernorm = LayerNorm(config, **where)
        self.mlp = MLP(config, **where)
        self.post_mlp_layernorm = LayerNorm(config, **where)

    def forward(self, hidden: Tensor, visible: Visible = None) -> Tensor:
        """[s, b, h] -> [s, b, h], or this rank's [s/t, b, h] of both."""
        hidden = self.post_attention_layernorm(self.add(hidden, *self.self_attention(hidden, visible)))
        return self.post_mlp_layernorm(self.add(hidden, *self.mlp(hidden)))


def transformer_layer(
    config: TransformerConfig, *, causal: bool, recompute_core: bool = False, **where: Unpack[Placement]
) -> PreNormLayer | PostNormLayer:
    """One layer of the kind that `config.norm_position` and `config.apply_residual_connection_post_layernorm` name.

    Args:
        config: the sizes and choices.
        causal: whether a position sees only itself and what is before it.
        recompute_core: keep nothing of the attention itself but its result, and compute it again in the backward pass.
        where: group, dtype and device of the parameters, and whether hidden states are a shard of the sequence.
    """
    kind: type[PreNormLayer] | type[PostNormLayer] = PostNormLayer
    if config.norm_position == "pre":
        kind = NormedResidualLayer if config.apply_residual_connection_post_layernorm else PreNormLayer
    return kind(config, causal=causal, recompute_core=recompute_core, **where)
