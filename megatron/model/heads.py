"""What stands on the last hidden states of a BERT: pooler, masked-LM head, and heads of tasks."""

from typing import Unpack

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.model.config import TransformerConfig
from megatron.model.dropout import dropout
from megatron.model.functions import gelu_erf
from megatron.model.init import normal
from megatron.model.norm import LayerNorm
from megatron.model.output import OutputLayer
from megatron.model.placement import Placement
from megatron.model.replicated import ReplicatedLinear


def whole(where: Placement) -> Placement:
    """The placement of what works on whole samples, which all tensor ranks have alike."""
    return {**where, "sequence_parallel": False}


class Pooler(nn.Module):
    """`tanh(dense(x))` of the first token's hidden state. Equal on the tensor ranks.

    No collectives; with sequence parallelism forward one all-gather of a token of each rank, backward none.
    """

    def __init__(self, config: TransformerConfig, **where: Unpack[Placement]) -> None:
        super().__init__()
        self.group = mpu.resolve_group(where.get("group"))
        self.sequence_parallel = where.get("sequence_parallel", False)
        size = config.hidden_size
        self.dense = ReplicatedLinear(size, size, normal(config.init_method_std), **whole(where))

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h], or this rank's [s/t, b, h] -> [b, h]."""
        first = hidden[:1]
        if self.sequence_parallel:
            # All ranks go on with the same numbers, so that what comes back is the whole gradient, not a term of it.
            first = mpu.gather_from_sequence_parallel_region(first, tensor_parallel_output_grad=False, group=self.group)
        return torch.tanh(self.dense(first[0]))


class BertLMHead(OutputLayer):
    """Masked-language-model head: dense h -> h, GELU (exact, whatever the layers have), layer norm, output projection.

    The projection is the word embedding again, or a matrix of its own if untied, and has a bias that is split over the
    tensor ranks as the vocabulary is. Collectives: those of `OutputLayer`; arguments as there.
    """

    def __init__(self, config: TransformerConfig, vocab_size: int, **where: Unpack[Placement]) -> None:
        super().__init__(config, vocab_size, bias=True, **where)
        size = config.hidden_size
        self.dense = ReplicatedLinear(size, size, normal(config.init_method_std), **where)
        self.layernorm = LayerNorm(config, **where)

    def forward(self, hidden: Tensor, labels: Tensor | None, tied: Tensor | None = None) -> Tensor:
        """This rank's logits [b, s, v/t] of hidden states [s, b, h] or [s/t, b, h], or the losses [b, s] of `labels`.

        `tied` is the matrix [v/t, h] where there is none here.
        """
        return super().forward(self.layernorm(gelu_erf(self.dense(hidden))), labels, tied)


class ClassificationHead(ReplicatedLinear):
    """Dropout, then scores of `classes` from a pooled state: [b, h] -> [b, classes]. Equal on the tensor ranks.

    Dropout of probability `p` draws from the default generator, which is equal on the tensor ranks. No collectives.
    """

    def __init__(self, config: TransformerConfig, classes: int, p: float, **where: Unpack[Placement]) -> None:
        if classes < 1:
            raise ValueError(f"{classes} classes: there must be at least 1")
        super().__init__(config.hidden_size, classes, normal(config.init_method_std), **whole(where))
        self.dropout = p

    def forward(self, pooled: Tensor) -> Tensor:
        """[b, h] -> [b, classes]."""
        return super().forward(dropout(pooled, self.dropout, self.training))


class MultipleChoiceHead(ClassificationHead):
    """Dropout, then one score for each option of a question, of which `choices` in turn belong together."""

    def __init__(self, config: TransformerConfig, choices: int, p: float, **where: Unpack[Placement]) -> None:
        if choices < 1:
            raise ValueError(f"{choices} choices: there must be at least 1")
        super().__init__(config, 1, p, **where)
        self.choices = choices

    def forward(self, pooled: Tensor) -> Tensor:
        """[b choices, h] -> [b, choices]."""
        return super().forward(pooled).view(-1, self.choices)
