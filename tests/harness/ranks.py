"""Runs a function on several ranks: reused worker processes on gloo, a fresh process group for each call."""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from tests.harness.worker import Call, Report, serve

MAX_RANKS = 8
_START_TIMEOUT = 180.0
# How long, after a first complaint, an earlier cause on another rank may still come in.
_GRACE = 1.0
# How often to see whether a silent rank still lives.
_LOOK_AGAIN = 0.5
# How long a rank may take to begin to write its stacks, and a pause in which one that writes has written more.
_STACK_TIMEOUT, _STACK_PAUSE = 10.0, 0.2
# A server that has loaded these once forks the workers, so that new ones cost little. PyTorch loads its compiler when
# the first optimizer is made, which takes seconds.
_PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "pytest", "tests.harness.worker", "pretrain_gpt"]


class RankError(RuntimeError):
    """A call failed. The message holds the traceback of `rank`, the first one that failed."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RankTimeout(RuntimeError):
    """A call did not end in time. `ranks` are those that hung; the message shows where each of them stood."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class _Worker:
    """A process, our end of its connection, and the file for its stacks."""

    def __init__(self, folder: Path, number: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.stack_file = folder / f"stacks_{number}"
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        # Not a daemon: those may have no children, and data loaders start some. It ends with its parent by itself.
        self.process: BaseProcess = context.Process(
            target=serve, args=(theirs, str(self.stack_file)), name=f"rank-worker-{number}"
        )
        with _environment(_worker_environment()):
            self.process.start()
        theirs.close()

    def receive(self, timeout: float) -> Any:
        """The next message; TimeoutError where none comes in time, EOFError where the process is gone."""
        if not self.connection.poll(max(timeout, 0.0)):
            raise TimeoutError
        return self.connection.recv()

    def report(self) -> Report | None:
        """What the worker says of its call; None if nothing yet, EOFError if it is gone.

        Its end alone would not tell: processes that it started may hold its end of the connection open.
        """
        gone = self.process.exitcode is not None
        if self.connection.poll():
            answer = self.connection.recv()
            assert isinstance(answer, Report)
            return answer
        if gone:
            raise EOFError
        return None

    def stacks(self) -> str:
        """Where every thread of the worker stands now."""
        os.kill(self.process.pid or 0, signal.SIGUSR1)
        deadline, before, text = time.monotonic() + _STACK_TIMEOUT, "", ""
        while time.monotonic() < deadline and not text or text != before:  # until nothing more is written
            time.sleep(_STACK_PAUSE)
            before, text = text, self.stack_file.read_text(encoding="utf-8").strip()
        return text or "(no stack: it does not answer signals)"

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class Ranks:
    """A pool of ranks. Calling it runs a function on the first n of them; `close()` ends the processes.

    Workers are started when first needed and kept. Each has one torch thread. After a failure all are replaced, so a
    call never meets what a broken one left behind.
    """

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks_")
        self._calls = 0
        self._started = 0
        atexit.register(self._stop_workers)  # where `close` was never reached; Python waits for children otherwise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, n: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Run `function(rank, n, *args)` on n ranks and return their results in the order of ranks.

        Args:
            n: number of ranks, 1 to 8.
            function: a function at the top level of a module; workers find it by module and name.
            args: anything that can be pickled, the same for all ranks.
            timeout: seconds for the whole call, without starting workers.

        Raises:
            RankError: a rank raised or died; the message holds the first one's own traceback.
            RankTimeout: some ranks did not finish.
        """
        if not 1 <= n <= MAX_RANKS:
            raise ValueError(f"{n} ranks: the harness has 1 to {MAX_RANKS}")
        module, qualname = _address(function)
        arguments = pickle.dumps(args)
        try:
            self._grow(n)
            self._calls += 1
            rendezvous = str(Path(self._folder.name) / f"rendezvous_{self._calls}")
            for rank, worker in enumerate(self._workers[:n]):
                # The group's own timeout is later than ours, so that ours tells which ranks hang.
                worker.connection.send(Call(module, qualname, arguments, rank, n, rendezvous, timeout + 30.0))
            results = self._collect(n, timeout)
            self._release(n)
        except BaseException:
            self._stop_workers()
            raise
        return [pickle.loads(result) for result in results]

    def close(self) -> None:
        """End all workers."""
        self._stop_workers()
        self._folder.cleanup()

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers.clear()

    def _grow(self, n: int) -> None:
        """Start workers until there are n; all of them load PyTorch at once."""
        new = []
        while len(self._workers) < n:
            self._started += 1
            new.append(_Worker(Path(self._folder.name), self._started))
            self._workers.append(new[-1])
        for worker in new:
            try:
                assert worker.receive(_START_TIMEOUT) == "ready"
            except (EOFError, ConnectionResetError, TimeoutError) as error:
                raise RuntimeError(f"{worker.process.name} did not start; see its output") from error

    def _collect(self, n: int, timeout: float) -> list[bytes]:
        """Every rank's pickled result; raises for the first failure or when the time is over."""
        reports: dict[int, Report] = {}
        dead: list[int] = []
        deadline = time.monotonic() + timeout
        while len(reports) + len(dead) < n:
            waiting = sorted(set(range(n)) - reports.keys() - set(dead))
            remaining = max(0.0, deadline - time.monotonic())
            wait([self._workers[rank].connection for rank in waiting], min(_LOOK_AGAIN, remaining))
            for rank in waiting:
                try:
                    report = self._workers[rank].report()
                except (EOFError, ConnectionResetError):
                    dead.append(rank)
                else:
                    reports |= {rank: report} if report is not None else {}
            if dead or any(report.result is None for report in reports.values()):
                deadline = min(deadline, time.monotonic() + _GRACE)
            if time.monotonic() >= deadline:
                break
        self._raise_failure(reports, dead)
        missing = sorted(set(range(n)) - reports.keys())
        if missing:
            raise RankTimeout(self._hung(missing, n, timeout), missing)
        return [report.result for _, report in sorted(reports.items()) if report.result is not None]

    def _raise_failure(self, reports: dict[int, Report], dead: list[int]) -> None:
        """A dead process is the cause before any error, then the earliest error: the others lost their peer."""
        failures = sorted((r.moment, rank) for rank, r in reports.items() if r.result is None)
        if dead:
            process = self._workers[dead[0]].process
            process.join(_START_TIMEOUT)
            raise RankError(f"rank {dead[0]} died: {_exit_words(process.exitcode)}", dead[0])
        if failures:
            rank = failures[0][1]
            others = [other for _, other in failures[1:]]
            after = f" (after it failed: ranks {others})" if others else ""
            raise RankError(f"rank {rank} failed{after}\n\n{reports[rank].error}", rank)

    def _hung(self, missing: list[int], n: int, timeout: float) -> str:
        stacks = "\n\n".join(f"rank {rank} stood at:\n{self._workers[rank].stacks()}" for rank in missing)
        return f"ranks {missing} of {n} did not finish within {timeout:g} s\n\n{stacks}"

    def _release(self, n: int) -> None:
        """Let the ranks destroy their groups, now that all are done."""
        for worker in self._workers[:n]:
            worker.connection.send("release")
        for rank, worker in enumerate(self._workers[:n]):
            try:
                assert worker.receive(_START_TIMEOUT) == "clean"
            except (EOFError, ConnectionResetError, TimeoutError) as error:
                raise RankError(f"rank {rank} failed to clean up after the call; see its output", rank) from error


def _address(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and qualified name by which a worker finds `function`."""
    module, qualname = function.__module__, function.__qualname__
    if "<" in qualname or module == "__main__":
        raise ValueError(f"{module}.{qualname}: ranks need a function at the top level of a test module")
    return module, qualname


def _exit_words(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code} in the middle of the call"


def _worker_environment() -> dict[str, str]:
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | loopback


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the block; a started process takes them along."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
