"""The kinds of model that are converted: how one is made of what is known of it, and what it gives to be compared."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from megatron.model import (
    BertEncoder,
    BertForClassification,
    BertForMultipleChoice,
    BertModel,
    Encoding,
    GPTModel,
    TransformerConfig,
)
from megatron.mpu.initialize import SERIAL_GROUP

_KINDS: Mapping[str, type[GPTModel] | type[BertEncoder]] = {
    kind.kind: kind for kind in (GPTModel, BertModel, BertEncoder, BertForClassification, BertForMultipleChoice)
}
# What each is made with beside its config, as its signature tells it; a BERT for pretraining tells it as a flag.
_OPTIONS: Mapping[str, Mapping[str, type]] = {
    "bert-encoder": {"pooler": bool, "token_types": int},
    "bert-classification": {"classes": int, "token_types": int},
    "bert-multiple-choice": {"choices": int, "token_types": int},
}
_NO_PAIRS = "bert_no_binary_head"


@dataclasses.dataclass(frozen=True)
class ModelKind:
    """A kind of model, as checkpoints call it, and the arguments that it takes beside its config."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_signature(cls, signature: Mapping[str, Any]) -> Self | None:
        """The kind that a checkpoint tells; None for one that is not converted. ValueError where it does not fit."""
        name = signature.get("model")
        if not isinstance(name, str) or name not in _KINDS:
            return None
        wanted = {_NO_PAIRS: bool} if name == "bert" else _OPTIONS.get(name, {})
        for option, kind in wanted.items():
            if type(signature.get(option)) is not kind:
                raise ValueError(f"the model {name} does not say its {option}")
        if name == "bert":
            return cls(name, {"binary_head": not signature[_NO_PAIRS]})
        return cls(name, {option: signature[option] for option in wanted})

    @property
    def is_bert(self) -> bool:
        """Whether it is a BERT, with whatever heads."""
        return self.name != "gpt"

    def new(self, config: TransformerConfig, vocab_size: int, dtype: torch.dtype) -> GPTModel | BertEncoder:
        """The whole model without its weights."""
        made: Any = _KINDS[self.name]
        model: GPTModel | BertEncoder = made(
            config, vocab_size, group=SERIAL_GROUP, dtype=dtype, device="meta", **self.options
        )
        return model


GPT = ModelKind("gpt")


def outputs(model: GPTModel | BertEncoder, tokens: Tensor) -> Tensor:
    """What shows whether two models are the same, for ids [b, s]: [b, s, n].

    Logits of the rows of the vocabulary that are weights; of a BERT for pretraining the logits of the order before
    them, at each position; of another BERT the scores of its head, for choices that of one option, and the pooled
    state, where there are such, and the last hidden states.
    """
    if isinstance(model, GPTModel):
        logits: Tensor = model(tokens)
        return logits[..., : model.vocabulary_rows]
    if isinstance(model, BertModel):
        lm, whole = model(tokens, half_types(tokens))
        lm = lm[..., : model.vocabulary_rows]
    else:
        encoding = model.encode(tokens, half_types(tokens))
        assert not isinstance(encoding, Tensor)
        lm, whole = encoding.hidden.transpose(0, 1), encoding.pooled
        if isinstance(model, BertForClassification | BertForMultipleChoice):
            assert whole is not None
            whole = torch.cat([_scores(model, encoding.hidden, whole), whole], -1)
    return beside(whole, lm)


def _scores(model: BertForClassification | BertForMultipleChoice, hidden: Tensor, pooled: Tensor) -> Tensor:
    """Of each text its classes, [b, classes], or what it has as an option, [b, 1]."""
    if isinstance(model, BertForClassification):
        return model.finish(Encoding(hidden, pooled))
    # It takes the options of a question together: here all of them are the same text.
    return model.finish(Encoding(hidden, pooled.repeat_interleave(model.choices, 0)))[:, :1]


def half_types(tokens: Tensor) -> Tensor:
    """Types [b, s] of two segments of equal length."""
    return torch.zeros_like(tokens).index_fill(1, torch.arange(tokens.shape[1] // 2, tokens.shape[1]), 1)


def beside(whole: Tensor | None, each: Tensor) -> Tensor:
    """[b, m] at each position before [b, s, n]: [b, s, m + n]."""
    return each if whole is None else torch.cat([whole.unsqueeze(1).expand(-1, each.shape[1], -1), each], -1)
