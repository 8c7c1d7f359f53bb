"""What GPT and BERT share: an embedding, a transformer and a head, split over tensor ranks and stages of a pipeline."""

from collections.abc import Sequence
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.base.stages import StagePart
from megatron.model.cache import CachedRows
from megatron.model.chunk import Chunk
from megatron.model.config import TransformerConfig
from megatron.model.documents import Visible
from megatron.model.embedding import Embedding, EmbeddingCopy
from megatron.model.placement import Placement, shard_length
from megatron.model.recompute import RecomputeConfig
from megatron.model.transformer import Transformer
from megatron.mpu.initialize import Group

_WORDS = "embedding.word_embeddings.weight"


class Split(TypedDict, total=False):
    """Keyword arguments of every whole model: what of it is here.

    group: the tensor group; the current one by default.
    sequence_parallel: between the split matrices each tensor rank has s/t tokens of each sample (arXiv:2205.05198);
        parameters that work there have only a term of their gradient (`partial_gradient` of their sharding), which the
        caller has to sum over the group.
    recompute: what is computed again in the backward pass, by each stage for itself; nothing by default.
    stages: the stages that this rank holds, in the order of the model; the whole model as one by default.
    """

    group: Group
    sequence_parallel: bool
    recompute: RecomputeConfig | None
    stages: Sequence[StagePart] | None


class Layout(Split, total=False):
    """`Split`, and where the parameters are: dtype (float32 by default) and device; on "meta" nothing is drawn."""

    dtype: torch.dtype
    device: torch.device | str | None


class StagedModel(nn.Module):
    """A transformer that begins with token ids, of which a rank holds its share of some stages.

    Names, shardings and initial weights are those of the whole model whatever the stages are. Where the head uses the
    word embedding again, a last stage that is not the first as well holds a copy of it (`duplicate_parameters`).

    Args:
        config: the sizes and choices.
        vocab_size: number of real token ids; the embedding is padded after them, and after the further rows that
            `config.padded_vocab_size` asks for, which are weights like the others.
        causal: whether a position sees only itself and what is before it.
        tied: whether the head uses the word embedding.
        token_types: kinds of tokens that have an embedding, 0 for none.
        embedding_norm: whether a norm follows the embeddings.
        group, dtype, device, sequence_parallel, recompute, stages: see `Layout`.

    A subclass puts its heads into `heads()`. Raises ValueError naming each size that is wrong or does not divide over
    the group, and stages that are none.
    """

    kind: ClassVar[str]  # what checkpoints call it

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        *,
        causal: bool,
        tied: bool,
        token_types: int = 0,
        embedding_norm: bool = False,
        group: Group = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        sequence_parallel: bool = False,
        recompute: RecomputeConfig | None = None,
        stages: Sequence[StagePart] | None = None,
    ) -> None:
        super().__init__()
        if vocab_size < 1:
            raise ValueError(f"a vocabulary of {vocab_size}: it must have at least 1 token")
        self.config = config
        self.vocabulary_rows = config.vocabulary_rows(vocab_size)
        self.vocab_size = vocab_size
        self.group = mpu.resolve_group(group)
        self.sequence_parallel = sequence_parallel and self.group.size > 1
        self.placement: Placement = {
            "group": self.group,
            "dtype": dtype,
            "device": device,
            "sequence_parallel": self.sequence_parallel,
        }
        transformer = Transformer(config, causal=causal, recompute=recompute, stages=stages, **self.placement)
        first, self.has_head = transformer.stages[0].embedding, transformer.stages[-1].head
        self.tied = tied and (first or self.has_head)
        self.embedding: Embedding | EmbeddingCopy | None = None
        if first:
            self.embedding = Embedding(
                config, self.vocabulary_rows, token_types=token_types, norm=embedding_norm, **self.placement
            )
        elif self.tied:
            self.embedding = EmbeddingCopy(config, self.vocabulary_rows, **self.placement)
        self.transformer = transformer

    def heads(self) -> list[nn.Module]:
        """What follows the transformer, where this rank has it."""
        raise NotImplementedError

    @property
    def chunks(self) -> list[Chunk]:
        """The stages that this rank holds, in the order of the model."""
        return [Chunk(self, number, part) for number, part in enumerate(self.transformer.stages)]

    def hidden_states(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        visible: Visible | CachedRows,
        chunk: int,
        **ids: Tensor | None,
    ) -> Tensor:
        """What the stage `chunk` of this rank makes of token ids [b, s] or of what the stage before has given.

        `ids` [b, s] are further arguments of the embedding by their names. Gives [s, b, h], or this rank's
        [s/t, b, h].
        """
        if self.transformer.stages[chunk].embedding:
            assert isinstance(self.embedding, Embedding)
            hidden = self.embedding(tokens, **ids)
        else:
            _check_hidden(hidden, self.stage_shape(*tokens.shape))
        return self.transformer(hidden, visible, chunk)

    @property
    def tied_weight(self) -> Tensor | None:
        """The word embedding [v/t, h] where the head uses it too; None where it does not, or not here."""
        return self.embedding.word_embeddings.weight if self.tied and self.embedding is not None else None

    def stage_shape(self, samples: int, seq_length: int) -> tuple[int, int, int]:
        """Of what a stage gives for so many sequences: [s, b, h], or [s/t, b, h] with sequence parallelism.

        Raises ValueError for a length that sequence parallelism cannot divide.
        """
        ranks = self.group.size if self.sequence_parallel else 1
        return shard_length(seq_length, ranks), samples, self.config.hidden_size

    def boundary_shape(self, micro_batch: int, seq_length: int) -> tuple[int, int, int]:
        """Of what a stage hands on for a micro-batch, in the parameters' dtype: `stage_shape`, with its errors."""
        return self.stage_shape(micro_batch, seq_length)

    def tied_parameters(self) -> list[str]:
        """Names of the parameters that are used at both ends of the model, and so are ready last in the backward pass.

        Their gradients are reduced by themselves; those of a first and a last stage are terms of one sum. Empty where
        this rank holds none."""
        return [] if self.tied_weight is None else [_WORDS]

    def duplicate_parameters(self) -> list[str]:
        """Names of the parameters here that are copies of another stage's: not counted in a norm, and not stored."""
        return [_WORDS] if isinstance(self.embedding, EmbeddingCopy) else []

    def parameter_chunks(self) -> dict[str, int]:
        """For each parameter, by name, the stage of this rank that has it; of both ends of a model, the first."""
        places: dict[int, int] = {}
        for number, part in enumerate(self.transformer.stages):
            ends = [self.embedding] * (part.embedding or part.head) + self.heads() * part.head
            for module in (*self.transformer.modules_of(number), *ends):
                for parameter in () if module is None else module.parameters():
                    places.setdefault(id(parameter), number)
        return {name: places[id(parameter)] for name, parameter in self.named_parameters()}

    def signature(self) -> dict[str, Any]:
        """What must be equal for weights to mean the same: kept in a checkpoint and compared when it is loaded."""
        return {"model": self.kind, "vocab_size": self.vocab_size} | self.config.signature()


def check_ids(tokens: Tensor, **others: Tensor | None) -> None:
    """ValueError unless `tokens` are [b, s] and the others, where given, as large."""
    if tokens.dim() != 2:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)}: they must be [b, s]")
    for name, ids in others.items():
        if ids is not None and ids.shape != tokens.shape:
            raise ValueError(f"{name} of shape {tuple(ids.shape)}: the tokens have {tuple(tokens.shape)}")


def _check_hidden(hidden: Tensor | None, expected: tuple[int, ...]) -> None:
    """ValueError unless there are hidden states of the shape that a stage hands on."""
    shape = None if hidden is None else tuple(hidden.shape)
    if shape != expected:
        raise ValueError(f"hidden of shape {shape}: a stage that is not the first needs {expected}")
