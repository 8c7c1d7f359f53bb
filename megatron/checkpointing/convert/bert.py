"""The tables of a BERT: our names, Megatron-LM's classic ones and those of Hugging Face's."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron.checkpointing.convert.gpt import layer_entries, vocabulary_entries
from megatron.checkpointing.convert.mapping import Entry
from megatron.checkpointing.convert.models import GPT, ModelKind
from megatron.model import TransformerConfig

_TYPES = "embedding.tokentype_embeddings.weight"
RACE_CHOICES = 4  # of a question; no other program's checkpoint says it

# Hugging Face's names, with queries, keys and values of a layer as if they were one tensor.
WORDS, POSITIONS, TYPES = (f"bert.embeddings.{what}_embeddings.weight" for what in ("word", "position", "token_type"))
FUSED, DECODER = "attention.self.query_key_value", "cls.predictions.decoder.weight"
_EMBEDDING = {
    "embedding.word_embeddings.weight": WORDS,
    "embedding.position_embeddings.weight": POSITIONS,
    _TYPES: TYPES,
    "embedding.layernorm.weight": "bert.embeddings.LayerNorm.weight",
    "embedding.layernorm.bias": "bert.embeddings.LayerNorm.bias",
}
_LAYER = {
    "self_attention.query_key_value": FUSED,
    "self_attention.dense": "attention.output.dense",
    "post_attention_layernorm": "attention.output.LayerNorm",
    "mlp.dense_h_to_4h": "intermediate.dense",
    "mlp.dense_4h_to_h": "output.dense",
    "post_mlp_layernorm": "output.LayerNorm",
}
HEADS = {
    "pooler.dense": "bert.pooler.dense",
    "lm_head": "cls.predictions",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layernorm": "cls.predictions.transform.LayerNorm",
    "binary_head": "cls.seq_relationship",
    "classification_head": "classifier",
    "multichoice_head": "classifier",
}


def classic_kind(weights: Mapping[str, Any]) -> ModelKind:
    """Which model a classic checkpoint is of, by its tensors' names; `weights` are lists of pieces with a shape."""
    if "lm_head.dense.weight" in weights:
        return ModelKind("bert", {"binary_head": "binary_head.weight" in weights})
    types = {"token_types": weights[_TYPES][0].shape[0] if _TYPES in weights else 0}
    if "classification_head.weight" in weights:
        return ModelKind("bert-classification", types | {"classes": weights["classification_head.weight"][0].shape[0]})
    if "multichoice_head.weight" in weights:
        return ModelKind("bert-multiple-choice", types | {"choices": RACE_CHOICES})
    return GPT


def classic_entries(config: TransformerConfig, kind: ModelKind) -> Iterator[Entry]:
    """Each tensor of a BERT in a classic checkpoint, with the layers numbered through the whole model."""
    yield from vocabulary_entries()
    if has_types(kind):
        yield Entry(_TYPES, _TYPES)
    yield from layer_entries(config)
    for name in head_names(kind):
        of_tokens = name == "lm_head.bias"
        yield Entry(name, name, split_dim=0 if of_tokens else None, vocabulary=of_tokens)


def has_types(kind: ModelKind) -> bool:
    """Whether token types have an embedding."""
    return bool(kind.options.get("binary_head") or kind.options.get("token_types"))


def has_pooler(kind: ModelKind) -> bool:
    """Whether there is a pooler."""
    return bool(kind.options.get("binary_head", kind.options.get("pooler", True)))


def head_names(kind: ModelKind) -> list[str]:
    """Names, which are ours and the classic ones, of what follows the transformer but for an untied projection."""
    heads: Collection[str] = {
        "bert": ("lm_head.dense", "lm_head.layernorm", *(["binary_head"] * kind.options.get("binary_head", False))),
        "bert-classification": ("classification_head",),
        "bert-multiple-choice": ("multichoice_head",),
    }.get(kind.name, ())
    stems = [*(["pooler.dense"] * has_pooler(kind)), *heads]
    own = ["lm_head.bias"] if kind.name == "bert" else []
    return own + [f"{stem}.{part}" for stem in stems for part in ("weight", "bias")]


def hugging_face_entries(config: TransformerConfig, kind: ModelKind) -> Iterator[Entry]:
    """Each tensor of a BERT of Hugging Face's, with queries, keys and values as one."""
    for ours, theirs in _EMBEDDING.items():
        if ours != _TYPES or has_types(kind):
            yield Entry(ours, theirs, vocabulary=theirs == WORDS)
    for layer in range(config.num_layers):
        for stem, name in _LAYER.items():
            for part in ("weight", "bias"):
                ours = f"transformer.layers.{layer}.{stem}.{part}"
                yield Entry(ours, f"bert.encoder.layer.{layer}.{name}.{part}", fused=name == FUSED)
    for name in head_names(kind):
        stem, _, part = name.rpartition(".")
        yield Entry(name, f"{HEADS[stem]}.{part}", vocabulary=name == "lm_head.bias")
    if config.untie_embeddings_and_output_weights:
        yield Entry("lm_head.weight", DECODER, vocabulary=True)


def hugging_face_name(classic: str) -> str:
    """What Hugging Face calls a tensor of a classic checkpoint; norms behind the blocks have our names."""
    if classic in _EMBEDDING or classic == "lm_head.weight":
        return _EMBEDDING.get(classic, DECODER)
    stem, _, part = classic.rpartition(".")
    if stem in HEADS:
        return f"{HEADS[stem]}.{part}"
    _, _, layer, ours = stem.split(".", 3)
    return f"bert.encoder.layer.{layer}.{_LAYER[ours]}.{part}"
