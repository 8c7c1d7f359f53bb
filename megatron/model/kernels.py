"""Two ways to compute attention from queries, keys and values: PyTorch's kernel, and the s x s matrix written out."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.dropout import dropout


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, p: float, mask: Tensor | None = None
) -> Tensor:
    """[b, n, s, d] each -> [b, n, s, d] by PyTorch's kernel, which keeps no s x s matrix.

    `p` is the probability of dropping a weight. The kernel for CPUs has no dropout, and what PyTorch takes in its place
    keeps several s x s matrices in float32: with dropout the unfused form is used there. `mask` is bool [b, 1, 1, s],
    true for the positions that may be seen, by all positions alike; only without `causal`.
    """
    if p > 0 and query.device.type == "cpu":
        return unfused_attention(query, key, value, causal=causal, p=p, mask=mask)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=p, is_causal=causal)


def unfused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, p: float, mask: Tensor | None = None
) -> Tensor:
    """[b, n, s, d] each -> [b, n, s, d] with the weights [b n, s, s] written out; `mask` as in `fused_attention`.

    Kept for the backward pass of each weight in 16 bits: two bytes of the softmax and, with dropout, two of what is
    left of it and one of the mask (arXiv:2205.05198, section 4.1). PyTorch's softmax sums up 16-bit numbers in float32.
    """
    queries, keys, values = (part.flatten(0, 1) for part in (query, key, value))  # [b n, s, d]
    scale = 1 / math.sqrt(query.size(-1))
    # one name for each of the forms in turn, so that none lives longer than it must
    weights = torch.baddbmm(queries.new_zeros(()), queries, keys.mT, beta=0, alpha=scale)  # [b n, s, s]
    if causal:
        hide_future(weights)
    if mask is not None:
        hide(weights.unflatten(0, query.shape[:2]), ~mask)
    weights = weights.softmax(-1)
    weights = dropout(weights, p, training=True)
    return torch.bmm(weights, values).unflatten(0, query.shape[:2])


def hide_future(scores: Tensor) -> None:
    """Set the scores [..., s, s] of all that comes after a position to minus infinity, in place: `hide`."""
    hide(scores, torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1))


def hide(scores: Tensor, hidden: Tensor) -> None:
    """Set the scores [..., s, s] that are `hidden` (a mask that is broadcast to them) to minus infinity, in place.

    Autograd is not told, and so keeps no mask: the weight of such a score is 0, and with it what the backward pass of
    softmax gives, exactly.
    """
    scores.detach().masked_fill_(hidden, -math.inf)
