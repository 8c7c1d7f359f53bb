"""Self-attention with its heads split over the tensor ranks."""

from typing import Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.model.config import TransformerConfig
from megatron.model.documents import DocumentLengths, attend_within
from megatron.model.init import normal, output_normal
from megatron.model.placement import Placement


class SelfAttention(nn.Module):
    """Multi-head self-attention; each tensor rank has n/t heads.

    Forward one all-reduce (after the output projection), backward one (before the fused query, key and value).

    Args:
        config: the sizes.
        causal: whether a position sees only itself and what is before it.
        where: group, dtype and device of the parameters.
    """

    def __init__(self, config: TransformerConfig, *, causal: bool, **where: Unpack[Placement]) -> None:
        super().__init__()
        self.causal = causal
        self.head_size = config.head_size
        self.dropout = config.attention_dropout
        self.query_key_value = mpu.ColumnParallelLinear(
            config.hidden_size,
            3 * config.projection_size,
            gather_output=False,
            init_method=normal(config.init_method_std),
            **where,
        )
        self.dense = mpu.RowParallelLinear(
            config.projection_size,
            config.hidden_size,
            input_is_parallel=True,
            init_method=output_normal(config.init_method_std, config.num_layers),
            skip_bias_add=True,
            **where,
        )

    def forward(self, hidden: Tensor, document_lengths: DocumentLengths | None = None) -> tuple[Tensor, Tensor]:
        """[s, b, h] -> ([s, b, h] without the bias of the output projection, that bias [h]).

        With `document_lengths` a position sees those of its own document alone.
        """
        fused, _ = self.query_key_value(hidden)  # [s, b, n/t * 3 * d]
        heads = fused.unflatten(-1, (-1, 3, self.head_size))  # [s, b, n/t, 3, d]
        query, key, value = (part.permute(1, 2, 0, 3) for part in heads.unbind(3))  # [b, n/t, s, d]
        if document_lengths is None:
            context = self.attend(query, key, value)
        else:
            context = attend_within(document_lengths, self.attend, query, key, value)
        return self.dense(context.permute(2, 0, 1, 3).flatten(2))  # from [b, n/t, s, d]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention itself, [b, n/t, s, d] each; no s x s matrix is kept where PyTorch's kernel can do without.

        Dropout comes from this tensor rank's own stream, since each rank has other heads.
        """
        if not self.training or self.dropout == 0:
            return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        with mpu.get_rng_tracker().fork():
            return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=self.causal)
