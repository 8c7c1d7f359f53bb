"""Documents within a sample: attention of each to itself alone, without a mask.

Several documents lie one after another in a sample, and none sees another. In place of an s x s mask the attention
kernel runs once for each document, which is exact, costs less, and asks nothing of the kernel. The lengths are plain
numbers: they decide which kernels are launched, so that they must be known without waiting for a device.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.model.cache import LayerCache

# For each sample of a micro-batch the tokens of each of its documents, in order; each list adds up to s.
DocumentLengths = Sequence[Sequence[int]]
# What a position sees of its sample: those of its own document, those where a mask [b, 1, 1, s] is true, those that a
# cache holds, or all.
Visible = DocumentLengths | Tensor | LayerCache | None
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def as_document_lengths(lengths: Tensor | None, tokens: Tensor) -> DocumentLengths | None:
    """From `document_lengths` [b, s] (integers, zeros after the last document) of a batch to lists for `tokens` [b, s].

    None where each sample is one document: then there is nothing to divide. Raises ValueError for lengths that are
    negative, begin with or hold a zero between others, or do not add up to s.
    """
    if lengths is None:
        return None
    if lengths.shape != tokens.shape:
        raise ValueError(f"document_lengths of shape {tuple(lengths.shape)}: the tokens have {tuple(tokens.shape)}")
    rows: list[list[int]] = []
    for row in lengths.tolist():
        count = row.index(0) if 0 in row else len(row)
        rows.append(row[:count])
        if min(row) < 0 or any(row[count:]) or sum(row) != tokens.shape[1]:
            raise ValueError(f"document_lengths {row[:8]} ...: they must be above 0 and add up to {tokens.shape[1]}")
    return rows if any(len(row) > 1 for row in rows) else None


def attend_within(lengths: DocumentLengths, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`attend` for each document of each sample by itself: [b, n, s, d] each -> [b, n, s, d]."""
    samples = []
    # unbind and split have a backward pass that copies once; a slice for each document would fill a whole tensor each
    for row, *heads in zip(lengths, query.unbind(), key.unbind(), value.unbind(), strict=True):
        parts = zip(*(head.unsqueeze(0).split(list(row), dim=2) for head in heads), strict=True)
        samples.append(torch.cat([attend(*part) for part in parts], dim=2))
    return torch.cat(samples)  # [b, n, s, d]
