"""A BERT computed in plain PyTorch from weights as another program keeps them, to hold a conversion against."""

import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpointing.convert import hugging_face_bert
from megatron.checkpointing.convert.bert import TYPES, has_pooler, has_types, hugging_face_name
from megatron.checkpointing.convert.classic import WORDS, open_classic
from megatron.checkpointing.convert.hugging_face import read_weights
from megatron.checkpointing.convert.models import ModelKind, beside, half_types
from megatron.checkpointing.convert.reference import POSITIONS, ForeignGPT, look_up
from megatron.model import TransformerConfig

_TYPES = "embedding.tokentype_embeddings.weight"
# The heads of tasks; that for choices has one score for each option.
_TASKS = {"bert-classification": "classification_head", "bert-multiple-choice": "multichoice_head"}


@dataclasses.dataclass(frozen=True)
class ForeignBert(ForeignGPT):
    """The weights of a BERT elsewhere, and what it is.

    Attributes:
        kind: which heads it has.
    """

    kind: ModelKind
    causal = False

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Of token ids [b, s] what `models.outputs` gives, with the columns of padding rows."""
        hidden = look_up(self.parts(WORDS), tokens) + self.parts(POSITIONS)[0][: tokens.shape[1]]
        if has_types(self.kind):
            hidden = hidden + self.parts(_TYPES)[0][half_types(tokens)]
        post = self.config.norm_position == "post"
        if post:
            hidden = self._norm("embedding.layernorm", hidden)
        hidden = self._through_layers(hidden)
        pooled = None
        if has_pooler(self.kind):
            pooled = torch.tanh(self._linear("pooler.dense", hidden[:, 0]))
        if self.kind.name in _TASKS:
            assert pooled is not None
            pooled = torch.cat([self._linear(_TASKS[self.kind.name], pooled), pooled], -1)
        if self.kind.name != "bert":
            return beside(pooled, hidden)
        order = None if pooled is None else self._linear("binary_head", pooled)
        return beside(order, self._masked_lm(hidden))

    def _masked_lm(self, hidden: Tensor) -> Tensor:
        inner = self._norm("lm_head.layernorm", F.gelu(self._linear("lm_head.dense", hidden)))
        weights, biases = self.parts(self._output), self.parts("lm_head.bias")
        return torch.cat([F.linear(inner, *pair) for pair in zip(weights, biases, strict=True)], dim=-1)

    @property
    def _output(self) -> str:
        return "lm_head.weight" if self.config.untie_embeddings_and_output_weights else WORDS

    def _linear(self, stem: str, x: Tensor) -> Tensor:
        return F.linear(x, self.parts(f"{stem}.weight")[0], self.parts(f"{stem}.bias")[0])


def classic_bert(directory: Path, config: TransformerConfig, kind: ModelKind, step: int | None = None) -> ForeignBert:
    """The BERT of a classic checkpoint, as it lies there."""
    checkpoint = open_classic(directory, step)
    weights = checkpoint.weights()
    return ForeignBert(config, checkpoint.order, lambda name: [piece.read().float() for piece in weights[name]], kind)


def hugging_face_bert_model(directory: Path, config: TransformerConfig, kind: ModelKind) -> ForeignBert:
    """The BERT in a folder of Hugging Face's."""
    read, _ = read_weights(directory, hugging_face_bert.PREFIXES)
    weights = hugging_face_bert.fused(hugging_face_bert.without_copies(read, []))

    def parts(name: str) -> list[Tensor]:
        values = weights[hugging_face_name(name)].read().float()
        if name == POSITIONS and not has_types(kind) and TYPES in weights:
            values = values + weights[TYPES].read()[0].float()  # all are of the first type
        return [values]

    return ForeignBert(config, hugging_face_bert.ORDER, parts, kind)
