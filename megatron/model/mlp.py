"""The MLP of a layer with its inner width split over the tensor ranks."""

from typing import Unpack

from torch import Tensor, nn

from megatron import mpu
from megatron.model.config import TransformerConfig
from megatron.model.functions import ACTIVATIONS
from megatron.model.init import normal, output_normal
from megatron.model.placement import Placement


class MLP(nn.Module):
    """h -> f -> h with a GELU between; each tensor rank has f/t of the inner values.

    Forward one all-reduce (after the second matrix), backward one (before the first). With sequence parallelism forward
    an all-gather and a reduce-scatter, backward two all-gathers and a reduce-scatter.

    Args:
        config: the sizes and the activation.
        where: group, dtype and device of the parameters, and whether the input is a shard of the sequence.
    """

    def __init__(self, config: TransformerConfig, **where: Unpack[Placement]) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.dense_h_to_4h = mpu.ColumnParallelLinear(
            config.hidden_size,
            config.ffn_size,
            gather_output=False,
            init_method=normal(config.init_method_std),
            **where,
        )
        self.dense_4h_to_h = mpu.RowParallelLinear(
            config.ffn_size,
            config.hidden_size,
            input_is_parallel=True,
            init_method=output_normal(config.init_method_std, config.num_layers),
            skip_bias_add=True,
            **where,
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[s, b, h] -> ([s, b, h] without the bias of the second matrix, that bias [h]).

        With sequence parallelism both are this rank's [s/t, b, h].
        """
        inner, _ = self.dense_h_to_4h(hidden)  # [s, b, f/t]
        return self.dense_4h_to_h(self.activation(inner))
