"""GPT: embedding, causal transformer, and an output projection that is the word embedding again."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.model.config import TransformerConfig
from megatron.model.documents import as_document_lengths
from megatron.model.embedding import Embedding
from megatron.model.init import initialize_parameters
from megatron.model.placement import Placement
from megatron.model.recompute import RecomputeConfig
from megatron.model.transformer import Transformer
from megatron.mpu.initialize import Group


class GPTModel(nn.Module):
    """A causal language model with learned positions and tied output embedding, split over the tensor group.

    Forward 2 l + 1 all-reduces (two a layer, one for the embedding) and the small ones of the loss; backward 2 l + 1
    (two a layer, one for the output projection). With sequence parallelism forward 2 l + 1 all-gathers (the last for
    the output projection) and 2 l + 1 reduce-scatters (the first of the embedding), backward 4 l + 2 and 2 l + 1.

    Args:
        config: the sizes and choices.
        vocab_size: number of real token ids; the embedding is padded after them.
        group: the tensor group; the current one by default.
        dtype, device: of the parameters; on "meta" nothing is drawn (`build_gpt` fills them).
        sequence_parallel: between the split matrices each tensor rank has s/t tokens of each sample
            (arXiv:2205.05198); parameters that work there have only a term of their gradient (`partial_gradient` of
            their sharding), which the caller has to sum over the group.
        recompute: what is computed again in the backward pass; nothing by default.

    Raises ValueError naming each size that is wrong or does not divide over the group.
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
    ) -> None:
        super().__init__()
        if vocab_size < 1:
            raise ValueError(f"a vocabulary of {vocab_size}: it must have at least 1 token")
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
        self.embedding = Embedding(config, vocab_size, **where)
        self.transformer = Transformer(config, causal=True, recompute=recompute, **where)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        document_lengths: Tensor | None = None,
    ) -> Tensor:
        """The loss of each token, or the logits where no labels are given.

        Args:
            tokens: ids [b, s], int64.
            position_ids: [b, s], 0, 1, 2, ... by default.
            labels: the ids to predict, [b, s]; a token with a negative one does not count, its loss is 0.
            document_lengths: integers [b, s] on the host: the tokens of each document of a sample, then zeros. A token
                attends to its own document alone. Without them a sample is one document.

        Returns:
            with labels the cross entropy [b, s], in float32 or wider, over the real vocabulary; without them this
            rank's logits [b, s, v/t] in the parameters' dtype. Their last columns are padding where the rows of the
            embedding are; `gather_logits` gives those of the real vocabulary.

        Raises ValueError for ids out of their range (on a CPU; on an accelerator the lookup fails there), shapes that
        differ, a sequence longer than `--max-position-embeddings`, and one that sequence parallelism cannot divide.
        """
        _check_shapes(tokens, position_ids=position_ids, labels=labels)
        documents = as_document_lengths(document_lengths, tokens)
        hidden = self.transformer(self.embedding(tokens, position_ids), documents)  # [s, b, h] or [s/t, b, h]
        return self.logits(hidden) if labels is None else self.loss(hidden, labels)

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits [b, s, v/t] of the last hidden states [s, b, h] or [s/t, b, h]."""
        weight = self.embedding.word_embeddings.weight
        logits = mpu.parallel_linear(
            hidden, weight, group=self.group, sequence_parallel=self.sequence_parallel
        )  # [s, b, v/t]
        return logits.transpose(0, 1)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy [b, s] of `labels` [b, s] from the last hidden states [s, b, h] or [s/t, b, h]."""
        losses = mpu.vocab_parallel_linear_cross_entropy(
            hidden.flatten(0, 1),
            self.embedding.word_embeddings.weight,
            labels.t().flatten(),
            chunk_size=self.config.cross_entropy_chunk_size,
            vocab_size=self.vocab_size,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
        )  # [s * b]
        return losses.view(labels.t().shape).t()

    def tied_parameters(self) -> list[str]:
        """Names of the parameters that are used at both ends of the model, and so are ready last in the backward pass.

        Their gradients are reduced by themselves."""
        return ["embedding.word_embeddings.weight"]

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


def gather_logits(logits: Tensor, vocab_size: int, group: Group = None) -> Tensor:
    """Logits [..., v/t] of every tensor rank -> [..., vocab_size] without the padding columns.

    Forward one all-gather, backward none (each rank keeps its part of the gradient).
    """
    return mpu.gather_from_tensor_model_parallel_region(logits, group)[..., :vocab_size]


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
    )
    initialize_parameters(model, seed, dtype, device)
    return model
