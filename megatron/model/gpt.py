"""GPT: embedding, causal transformer, and an output projection that is the word embedding again or its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.base.stages import StagePart
from megatron.model.chunk import Chunk
from megatron.model.config import TransformerConfig
from megatron.model.documents import as_document_lengths
from megatron.model.embedding import Embedding, EmbeddingCopy
from megatron.model.init import initialize_parameters
from megatron.model.output import OutputLayer
from megatron.model.placement import Placement, shard_length
from megatron.model.recompute import RecomputeConfig
from megatron.model.transformer import Transformer
from megatron.mpu.initialize import Group

_WORDS = "embedding.word_embeddings.weight"


class GPTModel(nn.Module):
    """A causal language model with learned positions, split over the tensor group; of a pipeline, this rank's stages.

    Forward 2 l + 1 all-reduces (two a layer, one for the embedding) and the small ones of the loss; backward 2 l + 1
    (two a layer, one for the output projection). With sequence parallelism forward 2 l + 1 all-gathers (the last for
    the output projection) and 2 l + 1 reduce-scatters (the first of the embedding), backward 4 l + 2 and 2 l + 1.
    Nothing is exchanged with other stages here.

    Names, shardings and initial weights are those of the whole model whatever the stages are. With tied output weights
    a last stage that is not the first as well holds a copy of the word embedding (`duplicate_parameters`).

    Args:
        config: the sizes and choices.
        vocab_size: number of real token ids; the embedding is padded after them, and after the further rows that
            `config.padded_vocab_size` asks for, which are weights like the others.
        group: the tensor group; the current one by default.
        dtype, device: of the parameters; on "meta" nothing is drawn (`build_gpt` fills them).
        sequence_parallel: between the split matrices each tensor rank has s/t tokens of each sample
            (arXiv:2205.05198); parameters that work there have only a term of their gradient (`partial_gradient` of
            their sharding), which the caller has to sum over the group.
        recompute: what is computed again in the backward pass, by each stage for itself; nothing by default.
        stages: the stages that this rank holds, in the order of the model; the whole model as one by default.

    Raises ValueError naming each size that is wrong or does not divide over the group, and stages that are none.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        *,
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
        rows = config.vocabulary_rows(vocab_size)
        self.config = config
        self.vocab_size = vocab_size
        self.group = mpu.resolve_group(group)
        self.sequence_parallel = sequence_parallel and self.group.size > 1
        where: Placement = {
            "group": self.group,
            "dtype": dtype,
            "device": device,
            "sequence_parallel": self.sequence_parallel,
        }
        transformer = Transformer(config, causal=True, recompute=recompute, stages=stages, **where)
        first, last = transformer.stages[0].embedding, transformer.stages[-1].head
        self.embedding: Embedding | EmbeddingCopy | None = None
        if first:
            self.embedding = Embedding(config, rows, **where)
        elif last and not config.untie_embeddings_and_output_weights:
            self.embedding = EmbeddingCopy(config, rows, **where)
        self.transformer = transformer
        self.output_layer = OutputLayer(config, rows, **where) if last else None

    @property
    def chunks(self) -> list[Chunk]:
        """The stages that this rank holds, in the order of the model."""
        return [Chunk(self, number, part) for number, part in enumerate(self.transformer.stages)]

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        document_lengths: Tensor | None = None,
        hidden: Tensor | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """The loss of each token, or the logits where no labels are given; of a stage before the last, hidden states.

        Args:
            tokens: ids [b, s], int64.
            position_ids: [b, s], 0, 1, 2, ... by default.
            labels: the ids to predict, [b, s]; a token with a negative one does not count, its loss is 0.
            document_lengths: integers [b, s] on the host: the tokens of each document of a sample, then zeros. A token
                attends to its own document alone. Without them a sample is one document.
            hidden: what the stage before has given, for every stage but the first; of `boundary_shape`.
            chunk: which of the stages of this rank is to work.

        Returns:
            with labels the cross entropy [b, s], in float32 or wider, over the rows that are weights; without them this
            rank's logits [b, s, v/t] in the parameters' dtype. Their last columns are padding where the rows of the
            embedding are; `gather_logits` gives those of the real vocabulary. Before the last stage hidden states
            [s, b, h] or [s/t, b, h].

        Raises ValueError for ids out of their range (on a CPU; on an accelerator the lookup fails there), shapes that
        differ, a sequence longer than `--max-position-embeddings`, and one that sequence parallelism cannot divide.
        """
        part = self.transformer.stages[chunk]
        _check_shapes(tokens, position_ids=position_ids, labels=labels)
        documents = as_document_lengths(document_lengths, tokens)
        if part.embedding:
            assert self.embedding is not None
            hidden = self.embedding(tokens, position_ids)  # [s, b, h] or [s/t, b, h]
        else:
            _check_hidden(hidden, self.boundary_shape(*tokens.shape))
        hidden = self.transformer(hidden, documents, chunk)  # [s, b, h] or [s/t, b, h]
        return hidden if self.output_layer is None or not part.head else self.output_layer(hidden, labels, self._tied)

    @property
    def _tied(self) -> Tensor | None:
        """The word embedding [v/t, h] where it is the output projection too; None where it is not, or not here."""
        if self.embedding is None or self.config.untie_embeddings_and_output_weights:
            return None
        return self.embedding.word_embeddings.weight

    def boundary_shape(self, micro_batch: int, seq_length: int) -> tuple[int, int, int]:
        """Of what a stage hands on, in the parameters' dtype: [s, b, h], or [s/t, b, h] with sequence parallelism.

        Raises ValueError for a length that sequence parallelism cannot divide.
        """
        ranks = self.group.size if self.sequence_parallel else 1
        return shard_length(seq_length, ranks), micro_batch, self.config.hidden_size

    def tied_parameters(self) -> list[str]:
        """Names of the parameters that are used at both ends of the model, and so are ready last in the backward pass.

        Their gradients are reduced by themselves; those of a first and a last stage are terms of one sum. Empty where
        this rank holds none."""
        return [] if self._tied is None else [_WORDS]

    def duplicate_parameters(self) -> list[str]:
        """Names of the parameters here that are copies of another stage's: not counted in a norm, and not stored."""
        return [_WORDS] if isinstance(self.embedding, EmbeddingCopy) else []

    def parameter_chunks(self) -> dict[str, int]:
        """For each parameter, by name, the stage of this rank that has it; of both ends of a model, the first."""
        places: dict[int, int] = {}
        for number, part in enumerate(self.transformer.stages):
            ends = [self.embedding] * (part.embedding or part.head) + [self.output_layer] * part.head
            for module in (*self.transformer.modules_of(number), *ends):
                for parameter in () if module is None else module.parameters():
                    places.setdefault(id(parameter), number)
        return {name: places[id(parameter)] for name, parameter in self.named_parameters()}

    def signature(self) -> dict[str, Any]:
        """What must be equal for weights to mean the same: kept in a checkpoint and compared when it is loaded."""
        return {"model": "gpt", "vocab_size": self.vocab_size} | self.config.signature()


def _check_shapes(tokens: Tensor, **others: Tensor | None) -> None:
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


def build_gpt(
    config: TransformerConfig,
    vocab_size: int,
    seed: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    group: Group = None,
    sequence_parallel: bool = False,
    recompute: RecomputeConfig | None = None,
    stages: Sequence[StagePart] | None = None,
) -> GPTModel:
    """A `GPTModel` with initial weights that depend on `seed` alone, not on the layout."""
    model = GPTModel(
        config,
        vocab_size,
        group=group,
        dtype=dtype,
        device="meta",
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        stages=stages,
    )
    initialize_parameters(model, seed, dtype, device)
    return model
