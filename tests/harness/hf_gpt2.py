"""Hugging Face's GPT-2 and ours: the same weights under both names, for tests of parity."""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from megatron.model.config import TransformerConfig

_OF_THE_MODEL = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "transformer.final_layernorm": "transformer.ln_f",
}
_OF_A_LAYER = {
    "input_layernorm": "ln_1",
    "self_attention.query_key_value": "attn.c_attn",
    "self_attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}


def random_gpt2(config: TransformerConfig, vocab_size: int, seed: int) -> GPT2LMHeadModel:
    """A GPT-2 of the same sizes; every weight is drawn, biases and norms included, and nothing is dropped."""
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=config.max_position_embeddings,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_attention_heads,
            n_inner=config.ffn_size,
            activation_function={"gelu_tanh": "gelu_new", "gelu_erf": "gelu"}[config.activation],
            layer_norm_epsilon=config.layernorm_epsilon,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            attn_implementation="eager",
        )
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            around = 1.0 if ".ln_" in name and name.endswith("weight") else 0.0
            parameter.copy_(around + 0.1 * torch.randn(parameter.shape, generator=generator))
    return theirs


def our_names(num_layers: int) -> dict[str, str]:
    """Our parameter name -> Hugging Face's."""
    stems = dict(_OF_THE_MODEL)
    for layer in range(num_layers):
        for ours, theirs in _OF_A_LAYER.items():
            stems[f"transformer.layers.{layer}.{ours}"] = f"transformer.h.{layer}.{theirs}"
    names = {}
    for ours, theirs in stems.items():
        kinds = [""] if ours.endswith(".weight") else [".weight", ".bias"]
        names.update({ours + kind: theirs + kind for kind in kinds})
    return names


def as_ours(config: TransformerConfig, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their weights, or gradients, by our names and in our order of rows."""
    return {ours: _as_ours(config, name, theirs[name]) for ours, name in our_names(config.num_layers).items()}


def _as_ours(config: TransformerConfig, name: str, tensor: Tensor) -> Tensor:
    """Matrices are theirs [input, output], ours [output, input]; fused rows theirs [3, n, d], ours [n, 3, d]."""
    if ".h." in name and tensor.dim() == 2:
        tensor = tensor.t()
    if "c_attn" in name:
        rows = tensor.unflatten(0, (3, config.num_attention_heads, config.head_size))
        tensor = rows.transpose(0, 1).flatten(0, 2)
    return tensor.contiguous()
