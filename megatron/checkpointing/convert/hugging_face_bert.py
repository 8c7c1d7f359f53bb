"""Hugging Face's BERT folders (config.json and model.safetensors) as a `Transfer`, and a `Transfer` as one.

Theirs has queries, keys and values apart, and ours has them in one matrix, so that they are put together and parted.
"""

import dataclasses
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.convert.bert import (
    DECODER,
    FUSED,
    HEADS,
    POSITIONS,
    RACE_CHOICES,
    TYPES,
    WORDS,
    hugging_face_entries,
)
from megatron.checkpointing.convert.deferred import Deferred, Readable, same_values
from megatron.checkpointing.convert.kinds import transformer_config
from megatron.checkpointing.convert.mapping import RowOrder, Rows, export_all, import_all
from megatron.checkpointing.convert.megatron_lm import Told, own_defaults, with_padding
from megatron.checkpointing.convert.models import ModelKind
from megatron.checkpointing.convert.transfer import Transfer, table_of
from megatron.checkpointing.index import dtype_name
from megatron.model import TransformerConfig

ORDER: RowOrder = "3nd"
# Of all names; a model without heads leaves out the first.
PREFIXES = ("bert.", "cls.", "classifier.")
_DECODER_BIAS, _BIAS = "cls.predictions.decoder.bias", "cls.predictions.bias"
_PARTS = tuple(f"attention.self.{part}" for part in ("query", "key", "value"))
_ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
# What they call a model by our kind of it.
_NAMES = {
    "bert-encoder": "BertModel",
    "bert-classification": "BertForSequenceClassification",
    "bert-multiple-choice": "BertForMultipleChoice",
}
# What a BERT of theirs may ask for and ours does not do, with the value at which it does nothing.
_NOT_HERE = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
# Buffers that older versions stored with the weights.
_BUFFER = re.compile(r"bert\.embeddings\.(position_ids|token_type_ids)")


def from_bert(path: Path, saved: Mapping[str, Any], weights: dict[str, Readable], told: Told) -> Transfer:
    """The BERT of these `weights`, which come as `read_weights` gives them, and of the config `saved` in `path`.

    Raises ValueError where it is not whole, or has tensors that there is no place for.
    """
    notes: list[str] = []
    weights = fused(without_copies(weights, notes))
    if WORDS not in weights or POSITIONS not in weights:
        raise ValueError(f"{path.parent}: it has no {WORDS} and {POSITIONS}")
    kind = _kind(weights, saved.get("architectures"), notes)
    config = _our_config(path, saved, told, kind, weights)
    there = weights[WORDS].shape[0]
    vocab_size = told.vocab_size or min(told.tokenizer_size or there, there)
    config = with_padding(config, told, vocab_size, there)
    rows = Rows(ORDER, config.head_size, config.vocabulary_rows(vocab_size))
    table = list(hugging_face_entries(config, kind))
    pieces = {name: [tensor] for name, tensor in weights.items()}
    tensors = import_all(table, pieces, rows)
    sections = {"model": dataclasses.asdict(config)}
    if kind.name == "bert":
        sections["bert"] = {"bert_no_binary_head": not kind.options["binary_head"]}
    lines = table_of(table, pieces, rows)
    return Transfer(config, vocab_size, tensors, kind, sections=sections, table=lines, notes=notes)


def without_copies(weights: Mapping[str, Readable], notes: list[str]) -> dict[str, Readable]:
    """The same without what is there twice and what is no weight, by the newer spelling of norms."""
    spelt = {re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name): tensor for name, tensor in weights.items()}
    spelt = {re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name): tensor for name, tensor in spelt.items()}
    found = {name: tensor for name, tensor in spelt.items() if not _BUFFER.fullmatch(name)}
    for copy, original in ((DECODER, WORDS), (_DECODER_BIAS, _BIAS)):
        if copy in found and original in found and same_values(found[copy], found[original]):
            notes.append(f"{copy} is {original} once more")
            del found[copy]
    return found


def fused(weights: dict[str, Readable]) -> dict[str, Readable]:
    """With queries, keys and values of each layer as one tensor."""
    for name in list(weights):
        stem, found, part = name.partition(_PARTS[0])
        names = [f"{stem}{each}{part}" for each in _PARTS]
        if found and all(each in weights for each in names):
            weights[f"{stem}{FUSED}{part}"] = _together([weights.pop(each) for each in names])
    return weights


def _together(parts: list[Readable]) -> Readable:
    if len({(part.dtype, part.shape) for part in parts}) > 1:
        raise ValueError("query, key and value of a layer are not of one shape and number format")
    shape = (3 * parts[0].shape[0], *parts[0].shape[1:])
    return Deferred(parts[0].dtype, shape, lambda: torch.cat([part.read() for part in parts]))


def _kind(weights: dict[str, Readable], architectures: Any, notes: list[str]) -> ModelKind:
    """Which of our models it is, by its tensors. One that has a masked-LM head alone is one without pairs here.

    A head of a task is one of options where `architectures` say so, else one of classes; on tokens we have none.
    """
    pooler = f"{HEADS['pooler.dense']}.weight" in weights
    if f"{HEADS['lm_head.dense']}.weight" not in weights:
        types = {"token_types": weights[TYPES].shape[0] if TYPES in weights else 0}
        head = weights.get(f"{HEADS['classification_head']}.weight")
        if head is None or not pooler:
            return ModelKind("bert-encoder", {"pooler": pooler, **types})
        if architectures == [_NAMES["bert-multiple-choice"]]:
            return ModelKind("bert-multiple-choice", {"choices": RACE_CHOICES, **types})
        return ModelKind("bert-classification", {"classes": head.shape[0], **types})
    pairs = f"{HEADS['binary_head']}.weight" in weights
    if not pairs:
        dropped = [weights.pop(f"{HEADS['pooler.dense']}.{part}", None) for part in ("weight", "bias")]
        if any(dropped):
            notes.append("the pooler is left out, as there is no head for the order of segments")
        if TYPES in weights:
            weights[POSITIONS] = _sum_of_first(weights[POSITIONS], weights.pop(TYPES))
            notes.append("the embedding of token type 0 is added to the positions, as a sample is one segment")
    return ModelKind("bert", {"binary_head": pairs})


def _sum_of_first(positions: Readable, types: Readable) -> Readable:
    return Deferred(positions.dtype, positions.shape, lambda: positions.read() + types.read()[0])


def _our_config(
    path: Path, saved: Mapping[str, Any], told: Told, kind: ModelKind, weights: Mapping[str, Readable]
) -> TransformerConfig:
    wrong = [name for name, value in _NOT_HERE.items() if saved.get(name, value) != value]
    if wrong:
        values = ", ".join(f"{name} {reprlib.repr(saved[name])}" for name in wrong)
        raise ValueError(f"{path}: {values}: ours cannot do that")
    activation = saved.get("hidden_act", "gelu")
    known = isinstance(activation, str) and activation in _ACTIVATIONS
    if not known or (kind.name == "bert" and activation != "gelu"):
        accepted = "gelu" if kind.name == "bert" else ", ".join(_ACTIVATIONS)
        raise ValueError(f"{path}: hidden_act {reprlib.repr(activation)}; accepted with these heads: {accepted}")
    try:
        fields = {
            "num_layers": saved["num_hidden_layers"],
            "hidden_size": saved["hidden_size"],
            "num_attention_heads": saved["num_attention_heads"],
            "max_position_embeddings": weights[POSITIONS].shape[0],
            "ffn_hidden_size": saved["intermediate_size"],
            "layernorm_epsilon": saved.get("layer_norm_eps", 1e-12),
            "init_method_std": saved.get("initializer_range", 0.02),
            "attention_dropout": saved.get("attention_probs_dropout_prob", 0.1),
            "hidden_dropout": saved.get("hidden_dropout_prob", 0.1),
            "activation": _ACTIVATIONS[activation],
            "norm_position": "post",
            "untie_embeddings_and_output_weights": kind.name == "bert" and DECODER in weights,
        }
        return own_defaults(transformer_config(fields, len(weights)))
    except KeyError as error:
        raise ValueError(f"{path}: there is no entry {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def bert_tensors(transfer: Transfer) -> dict[str, Readable]:
    """Their tensors of a BERT of ours. Raises ValueError where a BERT of theirs cannot be that model."""
    config, kind = transfer.config, transfer.kind
    if config.projection_size != config.hidden_size or config.norm_position != "post":
        raise ValueError(
            f"--kv-channels {config.head_size} and --norm-position {config.norm_position}: a BERT of Hugging Face has "
            "heads of hidden size over heads, and post"
        )
    if kind.name == "bert" and config.activation != "gelu_erf":
        raise ValueError(f"--activation {config.activation}: a BERT of Hugging Face has the GELU of its head, gelu_erf")
    rows = Rows(ORDER, config.head_size, transfer.vocab_size)
    found: dict[str, Readable] = {}
    for name, tensor in export_all(hugging_face_entries(config, kind), transfer.weights, rows).items():
        if FUSED in name:
            found |= {name.replace(FUSED, part): _third(tensor, number) for number, part in enumerate(_PARTS)}
        else:
            found[name] = tensor
    if TYPES not in found:  # theirs always has types; zeros change nothing
        found[TYPES] = _zeros(transfer.dtype, (2, config.hidden_size))
    stems = kind.name == "bert-encoder"
    return {name.removeprefix("bert.") if stems else name: tensor for name, tensor in found.items()}


def _third(tensor: Readable, number: int) -> Readable:
    shape = (tensor.shape[0] // 3, *tensor.shape[1:])

    def make() -> Tensor:
        return tensor.read().chunk(3)[number].contiguous()

    return Deferred(tensor.dtype, shape, make)


def _zeros(dtype: torch.dtype, shape: tuple[int, ...]) -> Readable:
    return Deferred(dtype, shape, lambda: torch.zeros(shape, dtype=dtype))


def bert_config(transfer: Transfer) -> dict[str, Any]:
    """Their config of a BERT of ours."""
    config, kind = transfer.config, transfer.kind
    pairs = kind.options.get("binary_head", False)
    classes = range(kind.options.get("classes", 0))
    labels = {"id2label": {str(i): f"LABEL_{i}" for i in classes}, "label2id": {f"LABEL_{i}": i for i in classes}}
    return {
        "architectures": [_NAMES.get(kind.name, "BertForPreTraining" if pairs else "BertForMaskedLM")],
        **(labels if classes else {}),
        "model_type": "bert",
        "hidden_act": {"gelu_erf": "gelu", "gelu_tanh": "gelu_new"}[config.activation],
        "attention_probs_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.hidden_dropout,
        "initializer_range": config.init_method_std,
        "layer_norm_eps": config.layernorm_epsilon,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": max(2, kind.options.get("token_types", 2)),
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "torch_dtype": dtype_name(transfer.dtype),
        "vocab_size": config.vocabulary_rows(transfer.vocab_size),
    }
