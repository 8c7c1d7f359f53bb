"""Counts collectives from outside: sees the operators that PyTorch dispatches, not the code that asks for them."""

import dataclasses
from collections import Counter
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_name  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

# Operator (namespace c10d or _c10d_functional) -> kind, and which of its arguments holds the whole tensor: the gathered
# result, the input before it is scattered. Barriers are counted with no bytes.
_OPERATORS: dict[str, tuple[str, int | None]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::allgather_coalesced_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::gather_": ("gather", 1),
    "c10d::scatter_": ("scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
    "c10d::recv_any_source_": ("recv", 0),
    "c10d::barrier": ("barrier", None),
    "c10d::monitored_barrier_": ("barrier", None),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
}
# Operators of those namespaces that move nothing between ranks.
_SILENT = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "c10d::check_for_nan"})


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective that this rank took part in."""

    kind: str
    bytes: int
    group_size: int


class CollectiveCounter(TorchDispatchMode):
    """Context manager that counts this rank's collectives, forwards, in backward and asynchronous ones.

    Attributes, filled while the block runs:
        calls: every collective in order.
        counts: how many of each kind ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv", ...).
        bytes: per kind, the bytes of the whole tensor: what is reduced or broadcast, the gathered result, the input
            that is reduced and scattered.

    Args:
        group: count this group's collectives only, for instance the tensor group's; None counts all. What
            `new_group` returns to a rank outside the group is taken too, and counts nothing.

    An operator that it does not know raises an AssertionError, so that nothing passes uncounted.
    """

    def __init__(self, group: object | None = None) -> None:
        super().__init__()
        self._all = group is None
        self._only: str | None = getattr(group, "group_name", None)
        self.calls: list[Call] = []

    @property
    def counts(self) -> Counter[str]:
        """Number of collectives by kind."""
        return Counter(call.kind for call in self.calls)

    @property
    def bytes(self) -> Counter[str]:
        """Bytes by kind, summed over the calls."""
        total: Counter[str] = Counter()
        for call in self.calls:
            total[call.kind] += call.bytes
        return total

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._record(func._schema.name, args, result)
        return result

    def _record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name in _SILENT:
            return
        assert name in _OPERATORS, f"CollectiveCounter does not know the operator {name}"
        kind, whole = _OPERATORS[name]
        group = _group_of(args)
        if not self._all and (group is None or group.group_name != self._only):
            return
        moved = 0 if kind == "barrier" else _bytes_of(result if whole is None else args[whole])
        self.calls.append(Call(kind, moved, group.size() if group is not None else 0))


def _bytes_of(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes_of, value))


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """The process group among an operator's arguments: an object for c10d, a name (the last string) for functional."""
    for value in args:
        if isinstance(value, torch._C.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    names = [value for value in args if isinstance(value, str)]
    return resolve_name(names[-1]) if names else None  # type: ignore[arg-type]
