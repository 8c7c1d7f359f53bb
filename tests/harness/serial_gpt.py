"""The serial twin of the GPT: plain tensor arithmetic on a dict of whole weights, no module and no kernel of ours."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.config import TransformerConfig

Weights = Mapping[str, Tensor]


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A value for every weight of these shapes, biases and norms included; norms' weights lie around 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            0.1 * torch.randn(shape, generator=generator, dtype=torch.float64) + float("layernorm.weight" in name)
        ).to(dtype)
        for name, shape in shapes.items()
    }


def serial_logits(config: TransformerConfig, weights: Weights, tokens: Tensor) -> Tensor:
    """Logits [b, s, v] of ids [b, s], without dropout."""
    words = weights["embedding.word_embeddings.weight"]
    hidden = words[tokens] + weights["embedding.position_embeddings.weight"][: tokens.shape[1]]  # [b, s, h]
    for number in range(config.num_layers):
        hidden = serial_layer(config, weights, f"transformer.layers.{number}.", hidden)
    if config.norm_position == "pre":
        hidden = norm(config, weights, "transformer.final_layernorm", hidden)
    return hidden @ weights.get("output_layer.weight", words).T


def serial_losses(config: TransformerConfig, weights: Weights, tokens: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token, [b, s]."""
    return F.cross_entropy(serial_logits(config, weights, tokens).transpose(1, 2), labels, reduction="none")


def serial_layer(
    config: TransformerConfig, weights: Weights, prefix: str, hidden: Tensor, causal: bool = True
) -> Tensor:
    """One layer, [b, s, h] -> [b, s, h]; `prefix` is that of its weights' names."""
    if config.norm_position == "pre":
        normed = norm(config, weights, f"{prefix}input_layernorm", hidden)
        hidden = hidden + attention(config, weights, f"{prefix}self_attention.", normed, causal)
        return hidden + mlp(
            config, weights, f"{prefix}mlp.", norm(config, weights, f"{prefix}post_attention_layernorm", hidden)
        )
    hidden = hidden + attention(config, weights, f"{prefix}self_attention.", hidden, causal)
    hidden = norm(config, weights, f"{prefix}post_attention_layernorm", hidden)
    return norm(config, weights, f"{prefix}post_mlp_layernorm", hidden + mlp(config, weights, f"{prefix}mlp.", hidden))


def norm(config: TransformerConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """Layer norm over the last dimension."""
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + config.layernorm_epsilon).rsqrt()
    return centred * scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """x W^T + b."""
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def attention(config: TransformerConfig, weights: Weights, prefix: str, x: Tensor, causal: bool) -> Tensor:
    """Self-attention head by head, with the s x s matrix written out."""
    d, s = config.head_size, x.shape[1]
    fused = linear(weights, f"{prefix}query_key_value", x)  # [b, s, n * 3 * d]
    contexts = []
    for head in range(config.num_attention_heads):
        query, key, value = fused[..., 3 * d * head : 3 * d * (head + 1)].split(d, dim=-1)  # [b, s, d]
        scores = query @ key.transpose(1, 2) / math.sqrt(d)
        if causal:
            scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -math.inf)
        contexts.append(scores.softmax(-1) @ value)
    return linear(weights, f"{prefix}dense", torch.cat(contexts, dim=-1))


def mlp(config: TransformerConfig, weights: Weights, prefix: str, x: Tensor) -> Tensor:
    """The MLP, its GELU from the formula."""
    inner = linear(weights, f"{prefix}dense_h_to_4h", x)
    if config.activation == "gelu_erf":
        gate = torch.erf(inner / math.sqrt(2))
    else:
        gate = torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3))
    return linear(weights, f"{prefix}dense_4h_to_h", 0.5 * inner * (1 + gate))
