"""BERT with the head of a task: classes of texts, options of questions."""

from typing import Any, Unpack

from torch import Tensor, nn

from megatron.model.bert import TOKEN_TYPES, BertEncoder, Encoding
from megatron.model.config import TransformerConfig
from megatron.model.heads import ClassificationHead, MultipleChoiceHead
from megatron.model.staged import Layout


class BertForClassification(BertEncoder):
    """A BERT that says to which of `classes` a text or a pair belongs: scores [b, classes], equal on the tensor ranks.

    Args: as `BertEncoder`, which has a pooler here, and the number of classes. Dropout before the head is that of
    hidden states.
    """

    kind = "bert-classification"

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        *,
        classes: int,
        token_types: int = TOKEN_TYPES,
        **layout: Unpack[Layout],
    ) -> None:
        super().__init__(config, vocab_size, token_types=token_types, **layout)
        self.classes = classes
        self.classification_head: ClassificationHead | None = None
        if self.has_head:
            self.classification_head = ClassificationHead(config, classes, config.hidden_dropout, **self.placement)

    def heads(self) -> list[nn.Module]:
        """What follows the transformer, where this rank has it."""
        return super().heads() + ([] if self.classification_head is None else [self.classification_head])

    def finish(self, encoding: Encoding) -> Tensor:
        """Scores [b, classes]."""
        assert self.classification_head is not None
        scores: Tensor = self.classification_head(encoding.pooled)
        return scores

    def signature(self) -> dict[str, Any]:
        """What must be equal for weights to mean the same: kept in a checkpoint and compared when it is loaded."""
        return super().signature() | {"classes": self.classes}


class BertForMultipleChoice(BertEncoder):
    """A BERT that scores the options of a question: [b, choices], equal on the tensor ranks.

    The options are folded into the batch: `choices` sequences in turn belong to one sample, and what goes from stage to
    stage is that of b choices sequences.

    Args: as `BertEncoder`, which has a pooler here, and the number of options of each question. Dropout before the head
    is that of hidden states.
    """

    kind = "bert-multiple-choice"

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        *,
        choices: int,
        token_types: int = TOKEN_TYPES,
        **layout: Unpack[Layout],
    ) -> None:
        super().__init__(config, vocab_size, token_types=token_types, **layout)
        self.choices = choices
        self.multichoice_head: MultipleChoiceHead | None = None
        if self.has_head:
            self.multichoice_head = MultipleChoiceHead(config, choices, config.hidden_dropout, **self.placement)

    def heads(self) -> list[nn.Module]:
        """What follows the transformer, where this rank has it."""
        return super().heads() + ([] if self.multichoice_head is None else [self.multichoice_head])

    def forward(
        self,
        tokens: Tensor,
        types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        *,
        hidden: Tensor | None = None,
        chunk: int = 0,
    ) -> Any:
        """Scores [b, choices] of ids [b, choices, s]; of a stage before the last, its hidden states [s, b choices, h].

        `types` and `padding_mask` are as large as the ids; the rest as in `encode`.
        """
        shapes = [tuple(ids.shape) for ids in (tokens, types, padding_mask) if ids is not None]
        if len(set(shapes)) > 1 or tokens.dim() != 3 or tokens.shape[1] != self.choices:
            raise ValueError(f"tokens, types and padding_mask of shapes {shapes}: all must be [b, {self.choices}, s]")
        rows = (None if ids is None else ids.flatten(0, 1) for ids in (types, padding_mask))
        return super().forward(tokens.flatten(0, 1), *rows, hidden=hidden, chunk=chunk)

    def finish(self, encoding: Encoding) -> Tensor:
        """Scores [b, choices]."""
        assert self.multichoice_head is not None
        scores: Tensor = self.multichoice_head(encoding.pooled)
        return scores

    def boundary_shape(self, micro_batch: int, seq_length: int) -> tuple[int, int, int]:
        """Of what a stage hands on for a micro-batch of questions, in the parameters' dtype: [s, b choices, h]."""
        return self.stage_shape(micro_batch * self.choices, seq_length)

    def signature(self) -> dict[str, Any]:
        """What must be equal for weights to mean the same: kept in a checkpoint and compared when it is loaded."""
        return super().signature() | {"choices": self.choices}
