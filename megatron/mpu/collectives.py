"""The collectives that the parallel layers are made of; each returns at once in a group of one rank.

Each has two forms: `f(x)` is done when it returns, `start_f(x)` returns a `Pending` that runs beside other work.
"""

import torch
import torch.distributed as dist

from megatron.mpu.initialize import Group, GroupInfo, resolve_group

# PyTorch 2.13 renamed these two and warns about the old names; nothing else in the library calls either.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way. Neither its input nor its result may be touched before `wait()`.

    On a device with streams, `wait` makes the current stream wait, not the host.
    """

    def __init__(self, result: torch.Tensor, work: dist.Work | None = None, inputs: torch.Tensor | None = None) -> None:
        self._result, self._work, self._inputs = result, work, inputs  # the inputs must live until the work is done

    def wait(self) -> torch.Tensor:
        """The result, once it is there. May be called again."""
        if self._work is not None:
            self._work.wait()
        self._work = self._inputs = None
        return self._result


class _Unpacking(Pending):
    """Of a tensor that was packed for the collective: the result goes back into the tensor itself."""

    def __init__(self, packed: Pending, x: torch.Tensor) -> None:
        super().__init__(x)
        self._packed: Pending | None = packed

    def wait(self) -> torch.Tensor:
        if self._packed is not None:
            self._result.copy_(self._packed.wait())
        self._packed = None
        return self._result


def process_group(info: GroupInfo) -> dist.ProcessGroup:
    """The process group of `info`, which has several ranks; `RuntimeError` where their number was set by hand."""
    if info.group is None:
        raise RuntimeError(
            f"a collective over {info.size} tensor-parallel ranks without processes: their number was set by hand, "
            "call mpu.initialize_model_parallel to make the group"
        )
    return info.group


def _all_reduce(x: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType, async_op: bool) -> Pending:
    info = resolve_group(group)
    if info.size == 1:
        return Pending(x)
    if x.is_contiguous():
        return Pending(x, dist.all_reduce(x, op, group=process_group(info), async_op=async_op))
    return _Unpacking(_all_reduce(x.contiguous(), info, op, async_op), x)


def _all_gather(x: torch.Tensor, group: Group, out: torch.Tensor | None, async_op: bool) -> Pending:
    info = resolve_group(group)
    if info.size == 1:
        return Pending(x if out is None else out.copy_(x))
    gathered = x.new_empty((info.size * x.size(0), *x.shape[1:])) if out is None else out
    x = x.contiguous()
    return Pending(gathered, _all_gather_single(gathered, x, group=process_group(info), async_op=async_op), x)


def _reduce_scatter(x: torch.Tensor, group: Group, out: torch.Tensor | None, async_op: bool) -> Pending:
    info = resolve_group(group)
    if info.size == 1:
        return Pending(x if out is None else out.copy_(x))
    if x.size(0) % info.size:
        raise ValueError(f"first dimension of size {x.size(0)}: it must be divisible by the group's {info.size} ranks")
    part = x.new_empty((x.size(0) // info.size, *x.shape[1:])) if out is None else out
    x = x.contiguous()
    return Pending(part, _reduce_scatter_single(part, x, group=process_group(info), async_op=async_op), x)


def all_reduce(x: torch.Tensor, group: Group = None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce `x` over the group, in place, and return it. Contiguous or not."""
    return _all_reduce(x, group, op, async_op=False).wait()


def start_all_reduce(x: torch.Tensor, group: Group = None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
    """Begin `all_reduce`."""
    return _all_reduce(x, group, op, async_op=True)


def all_gather_first_dim(x: torch.Tensor, group: Group = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`[n, ...]` on each rank -> `[size * n, ...]`, in rank order.

    The result is in `out` where given, of which `x` may be this rank's slice.
    """
    return _all_gather(x, group, out, async_op=False).wait()


def start_all_gather_first_dim(x: torch.Tensor, group: Group = None, *, out: torch.Tensor | None = None) -> Pending:
    """Begin `all_gather_first_dim`."""
    return _all_gather(x, group, out, async_op=True)


def reduce_scatter_first_dim(x: torch.Tensor, group: Group = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`[size * n, ...]` on each rank -> this rank's `[n, ...]` of the sum; `ValueError` if it does not divide.

    The result is in `out` where given, which may be this rank's slice of `x`.
    """
    return _reduce_scatter(x, group, out, async_op=False).wait()


def start_reduce_scatter_first_dim(x: torch.Tensor, group: Group = None, *, out: torch.Tensor | None = None) -> Pending:
    """Begin `reduce_scatter_first_dim`."""
    return _reduce_scatter(x, group, out, async_op=True)
