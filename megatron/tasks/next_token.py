"""A GPT on tensor ranks and stages of a pipeline, asked for what comes next."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import mpu
from megatron.model import CachedRows, GPTModel, KeyValueCache, gather_logits


class NextToken(Protocol):
    """What generation asks of a model; the calls are made on all its ranks alike."""

    @property
    def context(self) -> int:
        """The longest sequence that it takes."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of real token ids; nothing else is ever chosen."""
        ...

    def new_cache(self, rows: int, columns: int) -> KeyValueCache:
        """An empty cache for what this rank holds of the model."""
        ...

    def logits(self, tokens: Sequence[Sequence[int]], cache: CachedRows | None) -> Tensor | None:
        """Logits [b, v] of what follows each of b sequences, on the ranks that know them, None on the others.

        Without a cache, or where its rows are new, `tokens` are whole sequences; else one token each.
        """
        ...

    def share(self, ids: Sequence[int] | None, count: int) -> list[int]:
        """`count` ids, chosen by one of the ranks that know the logits, on every rank."""
        ...

    @property
    def chooses(self) -> bool:
        """Whether this is the rank that chooses."""
        ...


class SplitGPT:
    """`NextToken` of a `GPTModel` whose ranks are the current model parallel group, one stage each.

    Args:
        model: in evaluation mode, without sequence parallelism.
        device: of its weights.
    """

    def __init__(self, model: GPTModel, device: torch.device) -> None:
        self.model, self.device = model, device
        self.context, self.vocab_size = model.config.max_position_embeddings, model.vocab_size
        self._tensor_ranks, self._stages = (
            mpu.get_tensor_model_parallel_world_size(),
            mpu.get_pipeline_model_parallel_world_size(),
        )
        self.first, self.last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
        self.chooses = self.last and mpu.get_tensor_model_parallel_rank() == 0

    def new_cache(self, rows: int, columns: int) -> KeyValueCache:
        """An empty cache for the layers and heads of this rank."""
        return self.model.new_cache(rows, columns)

    def logits(self, tokens: Sequence[Sequence[int]], cache: CachedRows | None) -> Tensor | None:
        """See `NextToken`; [b, v] on the last stage. Collectives: those of `forward`, one all-gather of the logits."""
        longest = max(map(len, tokens))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in tokens], device=self.device)  # [b, s]
        ends = torch.tensor([[len(row) - 1] for row in tokens], device=self.device)  # [b, 1]
        result = self.forward(padded, cache=cache, logits_at=ends)
        return None if result is None else gather_logits(result[:, 0], self.vocab_size)

    def forward(self, tokens: Tensor, **asked: Any) -> Tensor | None:
        """What the model gives on the last stage for tokens [b, s] and what its `forward` takes beside them, else None.

        Between stages hidden states [s, b, h] are sent. Collectives: those of the model.
        """
        hidden = None if self.first else self._receive(*tokens.shape)
        result: Tensor = self.model(tokens, hidden=hidden, **asked)
        if self.last:
            return result
        dist.send(result.contiguous(), mpu.get_pipeline_model_parallel_next_rank(), self._pipeline())
        return None

    def share(self, ids: Sequence[int] | None, count: int) -> list[int]:
        """See `NextToken`: one broadcast over the ranks of the model, from the first tensor rank of the last stage."""
        if self._tensor_ranks * self._stages == 1:
            return list(ids or ())
        numbers = torch.zeros(count, dtype=torch.int64) if ids is None else torch.tensor(ids)
        numbers = numbers.to(self.device)
        dist.broadcast(numbers, group=mpu.get_model_parallel_group(), group_src=self._tensor_ranks * (self._stages - 1))
        chosen: list[int] = numbers.tolist()
        return chosen

    def _receive(self, samples: int, length: int) -> Tensor:
        weight = next(self.model.parameters())
        hidden = torch.empty(self.model.stage_shape(samples, length), dtype=weight.dtype, device=self.device)
        dist.recv(hidden, mpu.get_pipeline_model_parallel_prev_rank(), self._pipeline())
        return hidden

    def _pipeline(self) -> dist.ProcessGroup:
        return mpu.get_pipeline_model_parallel_group()
