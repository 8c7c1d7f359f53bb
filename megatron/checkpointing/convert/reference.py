"""A GPT computed in plain PyTorch from weights as another program keeps them, to hold a conversion against.

Nothing is put together or reordered: each tensor rank's part is applied to what it is for, and the parts' results are
added up. It stands apart from the tables and moves of `mapping` as far as it can.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpointing.convert.classic import WORDS, open_classic
from megatron.checkpointing.convert.gpt import hugging_face_name
from megatron.checkpointing.convert.hugging_face import ORDER, read_weights
from megatron.checkpointing.convert.mapping import RowOrder
from megatron.model import TransformerConfig

POSITIONS = "embedding.position_embeddings.weight"
_OUTPUT = "output_layer.weight"


@dataclasses.dataclass(frozen=True)
class ForeignGPT:
    """The weights of a GPT elsewhere.

    Attributes:
        config: sizes and choices.
        order: of the rows of query, key and value on each rank.
        parts: by classic name the part of a tensor on each tensor rank, matrices as [output, input], in float32.
    """

    config: TransformerConfig
    order: RowOrder
    parts: Callable[[str], list[Tensor]]
    causal: ClassVar[bool] = True

    def rounded(self, dtype: torch.dtype) -> Self:
        """The same with weights as they are in `dtype`; they stay float32."""
        return dataclasses.replace(self, parts=lambda name: [part.to(dtype).float() for part in self.parts(name)])

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Of token ids [b, s], with those of padding rows: [b, s, padded v]."""
        words = self.parts(WORDS)
        hidden = self._through_layers(look_up(words, tokens) + self.parts(POSITIONS)[0][: tokens.shape[1]])
        output = self.parts(_OUTPUT) if self.config.untie_embeddings_and_output_weights else words
        return torch.cat([hidden @ part.t() for part in output], dim=-1)

    def _through_layers(self, hidden: Tensor) -> Tensor:
        """All layers, and the norm after them where there is one: [b, s, h] -> [b, s, h]."""
        for layer in range(self.config.num_layers):
            hidden = self._layer(f"encoder.layers.{layer}", hidden)
        return hidden if self.config.norm_position == "post" else self._norm("encoder.final_layernorm", hidden)

    def _layer(self, stem: str, hidden: Tensor) -> Tensor:
        """Attention and MLP, each with the norm before or behind it."""
        of_norm, post = self.config.apply_residual_connection_post_layernorm, self.config.norm_position == "post"
        for before, first, between, second, behind in (
            ("input", "self_attention.query_key_value", self._attend, "self_attention.dense", "post_attention"),
            ("post_attention", "mlp.dense_h_to_4h", self._gelu, "mlp.dense_4h_to_h", "post_mlp"),
        ):
            x = hidden if post else self._norm(f"{stem}.{before}_layernorm", hidden)
            hidden = (x if of_norm else hidden) + self._block(f"{stem}.{first}", between, f"{stem}.{second}", x)
            hidden = self._norm(f"{stem}.{behind}_layernorm", hidden) if post else hidden
        return hidden

    def _norm(self, stem: str, hidden: Tensor) -> Tensor:
        weight, bias = (self.parts(f"{stem}.{kind}")[0] for kind in ("weight", "bias"))
        return F.layer_norm(hidden, weight.shape, weight, bias, self.config.layernorm_epsilon)

    def _block(self, first: str, between: Callable[[Tensor], Tensor], second: str, hidden: Tensor) -> Tensor:
        """Two matrices with something between, rank by rank."""
        into = zip(self.parts(f"{first}.weight"), self.parts(f"{first}.bias"), strict=True)
        inner = [between(F.linear(hidden, weight, bias)) for weight, bias in into]
        out = [F.linear(x, weight) for x, weight in zip(inner, self.parts(f"{second}.weight"), strict=True)]
        return cast(Tensor, sum(out)) + self.parts(f"{second}.bias")[0]

    def _gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh" if self.config.activation == "gelu_tanh" else "none")

    def _attend(self, fused: Tensor) -> Tensor:
        """Attention of a rank's heads: [b, s, 3 n d] in the source's order -> [b, s, n d]."""
        d = self.config.head_size
        heads = fused.shape[-1] // (3 * d)
        if self.order == "3nd":
            query, key, value = (part.unflatten(-1, (heads, d)) for part in fused.chunk(3, dim=-1))
        elif self.order == "nd3":
            query, key, value = fused.unflatten(-1, (heads, d, 3)).unbind(-1)
        else:
            query, key, value = fused.unflatten(-1, (heads, 3 * d)).split(d, dim=-1)
        scores = torch.einsum("bqnd,bknd->bnqk", query, key) / d**0.5
        if self.causal:
            later = torch.ones(fused.shape[1], fused.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        weights = scores.softmax(-1)
        return torch.einsum("bnqk,bknd->bqnd", weights, value).flatten(2)


def look_up(parts: list[Tensor], tokens: Tensor) -> Tensor:
    """The rows of `tokens`, each from the part that has it."""
    hidden, first = torch.zeros(*tokens.shape, parts[0].shape[1]), 0
    for part in parts:
        here = (tokens >= first) & (tokens < first + len(part))
        hidden[here] = part[tokens[here] - first]
        first += len(part)
    return hidden


def classic_gpt(directory: Path, config: TransformerConfig, step: int | None = None) -> ForeignGPT:
    """The GPT of a classic checkpoint, as it lies there."""
    checkpoint = open_classic(directory, step)
    weights = checkpoint.weights()
    return ForeignGPT(config, checkpoint.order, lambda name: [piece.read().float() for piece in weights[name]])


def hugging_face_gpt(directory: Path, config: TransformerConfig) -> ForeignGPT:
    """The GPT-2 in a folder of Hugging Face's."""
    weights, _ = read_weights(directory)

    def parts(name: str) -> list[Tensor]:
        theirs, transposed = hugging_face_name(name)
        values = weights[theirs].read().float()
        return [values.t() if transposed else values]

    return ForeignGPT(config, ORDER, parts)
