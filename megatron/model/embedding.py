"""From token ids to the first hidden states: word and position embeddings, and dropout."""

from dataclasses import replace
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.base.formulas import padded_vocab_size
from megatron.model.config import TransformerConfig
from megatron.model.dropout import dropout, dropout_stream
from megatron.model.init import Fill, normal
from megatron.model.placement import Placement, shard_length


class PositionEmbedding(nn.Module):
    """A learned vector for each position, replicated on the tensor ranks. weight: [max positions, h].

    With sequence parallelism a rank looks up the positions of its shard, and has a term of the gradient.
    """

    def __init__(self, config: TransformerConfig, **where: Unpack[Placement]) -> None:
        super().__init__()
        shape = (config.max_position_embeddings, config.hidden_size)
        self.initializers: dict[str, Fill] = {"weight": normal(config.init_method_std)}
        self.weight = nn.Parameter(torch.empty(shape, dtype=where.get("dtype"), device=where.get("device")))
        partial = where.get("sequence_parallel", False)
        self.sharding = {"weight": replace(mpu.replicated("weight", self.weight), partial_gradient=partial)}
        if not self.weight.is_meta:
            self._fill()

    def _fill(self) -> None:
        """Draw as the layers of mpu do: in float32 on the CPU, from the stream that all tensor ranks share."""
        whole = torch.empty(self.weight.shape, dtype=torch.float32, device="cpu")
        with torch.no_grad(), mpu.get_rng_tracker().fork(mpu.PARAMETER_STREAM):
            self.initializers["weight"](whole)
            self.weight.copy_(whole)

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
        self._check(position_ids)
        return F.embedding(position_ids.t()[shard], self.weight)

    def _check(self, position_ids: Tensor) -> None:
        """ValueError for a position that has no vector; on an accelerator the lookup itself fails, without waiting."""
        if position_ids.device.type != "cpu" or position_ids.numel() == 0:
            return
        for worst in (int(position_ids.min()), int(position_ids.max())):
            if not 0 <= worst < len(self.weight):
                raise ValueError(f"position {worst}: --max-position-embeddings {len(self.weight)} has no vector for it")


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
    """Word and position embeddings, summed, then dropout.

    The vocabulary is split over the tensor ranks and padded with rows of zeros. Forward one all-reduce, backward none;
    with sequence parallelism forward a reduce-scatter, backward an all-gather.

    Args:
        config: the sizes.
        vocab_size: rows that are weights; one for each token id, and perhaps more.
        where: group, dtype and device of the parameters, and whether the result is to be a shard of the sequence.
    """

    def __init__(self, config: TransformerConfig, vocab_size: int, **where: Unpack[Placement]) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.group = mpu.resolve_group(where.get("group"))
        self.sequence_parallel = where.get("sequence_parallel", False)
        self.word_embeddings = word_embeddings(config, vocab_size, **where)
        self.position_embeddings = PositionEmbedding(config, **where)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Ids [b, s] -> [s, b, h], or this rank's [s/t, b, h]. `position_ids` [b, s] are 0, 1, 2, ... by default."""
        length = tokens.shape[1]
        shard = self._shard(length)
        positions = self.position_embeddings(length, position_ids, shard)  # [s, 1 or b, h]
        words = self.word_embeddings(tokens.t())  # [s, b, h]
        drops = self.training and self.dropout > 0
        with dropout_stream(sharded=drops and self.sequence_parallel):
            return dropout(words + positions, self.dropout, drops)

    def _shard(self, length: int) -> slice:
        """The positions of a sequence whose hidden states this rank has."""
        if not self.sequence_parallel:
            return slice(None)
        part = shard_length(length, self.group.size)
        return slice(self.group.rank * part, (self.group.rank + 1) * part)
