"""Steps that all ranks take together: when one fails, all raise its message, and none goes on alone."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist


class Team:
    """The ranks that save or load a checkpoint together.

    Args:
        rank: this rank's number in `group`.
        world_size: number of ranks; with 1 there are no collectives.
        group: their group, None for all ranks of the job.
        errors: the exceptions that all ranks raise when one of them fails: the last of these types that its own is of,
            the first for any other.
    """

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None, *errors: type[Exception]) -> None:
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self._errors = errors

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run the block on every rank and agree on how it went: one small all-reduce.

        After an exception on some rank, every rank raises one of `errors` with the message of the first that failed.
        Also a barrier: nobody goes on before all are done.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        found = self._first_failure(None if failure is None else (self._kind(failure), _words(failure)))
        if found is not None:
            raise self._errors[found[0]](found[1]) from failure

    def union(self, flags: Sequence[bool]) -> list[bool]:
        """Which of `flags` are set on any rank; all must give equally many. One all-reduce of a byte for each."""
        if self._world_size == 1:
            return list(flags)
        found = torch.tensor(flags, dtype=torch.uint8, device=self._device())
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in found.tolist()]

    def are_equal(self, number: int) -> bool:
        """Whether all ranks give the same number. One all-reduce of 16 bytes."""
        if self._world_size == 1:
            return True
        least = torch.tensor([number, -number], device=self._device())
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        return least.tolist() == [number, -number]

    def _kind(self, failure: Exception) -> int:
        """Which of `errors` stands for it."""
        return max((i for i, kind in enumerate(self._errors) if isinstance(failure, kind)), default=0)

    def _first_failure(self, mine: tuple[int, str] | None) -> tuple[int, str] | None:
        """Kind and message, with its number, of the lowest rank that has one; None where no rank has one."""
        if self._world_size == 1:
            return mine
        first = torch.tensor(self._world_size if mine is None else self._rank, device=self._device())
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self._group)
        source = int(first.item())
        if source == self._world_size:
            return None
        kind, _, words = self._broadcast("" if mine is None else f"{mine[0]} {mine[1]}", source).partition(" ")
        return int(kind), f"rank {source}: {words}"

    def _broadcast(self, text: str, source: int) -> str:
        """The text of rank `source`, as bytes: nothing that is received can run code."""
        content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self._device())
        length = torch.tensor(content.numel(), device=self._device())
        dist.broadcast(length, group=self._group, group_src=source)
        if self._rank != source:
            content = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device())
        dist.broadcast(content, group=self._group, group_src=source)
        return bytes(content.tolist()).decode(errors="replace")

    def _device(self) -> torch.device:
        """Where the group's tensors must lie: the CPU where the group can, else this rank's accelerator."""
        if "gloo" in dist.get_backend_config(self._group):
            return torch.device("cpu")
        return torch.accelerator.current_accelerator() or torch.device("cpu")


def _words(failure: Exception) -> str:
    return str(failure) if isinstance(failure, ValueError) else f"{type(failure).__name__}: {failure}"
