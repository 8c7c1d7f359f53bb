"""Self-attention with its heads split over the tensor ranks."""

import functools
from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.model.cache import LayerCache
from megatron.model.config import TransformerConfig
from megatron.model.documents import Visible, attend_within
from megatron.model.dropout import dropout_stream
from megatron.model.init import normal, output_normal
from megatron.model.kernels import fused_attention, unfused_attention
from megatron.model.placement import Placement


class SelfAttention(nn.Module):
    """Multi-head self-attention; each tensor rank has n/t heads.

    Forward one all-reduce (after the output projection), backward one (before the fused query, key and value). With
    sequence parallelism forward an all-gather and a reduce-scatter, backward two all-gathers and a reduce-scatter.

    Args:
        config: the sizes and the kernel.
        causal: whether a position sees only itself and what is before it.
        recompute_core: keep nothing of the attention itself but its result, and compute it again in the backward pass.
        where: group, dtype and device of the parameters, and whether the input is a shard of the sequence.
    """

    def __init__(
        self, config: TransformerConfig, *, causal: bool, recompute_core: bool = False, **where: Unpack[Placement]
    ) -> None:
        super().__init__()
        self.causal = causal
        self.head_size = config.head_size
        self.dropout = config.attention_dropout
        self.kernel = fused_attention if config.attention_backend == "fused" else unfused_attention
        self.recompute_core = recompute_core
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

    def forward(self, hidden: Tensor, visible: Visible = None) -> tuple[Tensor, Tensor]:
        """[s, b, h] -> ([s, b, h] without the bias of the output projection, that bias [h]).

        `visible` says what a position sees of its sample. With sequence parallelism both are this rank's [s/t, b, h].
        """
        fused, _ = self.query_key_value(hidden)  # [s, b, n/t * 3 * d]
        heads = fused.unflatten(-1, (-1, 3, self.head_size))  # [s, b, n/t, 3, d]
        query, key, value = (part.permute(1, 2, 0, 3) for part in heads.unbind(3))  # [b, n/t, s, d]
        attend: Callable[[Tensor, Tensor, Tensor], Tensor] = self.attend
        if isinstance(visible, LayerCache):
            key, value, visible = visible.extend(key, value)  # [b, n/t, all tokens so far, d]
        if isinstance(visible, Tensor):
            attend = functools.partial(self.attend, mask=visible)
        elif visible is not None:
            attend = functools.partial(attend_within, visible, self.attend)
        if self.recompute_core and torch.is_grad_enabled():
            context = mpu.checkpoint(attend, query, key, value)
        else:
            context = attend(query, key, value)
        return self.dense(context.permute(2, 0, 1, 3).flatten(2))  # from [b, n/t, s, d]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention itself, [b, n/t, s, d] each; `mask` [b, 1, 1, s] is true for what all queries may see.

        Dropout comes from this tensor rank's own stream, since each rank has other heads.
        """
        p = self.dropout if self.training else 0.0
        with dropout_stream(sharded=p > 0):
            return self.kernel(query, key, value, causal=self.causal and mask is None, p=p, mask=mask)
