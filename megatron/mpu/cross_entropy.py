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
from megatron.mpu.linear import Entrance, add_product, autocast_dtype, main_grad, parallel_linear
from megatron.mpu.mappings import apply, backward_once
from megatron.mpu.utils import check_id_dtype, check_ids, local_rows

_NO_TARGET = -1  # all negative targets mean the same


def _wide_dtype(x: torch.Tensor) -> torch.dtype:
    """float32, or float64 where `x` is that already."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(_wide_dtype(x))


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
    """forward two all-reduces, backward one of the input's gradient; with sequence parallelism forward an all-gather as
    well, backward the same and a reduce-scatter. Logits exist for one chunk of tokens at a time, in both passes."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        columns: _Columns,
        chunk: int,
        dtype: torch.dtype,
        entrance: Entrance,
    ) -> torch.Tensor:
        whole, matrix = entrance.gather(hidden), weight.to(dtype)
        parts = [_local_sums(F.linear(whole[at], matrix, bias), columns, at) for at in _chunks(whole, chunk)]
        loss, norms = _combine(torch.cat(parts, dim=-1), columns, entrance.info)
        ctx.columns, ctx.chunk, ctx.dtype, ctx.entrance = columns, chunk, dtype, entrance
        ctx.weight = weight  # itself, for its `main_grad`
        ctx.save_for_backward(hidden, weight, bias, norms)
        return loss

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, norms = ctx.saved_tensors
        whole, matrix = ctx.entrance.gather(hidden), weight.to(ctx.dtype)
        grad_hidden = whole.new_empty(whole.shape) if ctx.needs_input_grad[0] else None
        total = _running_total(ctx.weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=_wide_dtype(bias)) if ctx.needs_input_grad[2] else None
        summed = None
        for at in _chunks(whole, ctx.chunk):
            grad = _logits_gradient(F.linear(whole[at], matrix, bias), norms, ctx.columns, grad_loss, at)
            if grad_hidden is not None:
                grad_hidden[at] = grad @ matrix
                if at.stop >= whole.size(0):  # the last: the sum runs beside the product that follows
                    summed = ctx.entrance.start_sum(grad_hidden)
            if total is not None:
                add_product(total, grad.t(), whole[at])
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        grad_weight = None if total is None else _settled(ctx.weight, total)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return None if summed is None else summed.wait(), grad_weight, grad_bias, None, None, None, None


def _running_total(weight: torch.Tensor) -> torch.Tensor:
    """Where the weight's gradient is summed up over the chunks: in its `main_grad` if that is wide, else in zeros."""
    home = main_grad(weight)
    if home is not None and home.dtype == _wide_dtype(home):
        return home
    return weight.new_zeros(weight.shape, dtype=_wide_dtype(weight))


def _settled(weight: torch.Tensor, total: torch.Tensor) -> torch.Tensor | None:
    """The gradient for autograd, or None where it is in `main_grad`, to which it is added here if it was not there."""
    home = main_grad(weight)
    if home is None:
        return total.to(weight.dtype)
    if home is not total:
        home.add_(total)
    return None


def _chunks(hidden: torch.Tensor, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, hidden.size(0), chunk)]


def _check_target(target: torch.Tensor, x: torch.Tensor, shards: int = 1) -> None:
    """ValueError unless there is a target for each token of `x`, or of that many shards of which `x` is one."""
    expected = (x.size(0) * shards, *x.shape[1:-1]) if x.dim() > 1 else ()
    if target.shape != expected:
        raise ValueError(
            f"target of shape {tuple(target.shape)}: with an input of shape {tuple(x.shape)}"
            f"{f' on each of {shards} ranks' if shards > 1 else ''} it must be {expected}"
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
    bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
    vocab_size: int | None = None,
    group: Group = None,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """`vocab_parallel_cross_entropy` of the logits `hidden @ weight.T + bias`, by `chunk_size` tokens; `[tokens]`.

    Forward two small all-reduces for all chunks together, backward one of the gradient of `hidden`, which is summed
    over the ranks here: no `copy_to_tensor_model_parallel_region` before it. With `sequence_parallel` forward an
    all-gather as well, backward all-gather and reduce-scatter. With chunks the logits are computed again in the
    backward pass and those of all tokens never exist; without (`chunk_size` None, or not below the number of tokens)
    they are kept. What becomes of the weight's gradient is said at `parallel_linear`.

    Args:
        hidden: `[tokens, h]`, the same on every tensor rank; with `sequence_parallel` this rank's `[tokens/t, h]`.
        weight, bias: `[v/t, h]` and `[v/t]`, this rank's rows.
        target: `[tokens]`, the same on every rank.
        target, vocab_size: further as in `vocab_parallel_cross_entropy`.

    Raises:
        ValueError: as there, a `chunk_size` below 1, and shapes that do not fit.
    """
    info = resolve_group(group)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size}: it must be at least 1")
    if hidden.dim() != 2:
        raise ValueError(f"hidden of shape {tuple(hidden.shape)}: it must be [tokens, h]")
    _check_target(target, hidden, info.size if sequence_parallel else 1)
    if chunk_size is None or chunk_size >= target.size(0):
        logits = parallel_linear(hidden, weight, bias, group=info, sequence_parallel=sequence_parallel)
        return vocab_parallel_cross_entropy(logits, target, vocab_size=vocab_size, group=info)
    dtype = autocast_dtype(hidden)
    if dtype is not None:
        hidden = hidden.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    columns = _Columns(target, weight.size(0), vocab_size, info)
    entrance = Entrance(info, sequence_parallel)
    return apply(_LinearCrossEntropy, hidden, weight, bias, columns, chunk_size, dtype or weight.dtype, entrance)
