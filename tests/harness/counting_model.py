"""A "model" for tests of generation: it always expects the next number, and says what it was asked."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.model import CachedRows, KeyValueCache


class CountingModel:
    """`NextToken` of ids 0 to 9 on one rank: after i comes i + 1, after 9 comes 0; `sharpness` scales the logits.

    `counted` says that every sequence counts, the prompts too, which is then checked of what the cache shows.

    It keeps in `asked` how many tokens it was given of each sequence, and remembers by its cache what it has seen.
    """

    vocab_size = 10
    chooses = True

    def __init__(self, context: int = 16, sharpness: float = 5.0, counted: bool = True) -> None:
        self.context, self.sharpness, self.counted = context, sharpness, counted
        self.asked: list[list[int]] = []

    def new_cache(self, rows: int, columns: int) -> KeyValueCache:
        sizes = {"rows": rows, "heads": 1, "columns": columns, "head_size": 1}
        return KeyValueCache(["0"], **sizes, dtype=torch.float64, device=torch.device("cpu"))

    def logits(self, tokens: Sequence[Sequence[int]], cache: CachedRows | None) -> Tensor | None:
        self.asked.append([len(row) for row in tokens])
        if cache is not None:
            self._remember(tokens, cache)
        lasts = torch.tensor([row[-1] for row in tokens])
        return self.sharpness * torch.nn.functional.one_hot((lasts + 1) % 10, 10).float()

    def share(self, ids: Sequence[int] | None, count: int) -> list[int]:
        assert ids is not None and len(ids) == count
        return list(ids)

    def _remember(self, tokens: Sequence[Sequence[int]], cache: CachedRows) -> None:
        """As keys the ids go into the cache; it must show each token itself and those before it, one lower each."""
        longest = max(map(len, tokens))
        padded = torch.tensor([[*row, *[-1] * (longest - len(row))] for row in tokens])[:, None, :, None]
        keys, _, mask = cache.of("0").extend(padded.double(), padded.double())
        if mask is not None:
            for row, seen, (token,) in zip(keys[:, 0, :, 0], mask[:, 0, 0], tokens, strict=True):
                there = row[seen]
                assert there[-1] == token
                assert not self.counted or ((there[1:] - there[:-1]) % 10 == 1).all(), there
