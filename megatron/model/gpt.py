"""GPT: embedding, causal transformer, and an output projection that is the word embedding again or its own."""

from typing import Unpack

import torch
from torch import Tensor, nn

from megatron.model.cache import CachedRows, KeyValueCache
from megatron.model.config import TransformerConfig
from megatron.model.documents import Visible, as_document_lengths
from megatron.model.init import initialize_parameters
from megatron.model.output import OutputLayer
from megatron.model.staged import Layout, Split, StagedModel, check_ids


class GPTModel(StagedModel):
    """A causal language model with learned positions, split over the tensor group; of a pipeline, this rank's stages.

    Forward 2 l + 1 all-reduces (two a layer, one for the embedding) and the small ones of the loss; backward 2 l + 1
    (two a layer, one for the output projection). With sequence parallelism forward 2 l + 1 all-gathers (the last for
    the output projection) and 2 l + 1 reduce-scatters (the first of the embedding), backward 4 l + 2 and 2 l + 1.
    Nothing is exchanged with other stages here.

    See `StagedModel` for what a rank holds, and for the errors.

    Args:
        config: the sizes and choices.
        vocab_size: number of real token ids; the embedding is padded after them, and after the further rows that
            `config.padded_vocab_size` asks for, which are weights like the others.
        layout: see `Layout` and `Split`; on the device "meta" nothing is drawn (`build_gpt` fills it).
    """

    kind = "gpt"

    def __init__(self, config: TransformerConfig, vocab_size: int, **layout: Unpack[Layout]) -> None:
        tied = not config.untie_embeddings_and_output_weights
        super().__init__(config, vocab_size, causal=True, tied=tied, **layout)
        self.output_layer = OutputLayer(config, self.vocabulary_rows, **self.placement) if self.has_head else None

    def heads(self) -> list[nn.Module]:
        """What follows the transformer, where this rank has it."""
        return [] if self.output_layer is None else [self.output_layer]

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        document_lengths: Tensor | None = None,
        cache: CachedRows | None = None,
        logits_at: Tensor | None = None,
        hidden: Tensor | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """The loss of each token, or the logits where no labels are given; of a stage before the last, hidden states.

        Args:
            tokens: ids [b, s], int64.
            position_ids: [b, s], 0, 1, 2, ... by default.
            labels: the ids to predict, [b, s], or [b, k] where `logits_at` is given; a token with a negative one does
                not count, its loss is 0.
            document_lengths: integers [b, s] on the host: the tokens of each document of a sample, then zeros. A token
                attends to its own document alone. Without them a sample is one document.
            cache: holds the tokens before these, and keeps these; with it there are no `position_ids` and
                `document_lengths`, and dropout is off (`new_cache`).
            logits_at: places in the sequence, [b, k], whose logits, [b, k, v/t], or losses, [b, k], are wanted; all by
                default.
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
        check_ids(tokens, position_ids=position_ids, labels=labels if logits_at is None else None)
        visible: Visible | CachedRows = as_document_lengths(document_lengths, tokens) if cache is None else cache
        position_ids = position_ids if cache is None else cache.position_ids
        hidden = self.hidden_states(tokens, hidden, visible, chunk, position_ids=position_ids)
        if self.output_layer is None or not self.transformer.stages[chunk].head:
            return hidden
        if logits_at is not None:
            assert not self.sequence_parallel, "the places of a sequence lie on several ranks"
            hidden = hidden[logits_at.t(), torch.arange(len(tokens), device=tokens.device)]  # [k, b, h]
        return self.output_layer(hidden, labels, self.tied_weight)

    def new_cache(self, rows: int, columns: int) -> KeyValueCache:
        """Room to continue `rows` sequences of up to `columns` tokens in the layers that are here, empty."""
        weight = next(self.transformer.parameters())
        return KeyValueCache(
            self.transformer.layers,
            rows=rows,
            heads=self.config.num_attention_heads // self.group.size,
            columns=columns,
            head_size=self.config.head_size,
            dtype=weight.dtype,
            device=weight.device,
        )


def build_gpt(
    config: TransformerConfig,
    vocab_size: int,
    seed: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    **split: Unpack[Split],
) -> GPTModel:
    """A `GPTModel` with initial weights that depend on `seed` alone, not on the layout."""
    model = GPTModel(config, vocab_size, dtype=dtype, device="meta", **split)
    initialize_parameters(model, seed, dtype, device)
    return model
