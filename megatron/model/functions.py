"""Pure elementwise functions of a transformer layer, each written so that a compiler can fuse it."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from megatron.model.dropout import dropout


def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, p: float, training: bool) -> Tensor:
    """`residual + dropout(x + bias)`.

    Args:
        x: [..., h], the output of a row-parallel layer after its all-reduce.
        bias: [h].
        residual: [..., h].
        p: the probability of dropping a value, from the default generator, which is equal on the tensor ranks,
            unless the caller lends it another stream.
        training: drop nothing when false.
    """
    return residual + dropout(x + bias, p, training)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (arXiv:1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")


def gelu_erf(x: Tensor) -> Tensor:
    """GELU, exact."""
    return F.gelu(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf}
