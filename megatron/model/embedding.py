"""From token ids to the first hidden states: word, position and token-type embeddings, and dropout."""

from typing import Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.base.formulas import padded_vocab_size
from megatron.model.config import TransformerConfig
from megatron.model.dropout import dropout, dropout_stream
from megatron.model.init import normal
from megatron.model.norm import LayerNorm
from megatron.model.placement import Placement, shard_length
from megatron.model.replicated import Replicated


class PositionEmbedding(Replicated):
    """A learned vector for each position, replicated on the tensor ranks. weight: [max positions, h].

    With sequence parallelism a rank looks up the positions of its shard, and has a term of the gradient.
    """

    def __init__(self, config: TransformerConfig, **where: Unpack[Placement]) -> None:
        super().__init__()
        self.weight: nn.Parameter
        shape = (config.max_position_embeddings, config.hidden_size)
        self.add("weight", shape, normal(config.init_method_std), **where)

    def forward(self, length: int, position_ids: Tensor | None = None, shard: slice = slice(None)) -> Tensor:
        """The vectors of positions 0 to `length`, [s, 1, h], or those of `position_ids` [b, s], [s, b, h].

        Of all these positions only those in `shard` are looked up.
        """
        most = len(self.weight)
        if length > most:
            raise ValueError(f"a sequence of {length} tokens: --max-position-embeddings {most} allows {most} at most")
        if position_ids is None:
            return self.weight[:length][shard].unsqueeze(1)
        mpu.utils.check_id_dtype(position_ids, "position")
        position_ids = position_ids.long()
        _check_range(position_ids, most, "position", f"--max-position-embeddings {most} has no vector for it")
        return F.embedding(position_ids.t()[shard], self.weight)


class TokenTypeEmbedding(Replicated):
    """A learned vector for each type of token, replicated on the tensor ranks. weight: [types, h].

    With sequence parallelism a rank looks up the types of its shard, and has a term of the gradient.
    """

    def __init__(self, config: TransformerConfig, token_types: int, **where: Unpack[Placement]) -> None:
        super().__init__()
        self.weight: nn.Parameter
        self.add("weight", (token_types, config.hidden_size), normal(config.init_method_std), **where)

    def forward(self, types: Tensor, shard: slice = slice(None)) -> Tensor:
        """The vectors of `types` [b, s], [s, b, h]; of all these positions only those in `shard`."""
        mpu.utils.check_id_dtype(types, "token type")
        types, known = types.long(), len(self.weight)
        _check_range(types, known, "token type", f"the model has types 0 to {known - 1}")
        return F.embedding(types.t()[shard], self.weight)


def _check_range(ids: Tensor, size: int, what: str, why: str) -> None:
    """ValueError for an id that has no vector; on an accelerator the lookup itself fails, without waiting."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    for worst in (int(ids.min()), int(ids.max())):
        if not 0 <= worst < size:
            raise ValueError(f"{what} {worst}: {why}")


def word_embeddings(
    config: TransformerConfig, vocab_size: int, **where: Unpack[Placement]
) -> mpu.VocabParallelEmbedding:
    """A vector for each of `vocab_size` rows, and rows of zeros up to a size that divides. weight: [v/t, h]."""
    return mpu.VocabParallelEmbedding(
        padded_vocab_size(vocab_size, config.make_vocab_size_divisible_by, mpu.resolve_group(where.get("group")).size),
        config.hidden_size,
        init_method=normal(config.init_method_std),
        real_num_embeddings=vocab_size,
        **where,
    )


class EmbeddingCopy(nn.Module):
    """The word embeddings alone, as the last stage of a pipeline has them a second time for its output projection.

    They have the name that they have in `Embedding`, and so begin with equal weights. Arguments as `Embedding`.
    """

    def __init__(self, config: TransformerConfig, vocab_size: int, **where: Unpack[Placement]) -> None:
        super().__init__()
        self.word_embeddings = word_embeddings(config, vocab_size, **where)


class Embedding(nn.Module):
    """Word, position and perhaps token-type embeddings, summed, perhaps a norm, then dropout.

    The vocabulary is split over the tensor ranks and padded with rows of zeros. Forward one all-reduce, backward none;
    with sequence parallelism forward a reduce-scatter, backward an all-gather.

    Args:
        config: the sizes.
        vocab_size: rows that are weights; one for each token id, and perhaps more.
        token_types: kinds of tokens, as the segments of a pair; 0 for no such embedding.
        norm: whether the sum is normed, as in the original BERT.
        where: group, dtype and device of the parameters, and whether the result is to be a shard of the sequence.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        *,
        token_types: int = 0,
        norm: bool = False,
        **where: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.group = mpu.resolve_group(where.get("group"))
        self.sequence_parallel = where.get("sequence_parallel", False)
        self.word_embeddings = word_embeddings(config, vocab_size, **where)
        self.position_embeddings = PositionEmbedding(config, **where)
        self.tokentype_embeddings = TokenTypeEmbedding(config, token_types, **where) if token_types else None
        self.layernorm = LayerNorm(config, **where) if norm else None

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        """Ids [b, s] -> [s, b, h], or this rank's [s/t, b, h].

        `position_ids` [b, s] are 0, 1, 2, ... by default. `types` [b, s] are those of the tokens where they have an
        embedding, and not looked at elsewhere.
        """
        length = tokens.shape[1]
        shard = self._shard(length)
        positions = self.position_embeddings(length, position_ids, shard)  # [s, 1 or b, h]
        hidden = self.word_embeddings(tokens.t()) + positions  # [s, b, h]
        if self.tokentype_embeddings is not None:
            assert types is not None
            hidden = hidden + self.tokentype_embeddings(types, shard)
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        drops = self.training and self.dropout > 0
        with dropout_stream(sharded=drops and self.sequence_parallel):
            return dropout(hidden, self.dropout, drops)

    def _shard(self, length: int) -> slice:
        """The positions of a sequence whose hidden states this rank has."""
        if not self.sequence_parallel:
            return slice(None)
        part = shard_length(length, self.group.size)
        return slice(self.group.rank * part, (self.group.rank + 1) * part)
