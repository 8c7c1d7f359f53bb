"""Generating text with a GPT, token by token."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# tokens [b, s] -> logits of the whole real vocabulary [b, s, v], equal on all tensor ranks.
Logits = Callable[[Tensor], Tensor]


def sample_tokens(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, generator: torch.Generator | None = None
) -> Tensor:
    """Choose one id for each row of `logits` [b, v]; returns int64 [b].

    Args:
        temperature: divides the logits; 0 takes the likeliest id.
        top_k: only this many of the likeliest ids may be chosen; 0 allows all.
        generator: draws the choice; on the CPU, so that equal logits give equal ids on any device.

    Raises ValueError for a negative temperature or top_k.
    """
    if temperature < 0 or top_k < 0:
        raise ValueError(f"--temperature {temperature} and --top-k {top_k}: neither may be negative")
    if temperature == 0:
        return logits.argmax(dim=-1)
    scores = logits.float().cpu() / temperature
    if 0 < top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    chosen = torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)
    return chosen[:, 0].to(logits.device)


@torch.no_grad()
def generate(
    logits_of: Logits,
    prompt: Sequence[int],
    *,
    length: int,
    context: int,
    eod: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    device: torch.device | None = None,
) -> list[int]:
    """Continue `prompt` by up to `length` ids, ending early behind `eod`; returns the new ids.

    Args:
        logits_of: the model. On all ranks of a tensor group the same ids are chosen, since the logits are equal and
            each rank draws from a generator of its own with the same `seed`.
        prompt: at least one id.
        context: longest sequence that the model takes; what is further back is not seen.

    Raises ValueError where the prompt is empty. Collectives: those of `logits_of`, once for each new id.
    """
    if not prompt:
        raise ValueError("the prompt is empty: at least one token is needed to go on from")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)  # [1, s]
    new: list[int] = []
    while len(new) < length and (eod is None or eod not in new[-1:]):
        logits = logits_of(tokens[:, -context:])[:, -1]  # [1, v]
        chosen = sample_tokens(logits, temperature=temperature, top_k=top_k, generator=generator)  # [1]
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        new.append(int(chosen.item()))
    return new
