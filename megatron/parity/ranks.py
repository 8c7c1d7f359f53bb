"""Several functions at once, each on ranks of its own on this machine's CPU: processes on gloo, forked from one."""

import dataclasses
import datetime
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PRELOADED = ["torch.distributed", "megatron.parity.record"]
# How long, after a first complaint, an earlier cause on another rank may still come in.
_GRACE = 1.0
_LOOK_AGAIN = 0.5
# How long a process that is done may take to end by itself.
_LEAVE = 10.0
# How much later than the end of all ranks' time a collective gives up, so that it is told which ranks hang.
_LATER = 30.0


class RanksFailed(RuntimeError):
    """A rank raised, died or hung. The message tells which, and how.

    Attributes:
        job: its number among those that ran.
    """

    def __init__(self, job: int, message: str) -> None:
        super().__init__(message)
        self.job = job


@dataclasses.dataclass(frozen=True)
class Job:
    """A call `function(*args)` on each of `ranks` ranks, with `torch.distributed` started; all of it is pickled."""

    ranks: int
    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclasses.dataclass
class _Rank:
    job: int
    rank: int
    process: BaseProcess
    connection: Connection
    result: Any = None
    error: str | None = None
    failed_at: float = 0.0
    done: bool = False

    def look(self) -> None:
        """Take what the process has to say, if it has; its end without a word is a failure."""
        gone = self.process.exitcode is not None
        if self.connection.poll():
            try:
                self.error, self.failed_at, self.result = self.connection.recv()
                self.done = True
                return
            except (EOFError, ConnectionResetError):
                gone = True
        if gone:
            self.process.join()
            self.error, self.done = f"its process ended with exit code {self.process.exitcode}", True


def run_jobs(jobs: Sequence[Job], timeout: float) -> list[list[Any]]:
    """What each job's function returned on each of its ranks. All jobs run at the same time.

    Raises RanksFailed for the first rank that failed, or after `timeout` seconds; no process is left behind.
    """
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        try:
            for number, job in enumerate(jobs):
                ranks += [_start(number, job, rank, f"{folder}/{number}", timeout) for rank in range(job.ranks)]
            _wait(ranks, timeout)
        finally:
            for each in ranks:
                if each.done and not each.error:
                    each.process.join(_LEAVE)
                each.process.kill()
                each.process.join()
                each.connection.close()
    return [[each.result for each in ranks if each.job == number] for number in range(len(jobs))]


def _start(number: int, job: Job, rank: int, rendezvous: str, timeout: float) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, job, rank, rendezvous, timeout), daemon=True)
    process.start()
    theirs.close()
    return _Rank(number, rank, process, mine)


def _serve(connection: Connection, job: Job, rank: int, rendezvous: str, timeout: float) -> None:
    """Run the call in a process group and send (None, time, result), or (traceback, time, None)."""
    import torch
    import torch.distributed as dist

    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # standard output: the log lines of the runs
    try:
        dist.init_process_group(
            "gloo",
            init_method=Path(rendezvous).resolve().as_uri(),
            rank=rank,
            world_size=job.ranks,
            timeout=datetime.timedelta(seconds=timeout + _LATER),
        )
        result = job.function(*job.args)
        dist.barrier()  # who leaves early would break the connections of those still at work
        connection.send((None, 0.0, result))
    except BaseException:
        connection.send((traceback.format_exc(), time.monotonic(), None))
    connection.close()


def _wait(ranks: Sequence[_Rank], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while waiting := [each for each in ranks if not each.done]:
        wait([each.connection for each in waiting], max(0.0, min(_LOOK_AGAIN, deadline - time.monotonic())))
        for each in waiting:
            each.look()
        if any(each.error for each in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE)
        if time.monotonic() >= deadline:
            break
    failed = sorted((each for each in ranks if each.error), key=lambda each: (each.failed_at, each.rank))
    if failed:
        raise RanksFailed(failed[0].job, f"rank {failed[0].rank} failed: {(failed[0].error or '').strip()}")
    if waiting:
        numbers = ", ".join(str(each.rank) for each in waiting)
        raise RanksFailed(waiting[0].job, f"ranks {numbers} did not finish within {timeout:g} s")
