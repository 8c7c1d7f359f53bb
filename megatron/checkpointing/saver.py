"""The saves of a run: in the foreground or behind training; a failed one is told and tried again at the next turn."""

import contextlib
import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpointing.background import BackgroundSaver
from megatron.checkpointing.errors import SaveError
from megatron.checkpointing.folders import iterations_beyond
from megatron.checkpointing.placed import Placed
from megatron.checkpointing.save import save_checkpoint


@dataclasses.dataclass
class FailedSaves:
    """Counts saves that failed one after another; `limit` of them end the run."""

    limit: int
    in_a_row: int = 0

    def succeeded(self) -> None:
        """A checkpoint was saved."""
        self.in_a_row = 0

    def failed(self, iteration: int, error: SaveError, *, limited: bool = True) -> str:
        """The checkpoint of `iteration` was not saved: a sentence about it, raised at the limit if `limited`."""
        self.in_a_row += 1
        count = f"{self.in_a_row} in a row of --max-failed-saves {self.limit}"
        sentence = f"iteration {iteration} could not be saved ({count}): {error}"
        if limited and self.in_a_row >= self.limit:
            raise SaveError(sentence) from error
        return sentence


class Saver:
    """Saves the checkpoints of one run. All ranks call the same methods in the same order.

    Args:
        directory: where the checkpoints go.
        rank, world_size: this rank's number in the job.
        tell: given a sentence when a save has begun, ended or failed.
        in_background: whether training goes on while a checkpoint is written; then making a `Saver` is collective.
        keep_last: this many checkpoints are kept, all by default. Those that `directory` has already beyond
            `saved_iteration` neither count nor are removed: they are another run's, or the one that was damaged when
            this run went back to an earlier one.
        max_failed: so many failures in a row raise `SaveError`; fewer are told.
        saved_iteration: that of the checkpoint in `directory` from which the run goes on, if it does.
        timeout: after which a collective of a save in the background fails that waits for a rank; gloo's by default.

    Attributes:
        saved_iteration: the last one of the run that `directory` holds. It is not saved again.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int,
        world_size: int,
        tell: Callable[[str], None],
        *,
        in_background: bool = False,
        keep_last: int | None = None,
        max_failed: int = 3,
        saved_iteration: int | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._world_size = world_size
        self._tell = tell
        self._keep_last = keep_last
        self._not_ours = set(iterations_beyond(Path(directory), saved_iteration))
        self._failures = FailedSaves(max_failed)
        self._background = BackgroundSaver(rank, world_size, timeout) if in_background else None
        self._iteration = 0  # of the save that was started last
        self.saved_iteration = saved_iteration

    def save(
        self,
        iteration: int,
        tensors: Placed,
        state: Mapping[str, Any],
        rank_tensors: Mapping[str, Tensor],
        *,
        layout: Mapping[str, Any],
        tensor_rank: int | None = None,
        last: bool = False,
    ) -> bool:
        """Save a checkpoint, or start to; arguments as of `save_checkpoint`. Whether it is saved when this returns.

        One that is still being written is waited for. The `last` one of a run is written in the foreground, whatever
        failed before, and its own failure is raised.
        """
        self._settle(wait=True, limited=not last)
        if self.saved_iteration == iteration:
            return True
        self._iteration, began = iteration, time.perf_counter()
        options: dict[str, Any] = {"layout": layout, "tensor_rank": tensor_rank, "keep_last": self._keep_last}
        options["left_alone"] = self._not_ours
        if self._background is not None and not last:
            self._background.start(self._directory, iteration, tensors, state, rank_tensors, **options)
            copied = time.perf_counter() - began
            self._tell(f"iteration {iteration} is being written to {self._directory}, copied in {copied:.1f} s")
            return False
        options |= {"rank": self._rank, "world_size": self._world_size}
        try:
            save_checkpoint(self._directory, iteration, tensors, state, rank_tensors, **options)
        except SaveError as error:
            if last:
                words = f"iteration {iteration}, the last of this run, could not be saved to {self._directory}"
                raise SaveError(f"{words}: {error}") from error
            self._tell(self._failures.failed(iteration, error))
            return False
        self._succeeded()
        self._tell(f"saved iteration {iteration} to {self._directory} in {time.perf_counter() - began:.1f} s")
        return True

    def poll(self) -> None:
        """See whether a save in the background has ended, and how; cheap, for every step of a run."""
        self._settle(wait=False, limited=True)

    def close(self) -> None:
        """Wait for a save in the background and give up what it needed. Raises `SaveError` where it fails now."""
        if self._background is None:
            return
        was_busy = self._background.busy
        self._background.close()
        self._background = None
        if was_busy:
            self._succeeded()

    def abandon(self) -> None:
        """Wait for a save in the background after the run has failed, however it ends; what it needed is left alone."""
        if self._background is not None:
            with contextlib.suppress(SaveError):
                self._background.wait()

    def _settle(self, *, wait: bool, limited: bool) -> None:
        """Hear how a save in the background has ended; a failure at the limit is raised only if `limited`."""
        if self._background is None:
            return
        try:
            folder = self._background.wait() if wait else self._background.poll()
        except SaveError as error:
            self._tell(self._failures.failed(self._iteration, error, limited=limited))
            return
        if folder is not None:
            self._succeeded()
            self._tell(f"iteration {self._iteration} is saved now, to {folder}")

    def _succeeded(self) -> None:
        self._failures.succeeded()
        self._not_ours.discard(self._iteration)
        self.saved_iteration = self._iteration
