"""BERT: an encoder that sees both ways, and with it the heads of pretraining."""

from typing import Any, NamedTuple, TypeVar, Unpack

import torch
from torch import Tensor, nn

from megatron.model.config import TransformerConfig
from megatron.model.heads import BertLMHead, ClassificationHead, Pooler
from megatron.model.init import initialize_parameters
from megatron.model.staged import Layout, StagedModel, check_ids

TOKEN_TYPES = 2  # of a pair of segments


class Encoding(NamedTuple):
    """What the last stage's encoder gives.

    hidden: [s, b, h], or this rank's [s/t, b, h] with sequence parallelism.
    pooled: [b, h], equal on the tensor ranks; None without a pooler.
    """

    hidden: Tensor
    pooled: Tensor | None


class BertOutput(NamedTuple):
    """What the last stage of a BERT gives in pretraining.

    lm: losses [b, s] of the labels, in float32 or wider; without labels this rank's logits [b, s, v/t].
    binary: logits [b, 2] of whether the segments changed places, equal on the tensor ranks; None without that head.
    """

    lm: Tensor
    binary: Tensor | None


class BertEncoder(StagedModel):
    """Embedding, transformer and pooler of a BERT, split over the tensor group; of a pipeline, this rank's stages.

    Without heads it gives an `Encoding`. Collectives as `GPTModel`, less those of its output projection; with sequence
    parallelism the pooler gathers a token of each rank. With `--norm-position post` a norm follows the embeddings too,
    as in the original BERT.

    Args:
        config: the sizes and choices.
        vocab_size: number of real token ids; the embedding is padded after them.
        pooler: whether the first token's last hidden state is pooled.
        token_types: kinds of tokens that have an embedding: 2 for the segments of a pair, 0 for none.
        tied: whether a head uses the word embedding.
        layout: see `Layout`; on the device "meta" nothing is drawn (`build_bert` fills it).
    """

    kind = "bert-encoder"

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        *,
        pooler: bool = True,
        token_types: int = TOKEN_TYPES,
        tied: bool = False,
        **layout: Unpack[Layout],
    ) -> None:
        super().__init__(
            config,
            vocab_size,
            causal=False,
            tied=tied,
            token_types=token_types,
            embedding_norm=config.norm_position == "post",
            **layout,
        )
        self.token_types, self.has_pooler = token_types, pooler
        self.pooler = Pooler(config, **self.placement) if pooler and self.has_head else None

    def heads(self) -> list[nn.Module]:
        """What follows the transformer, where this rank has it."""
        return [] if self.pooler is None else [self.pooler]

    def encode(
        self,
        tokens: Tensor,
        types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        *,
        hidden: Tensor | None = None,
        chunk: int = 0,
    ) -> Encoding | Tensor:
        """The last hidden states and the pooled first one; of a stage before the last, its hidden states alone.

        Args:
            tokens: ids [b, s], int64.
            types: of the tokens, [b, s]; all 0 by default.
            padding_mask: [b, s], true (or 1) for a token and false for padding, which no position sees. Each sample has
                at least one token. By default nothing is padding.
            hidden: what the stage before has given, for every stage but the first; of `stage_shape`.
            chunk: which of the stages of this rank is to work.

        Raises ValueError for ids out of their range and samples of padding alone (on a CPU; not looked at on an
        accelerator), shapes that differ, a sequence longer than `--max-position-embeddings`, and one that sequence
        parallelism cannot divide.
        """
        check_ids(tokens, types=types, padding_mask=padding_mask)
        if types is None and self.token_types:
            types = torch.zeros_like(tokens)
        hidden = self.hidden_states(tokens, hidden, visible_keys(padding_mask), chunk, types=types)
        if not self.transformer.stages[chunk].head:
            return hidden
        return Encoding(hidden, None if self.pooler is None else self.pooler(hidden))

    def forward(
        self,
        tokens: Tensor,
        types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        *,
        hidden: Tensor | None = None,
        chunk: int = 0,
    ) -> Any:
        """What `finish` makes of `encode`, whose arguments it takes; of a stage before the last, its hidden states."""
        encoded = self.encode(tokens, types, padding_mask, hidden=hidden, chunk=chunk)
        return encoded if isinstance(encoded, Tensor) else self.finish(encoded)

    def finish(self, encoding: Encoding) -> Any:
        """What the heads make of an encoding; here there are none."""
        return encoding

    def signature(self) -> dict[str, Any]:
        """What must be equal for weights to mean the same: kept in a checkpoint and compared when it is loaded."""
        return super().signature() | {"pooler": self.has_pooler, "token_types": self.token_types}


class BertModel(BertEncoder):
    """A BERT with the heads of pretraining: masked-LM and, on the pooler, the order of two segments.

    Collectives as `GPTModel`, with sequence parallelism forward one small all-gather more (`Pooler`).

    Args: as `BertEncoder`, and
        binary_head: whether there is a head for the order of segments; without it there is no pooler, and as samples
            are no pairs then, no embedding of token types.
    """

    kind = "bert"

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        *,
        binary_head: bool = True,
        **layout: Unpack[Layout],
    ) -> None:
        tied = not config.untie_embeddings_and_output_weights
        token_types = TOKEN_TYPES if binary_head else 0
        super().__init__(config, vocab_size, pooler=binary_head, token_types=token_types, tied=tied, **layout)
        self.lm_head = BertLMHead(config, self.vocabulary_rows, **self.placement) if self.has_head else None
        self.binary_head: ClassificationHead | None = None
        if binary_head and self.has_head:
            self.binary_head = ClassificationHead(config, 2, 0.0, **self.placement)

    def heads(self) -> list[nn.Module]:
        """What follows the transformer, where this rank has it."""
        return super().heads() + [head for head in (self.lm_head, self.binary_head) if head is not None]

    def forward(
        self,
        tokens: Tensor,
        types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        hidden: Tensor | None = None,
        chunk: int = 0,
    ) -> Any:
        """A `BertOutput`, or the hidden states of a stage before the last. `labels` [b, s] are the ids to predict; a
        token with a negative one does not count, its loss is 0. The rest as in `encode`.
        """
        check_ids(tokens, labels=labels)
        encoded = self.encode(tokens, types, padding_mask, hidden=hidden, chunk=chunk)
        if isinstance(encoded, Tensor):
            return encoded
        assert self.lm_head is not None
        lm = self.lm_head(encoded.hidden, labels, self.tied_weight)
        return BertOutput(lm, None if self.binary_head is None else self.binary_head(encoded.pooled))

    def signature(self) -> dict[str, Any]:
        """What must be equal for weights to mean the same: kept in a checkpoint and compared when it is loaded."""
        return StagedModel.signature(self) | {"bert_no_binary_head": not self.has_pooler}


def visible_keys(padding_mask: Tensor | None) -> Tensor | None:
    """The mask of attention, bool [b, 1, 1, s], from [b, s]: what may be seen, by every position alike.

    None stays None. On a CPU raises ValueError where a sample has nothing to see.
    """
    if padding_mask is None:
        return None
    mask = padding_mask.bool()
    if mask.device.type == "cpu" and not bool(mask.any(1).all()):
        raise ValueError("padding_mask: each sample must have at least one token that is no padding")
    return mask[:, None, None, :]


Bert = TypeVar("Bert", bound=BertEncoder)


def build_bert(
    config: TransformerConfig,
    vocab_size: int,
    seed: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    kind: type[Bert] = BertModel,  # type: ignore[assignment]
    **options: Any,
) -> Bert:
    """A BERT of that kind with initial weights that depend on `seed` alone, not on the layout.

    `options` are those of the kind (`binary_head`, `classes`, `choices`, ...) and of `Split`. What two kinds share by
    name begins equal.
    """
    model = kind(config, vocab_size, dtype=dtype, device="meta", **options)
    initialize_parameters(model, seed, dtype, device)
    return model
