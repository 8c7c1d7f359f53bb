"""Choosing the next token from logits: the likeliest, or a draw from those that temperature, top-k and top-p leave."""

import dataclasses

import torch
from torch import Tensor

from megatron.base.config import Config, flag, minimum_problems

NO_NUMBERS = "the model gives logits that are no numbers: its weights are no longer sound"


@dataclasses.dataclass(frozen=True)
class SamplingConfig(Config):
    """How the next token is chosen."""

    temperature: float = flag(1.0, "divides the logits; 0 always takes the likeliest token")
    greedy: bool = flag(False, "always take the likeliest token")
    top_k: int = flag(0, "choose among this many of the likeliest tokens; 0 for all", aliases=("top_k",))
    top_p: float = flag(
        0.0,
        "choose among the likeliest tokens that together have this probability, of those that --top-k leaves; 0 or 1 "
        "for all",
        aliases=("top_p",),
    )

    def problems(self) -> list[str]:
        found = minimum_problems(self, 0, "temperature", "top_k")
        if not 0 <= self.top_p <= 1:
            found.append(f"--top-p {self.top_p}: it must be from 0 to 1")
        return found


def candidates(logits: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """The ids that may be chosen, int64 [k], and their probabilities, float64 [k], of logits [v]; both on the CPU.

    Of equal logits the one of the lower id is the likelier. Raises FloatingPointError where they are no numbers.
    """
    if not logits.max().isfinite():
        raise FloatingPointError(NO_NUMBERS)
    if sampling.greedy or sampling.temperature == 0:
        # not argmax, which may take any of several maxima
        return (logits == logits.max()).nonzero()[0].cpu(), torch.ones(1, dtype=torch.float64)
    scores, ids = logits, torch.arange(len(logits))
    if sampling.top_k or 0 < sampling.top_p < 1:
        scores, ids = logits.sort(descending=True, stable=True)
        kept = min(sampling.top_k or len(logits), len(logits))
        scores, ids = scores[:kept], ids[:kept].cpu()
    scores = scores.cpu().double()
    # Less their maximum before they are divided, so that no temperature makes infinities of them.
    probabilities = ((scores - scores.max()) / sampling.temperature).softmax(0)
    if 0 < sampling.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities[before < sampling.top_p]
    return ids[: len(probabilities)], probabilities / probabilities.sum()


def choose(logits: Tensor, sampling: SamplingConfig, generator: torch.Generator) -> int:
    """One id by the probabilities of `candidates`: the one at which their sum passes a number drawn from [0, 1).

    It takes one number of the generator (on the CPU), whatever the logits are, and none where only one id is left.
    """
    ids, probabilities = candidates(logits, sampling)
    if len(ids) == 1:
        return int(ids[0])
    sums = probabilities.cumsum(0)
    drawn = torch.rand(1, dtype=torch.float64, generator=generator) * sums[-1]
    last = torch.searchsorted(sums, sums[-1:])  # behind it are only ids of probability 0
    return int(ids[torch.minimum(torch.searchsorted(sums, drawn, right=True), last)])
