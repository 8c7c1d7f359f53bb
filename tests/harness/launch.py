"""Starts programs as a user does: with this Python, alone or under torchrun, and gives what they printed."""

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def environment(**changes: str) -> dict[str, str]:
    """The present environment with this Python first on PATH, one thread a rank, and `changes`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | changes


def free_port() -> int:
    """A port for a launcher to listen at, below those that systems give out by themselves: nobody gets it meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError("of a hundred ports none is free")


def run_command(
    words: Sequence[str], *, timeout: float = 240.0, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run `words` in the repository; its outputs are captured. TimeoutExpired ends a test that would hang."""
    return subprocess.run(
        words,
        cwd=REPOSITORY,
        env=dict(env or environment()),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def torchrun(ranks: int, words: Sequence[str], *, timeout: float = 240.0) -> "subprocess.CompletedProcess[str]":
    """Run a script with its arguments on `ranks` processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return run_command([*launcher, *words], timeout=timeout)
