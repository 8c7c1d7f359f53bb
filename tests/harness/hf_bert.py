"""Hugging Face's BERT and ours: the same weights under both names, for tests of parity."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import BertConfig, BertForPreTraining

from megatron.model.config import TransformerConfig

_OF_THE_MODEL = {
    "embedding.word_embeddings.weight": "bert.embeddings.word_embeddings.weight",
    "embedding.position_embeddings.weight": "bert.embeddings.position_embeddings.weight",
    "embedding.tokentype_embeddings.weight": "bert.embeddings.token_type_embeddings.weight",
    "embedding.layernorm": "bert.embeddings.LayerNorm",
    "pooler.dense": "bert.pooler.dense",
    "lm_head.bias": "cls.predictions.bias",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layernorm": "cls.predictions.transform.LayerNorm",
    "binary_head": "cls.seq_relationship",
}
_OF_A_LAYER = {
    "self_attention.dense": "attention.output.dense",
    "post_attention_layernorm": "attention.output.LayerNorm",
    "mlp.dense_h_to_4h": "intermediate.dense",
    "mlp.dense_4h_to_h": "output.dense",
    "post_mlp_layernorm": "output.LayerNorm",
}


def random_bert(config: TransformerConfig, vocab_size: int, seed: int) -> BertForPreTraining:
    """A BERT of the same sizes; every weight is drawn, biases and norms included, and nothing is dropped."""
    theirs = BertForPreTraining(
        BertConfig(
            vocab_size=vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            intermediate_size=config.ffn_size,
            max_position_embeddings=config.max_position_embeddings,
            hidden_act="gelu",
            layer_norm_eps=config.layernorm_epsilon,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            around = 1.0 if name.endswith("LayerNorm.weight") else 0.0
            parameter.copy_(around + 0.1 * torch.randn(parameter.shape, generator=generator))
    return theirs


def as_ours(config: TransformerConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their weights, or gradients, by our names; queries, keys and values are one matrix here, [n, 3, d] its rows."""
    stems = dict(_OF_THE_MODEL)
    found = {}
    for layer in range(config.num_layers):
        ours, prefix = f"transformer.layers.{layer}.", f"bert.encoder.layer.{layer}."
        stems |= {ours + mine: prefix + name for mine, name in _OF_A_LAYER.items()}
        for kind in ("weight", "bias"):
            parts = [theirs[f"{prefix}attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            heads = [part.unflatten(0, (config.num_attention_heads, config.head_size)) for part in parts]
            found[f"{ours}self_attention.query_key_value.{kind}"] = torch.stack(heads, 1).flatten(0, 2)
    for mine, name in stems.items():
        for kind in [""] if name in theirs else [".weight", ".bias"]:
            found[mine + kind] = theirs[name + kind].contiguous()
    return found
