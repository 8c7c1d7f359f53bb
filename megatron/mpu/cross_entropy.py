"""Cross entropy over logits whose vocabulary is split over the tensor ranks; the logits are never gathered.

Each rank sums up its own columns (maximum, sum of exponentials, logit of the target); two small all-reduces put the
parts together, one of a number for each token and one of two. The backward pass needs no collective: a rank's columns
of the gradient are `exp(logit - maximum) / sum - [column is the target]`.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.mpu.collectives import all_reduce
from megatron.mpu.initialize import Group, GroupInfo, resolve_group
from megatron.mpu.mappings import apply, backward_once
from megatron.mpu.utils import check_id_dtype, check_ids, local_rows

_NO_TARGET = -1  # all negative targets mean the same


def _wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32, or float64 where it is that already."""
    return x if x.dtype == torch.float64 else x.float()


class _Columns:
    """Which columns of the logits a rank has, and where it finds the targets among them."""

    def __init__(self, target: torch.Tensor, width: int, vocab_size: int | None, info: GroupInfo) -> None:
        vocab_size = width * info.size if vocab_size is None else vocab_size
        if not 0 < vocab_size <= width * info.size:
            raise ValueError(f"vocab_size {vocab_size}: it must be at least 1 and at most {width * info.size}")
        first = info.rank * width
        self.real = max(0, min(width, vocab_size - first))  # columns that are no padding
        check_id_dtype(target, "target")
        target = target.long()  # before the negative ones are made equal: unsigned numbers would wrap around
        self.counted = target >= 0
        target = target.clamp(min=_NO_TARGET)
        check_ids(target, vocab_size, _NO_TARGET, "target")
        self.index, elsewhere = local_rows(target, first, width, vocab_size, lowest=_NO_TARGET)
        self.elsewhere = elsewhere | ~self.counted


def _local_sums(logits: torch.Tensor, columns: _Columns, at: slice) -> torch.Tensor:
    """Of tokens `at`, with `logits` [n, v/t]: maximum, sum of exp(logit - maximum), logit of the target; [3, n]."""
    real = _wide(logits[:, : columns.real])
    sums = real.new_zeros((3, logits.size(0)))
    if columns.real == 0:
        sums[0] = -torch.inf
    else:
        sums[0] = real.amax(dim=-1)
        shift = sums[0].masked_fill(sums[0] == -torch.inf, 0.0)  # all are -inf here: the sum is 0, not exp(-inf + inf)
        sums[1] = (real - shift.unsqueeze(-1)).exp_().sum(dim=-1)
    target = _wide(logits.gather(-1, columns.index[at].unsqueeze(-1)).squeeze(-1))
    sums[2] = target.masked_fill(columns.elsewhere[at], 0.0)
    return sums


def _combine(sums: torch.Tensor, columns: _Columns, info: GroupInfo) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss [n], and what the backward pass needs, [2, n]: maximum and log of the sum over the whole vocabulary.

    The two are kept apart: their sum would round away the digits of the smaller one.
    """
    maximum = all_reduce(sums[0].clone(), info, dist.ReduceOp.MAX)
    if info.size > 1:
        sums[1] *= (sums[0] - maximum).exp_()
        all_reduce(sums[1:], info)
    log_sum = sums[1].log()
    loss = log_sum + (maximum - sums[2])
    return loss.masked_fill(~columns.counted, 0.0), torch.stack((maximum, log_sum))


def _logits_gradient(
    logits: torch.Tensor, norms: torch.Tensor, columns: _Columns, grad_loss: torch.Tensor, at: slice
) -> torch.Tensor:
    """Gradient of the losses of tokens `at` in `logits` [n, v/t], in their dtype; zero in padding columns."""
    scale = grad_loss[at].masked_fill(~columns.counted[at], 0.0)
    maximum, log_sum = norms[:, at].unsqueeze(-1)
    grad = _wide(logits).sub(maximum).sub_(log_sum).exp_()  # [n, v/t]
    grad[:, columns.real :] = 0.0
    hit = torch.where(columns.elsewhere[at], 0.0, -1.0).to(grad.dtype).unsqueeze(-1)
    grad.scatter_add_(-1, columns.index[at].unsqueeze(-1), hit)
    return grad.mul_(scale.unsqueeze(-1)).to(logits.dtype)


class _CrossEntropy(torch.autograd.Function):
    """forward two all-reduces, backward nothing. Keeps the logits as they came and two numbers for each token."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, columns: _Columns, info: GroupInfo) -> torch.Tensor:
        loss, norms = _combine(_local_sums(logits, columns, slice(None)), columns, info)
        ctx.columns = columns
        ctx.save_for_backward(logits, norms)
        return loss

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, norms = ctx.saved_tensors
        return _logits_gradient(logits, norms, ctx.columns, grad_loss, slice(None)), None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """forward two all-reduces, backward nothing. Logits exist for one chunk of tokens at a time, in both passes."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, columns: _Columns, chunk: int, info: GroupInfo
    ) -> torch.Tensor:
        parts = [_local_sums(F.linear(hidden[at], weight), columns, at) for at in _chunks(hidden, chunk)]
        loss, norms = _combine(torch.cat(parts, dim=-1), columns, info)
        ctx.columns, ctx.chunk = columns, chunk
        ctx.save_for_backward(hidden, weight, norms)
        return loss

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, norms = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(_wide(weight)) if wants_weight else None
        for at in _chunks(hidden, ctx.chunk):
            grad = _logits_gradient(F.linear(hidden[at], weight), norms, ctx.columns, grad_loss, at)
            if grad_hidden is not None:
                grad_hidden[at] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[at]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _chunks(hidden: torch.Tensor, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, hidden.size(0), chunk)]


def _check_target(target: torch.Tensor, x: torch.Tensor) -> None:
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"target of shape {tuple(target.shape)}: with an input of shape {tuple(x.shape)} it must be "
            f"{tuple(x.shape[:-1])}"
        )


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    *,
    vocab_size: int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Loss of each token, `[...]` float32 (float64 from float64 logits), without any reduction.

    Forward two small all-reduces, backward nothing.

    Args:
        vocab_parallel_logits: `[..., v/t]`, this rank's columns; kept for the backward pass and not changed.
        target: `[...]` ids, the same on every tensor rank. A negative one means that the token does not count: its loss
            is 0 and its gradient zero (Megatron-LM 2.5's callers pass -1 where the loss is masked afterwards).
        vocab_size: columns at or above it are padding: outside of the sum, their gradient exactly zero. None: all are
            real.

    Raises:
        ValueError: shapes that do not fit, targets that are no integers, and on a CPU a target at or above the
            vocabulary size. On CUDA such a target stops the kernel with a device-side assertion, since looking at it
            on the host would make it wait.
    """
    info = resolve_group(group)
    width = vocab_parallel_logits.size(-1)
    _check_target(target, vocab_parallel_logits)
    columns = _Columns(target.flatten(), width, vocab_size, info)
    loss = apply(_CrossEntropy, vocab_parallel_logits.reshape(-1, width), columns, info)
    return loss.view(target.shape)


def vocab_parallel_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    chunk_size: int | None = None,
    vocab_size: int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """`vocab_parallel_cross_entropy` of the logits `hidden @ weight.T`, `chunk_size` tokens at a time; `[tokens]`.

    Forward two small all-reduces for all chunks together, backward nothing: `hidden` is to have passed
    `copy_to_tensor_model_parallel_region`, whose backward sums its gradient over the ranks. With chunks the logits are
    computed again in the backward pass and those of all tokens never exist; without (`chunk_size` None, or not below
    the number of tokens) they are kept.

    Args:
        hidden: `[tokens, h]`, the same on every tensor rank.
        weight: `[v/t, h]`, this rank's rows.
        target, vocab_size: as in `vocab_parallel_cross_entropy`.

    Raises:
        ValueError: as there, a `chunk_size` below 1, and shapes that do not fit.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size}: it must be at least 1")
    if hidden.dim() != 2:
        raise ValueError(f"hidden of shape {tuple(hidden.shape)}: it must be [tokens, h]")
    _check_target(target, hidden)
    if chunk_size is None or chunk_size >= hidden.size(0):
        return vocab_parallel_cross_entropy(F.linear(hidden, weight), target, vocab_size=vocab_size, group=group)
    info = resolve_group(group)
    if torch.is_autocast_enabled(hidden.device.type):  # which does not reach into the backward pass
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    columns = _Columns(target, weight.size(0), vocab_size, info)
    return apply(_LinearCrossEntropy, hidden, weight, columns, chunk_size, info)
