"""The serial twin of the BERT: modules of `torch.nn` alone, with the weights of ours by our names."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.config import TransformerConfig


class SerialBert(nn.Module):
    """Embeddings, layers and both heads of pretraining, in float64 and without dropout; it holds the weights as leaves.

    Args:
        weights: whole weights by our names, with or without the heads and the token types.
    """

    def __init__(self, config: TransformerConfig, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.weights = {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}

    def encode(self, tokens: Tensor, types: Tensor, real: Tensor) -> Tensor:
        """Last hidden states [b, s, h]; `real` is false for padding."""
        w, post = self.weights, self.config.norm_position == "post"
        hidden = F.embedding(tokens, w["embedding.word_embeddings.weight"])
        hidden = hidden + w["embedding.position_embeddings.weight"][: tokens.shape[1]]
        if "embedding.tokentype_embeddings.weight" in w:
            hidden = hidden + F.embedding(types, w["embedding.tokentype_embeddings.weight"])
        if post:
            hidden = self.norm("embedding.layernorm", hidden)
        for layer in range(self.config.num_layers):
            hidden = self.layer(f"transformer.layers.{layer}.", hidden, real)
        return hidden if post else self.norm("transformer.final_layernorm", hidden)

    def layer(self, prefix: str, x: Tensor, real: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h] with the norms where the config has them."""
        if self.config.norm_position == "post":
            x = self.norm(f"{prefix}post_attention_layernorm", x + self.attention(prefix, x, real))
            return self.norm(f"{prefix}post_mlp_layernorm", x + self.mlp(prefix, x))
        after_norm = self.config.apply_residual_connection_post_layernorm
        normed = self.norm(f"{prefix}input_layernorm", x)
        x = (normed if after_norm else x) + self.attention(prefix, normed, real)
        normed = self.norm(f"{prefix}post_attention_layernorm", x)
        return (normed if after_norm else x) + self.mlp(prefix, normed)

    def attention(self, prefix: str, x: Tensor, real: Tensor) -> Tensor:
        """`nn.MultiheadAttention`, whose rows are all queries, then all keys, then all values."""
        n, h = self.config.num_attention_heads, self.config.hidden_size
        rows = [self.weights[f"{prefix}self_attention.query_key_value.{kind}"] for kind in ("weight", "bias")]
        weight, bias = (part.unflatten(0, (n, 3, h // n)).transpose(0, 1).flatten(0, 2) for part in rows)
        out = [self.weights[f"{prefix}self_attention.dense.{kind}"] for kind in ("weight", "bias")]
        module = nn.MultiheadAttention(h, n, batch_first=True, dtype=x.dtype)
        given = {"in_proj_weight": weight, "in_proj_bias": bias, "out_proj.weight": out[0], "out_proj.bias": out[1]}
        result, _ = torch.func.functional_call(
            module, given, (x, x, x), {"key_padding_mask": ~real, "need_weights": False}
        )
        return result

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        """h -> f -> h."""
        gelu = nn.GELU("none" if self.config.activation == "gelu_erf" else "tanh")
        return self.linear(f"{prefix}mlp.dense_4h_to_h", gelu(self.linear(f"{prefix}mlp.dense_h_to_4h", x)))

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x W^T + b."""
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Layer norm over the last dimension."""
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.config.layernorm_epsilon)

    def pooled(self, hidden: Tensor) -> Tensor:
        """[b, s, h] -> [b, h]."""
        return self.linear("pooler.dense", hidden[:, 0]).tanh()

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the masked-LM head, [b, s, v]."""
        inner = self.norm("lm_head.layernorm", nn.GELU()(self.linear("lm_head.dense", hidden)))
        matrix = self.weights.get("lm_head.weight", self.weights["embedding.word_embeddings.weight"])
        return F.linear(inner, matrix, self.weights["lm_head.bias"])

    def losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy [b, s] where there is a label, else 0."""
        return F.cross_entropy(self.logits(hidden).transpose(1, 2), labels, reduction="none", ignore_index=-1)
