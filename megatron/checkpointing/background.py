"""Saves while training goes on: tensors are copied to the host's memory, a thread writes them."""

import datetime
import os
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpointing.errors import SaveError
from megatron.checkpointing.placed import Placed
from megatron.checkpointing.save import save_checkpoint
from megatron.checkpointing.team import Team
from megatron.checkpointing.values import from_json, to_json
from megatron.mpu.initialize import resolve_group


class BackgroundSaver:
    """Saves one checkpoint at a time in a thread, all ranks of the job together.

    The ranks' threads agree with each other over a gloo group of their own, the callers over another, so that neither
    meets the collectives of training. Making it is collective: it makes those two groups, unless `world_size` is 1. A
    collective that waits for a rank fails after `timeout`, gloo's own by default.
    """

    def __init__(self, rank: int, world_size: int, timeout: datetime.timedelta | None = None) -> None:
        self._rank = rank
        self._world_size = world_size
        several = world_size > 1
        self._groups = [dist.new_group(backend="gloo", timeout=timeout) if several else None for _ in range(2)]
        self._staging = _Staging()
        self._work: _Work | None = None

    @property
    def busy(self) -> bool:
        """Whether a save was started whose end was not told yet; the same on all ranks."""
        return self._work is not None

    def start(
        self,
        directory: str | os.PathLike[str],
        iteration: int,
        tensors: Placed,
        state: Mapping[str, Any],
        rank_tensors: Mapping[str, Tensor],
        *,
        layout: Mapping[str, Any],
        tensor_rank: int | None = None,
        keep_last: int | None = None,
        left_alone: Collection[int] = (),
    ) -> None:
        """Copy everything, then save it as `save_checkpoint` does, which has the same arguments, in the background.

        Returns when the copies are made: the originals may change. No save may be under way. Raises ValueError, before
        anything is written, for values in `state` that cannot be stored.
        """
        assert self._work is None, "a save is under way: wait for it first"
        options = {
            "rank": self._rank,
            "world_size": self._world_size,
            "layout": layout,
            "tensor_rank": resolve_group(None).rank if tensor_rank is None else tensor_rank,
            "group": self._groups[0],
            "keep_last": keep_last,
            "left_alone": frozenset(left_alone),
        }
        copies, own = self._staging.copies(tensors, rank_tensors)
        self._work = _Work(directory, iteration, copies, from_json(to_json(state)), own, **options)

    def poll(self) -> Path | None:
        """The folder of a save that has ended on all ranks since the last call, else None. For every step of a run.

        Raises `SaveError`, on all ranks in the same call, where it failed. One all-reduce of a byte while a save is
        under way.
        """
        if self._work is None:
            return None
        team = Team(self._rank, self._world_size, self._groups[1], SaveError)
        under_way = team.union([self._work.is_alive()])[0]
        return None if under_way else self.wait()

    def wait(self) -> Path | None:
        """Wait for a save that is under way, if any; returns its folder. Raises `SaveError` where it failed."""
        if self._work is None:
            return None
        work, self._work = self._work, None
        return work.outcome()

    def close(self) -> None:
        """Wait for a save that is under way, then give up copies and groups. Raises `SaveError` where it failed."""
        try:
            self.wait()
        finally:
            self._staging = _Staging()
            for group in self._groups:
                if group is not None:
                    dist.destroy_process_group(group)
            self._groups = [None, None]


class _Work(threading.Thread):
    """A thread that makes one checkpoint. The interpreter waits for it at its end, whatever ends it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(name="checkpoint-saver", daemon=False)
        self._arguments, self._options = arguments, options
        self._folder: Path | None = None
        self._failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._folder = save_checkpoint(*self._arguments, **self._options)
        except Exception as error:
            self._failure = error

    def outcome(self) -> Path:
        """The folder of the checkpoint, when it is there. Raises `SaveError` where it is not."""
        self.join()
        if isinstance(self._failure, SaveError):
            raise self._failure
        if self._failure is not None:  # a rank was lost
            raise SaveError(f"{type(self._failure).__name__}: {self._failure}") from self._failure
        assert self._folder is not None
        return self._folder


class _Staging:
    """Memory of the host for copies of tensors, kept from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copies(self, tensors: Placed, rank_tensors: Mapping[str, Tensor]) -> tuple[Placed, dict[str, Tensor]]:
        """Equal tensors in the same places, in memory that nobody else has."""
        before, self._buffers = self._buffers, {}
        placed = {name: (self._copy(name, t, before), place) for name, (t, place) in tensors.items()}
        own = {name: self._copy(f"own:{name}", t, before) for name, t in rank_tensors.items()}
        if any(t.device.type != "cpu" for t in [*(t for t, _ in tensors.values()), *rank_tensors.values()]):
            torch.accelerator.synchronize()
        return placed, own

    def _copy(self, key: str, tensor: Tensor, before: Mapping[str, Tensor]) -> Tensor:
        pinned = tensor.device.type != "cpu"
        buffer = before.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        self._buffers[key] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=pinned)
