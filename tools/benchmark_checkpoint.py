"""Speed of saving and loading, as ratios to PyTorch's own: `python tools/benchmark_checkpoint.py [--folder F]`.

Saving is compared with torch.save and fsync, loading with torch.load(mmap=True) and a copy of every tensor into place:
the same bytes, folder and number of threads, taken in turns in one run, medians; neither save has to wait for what the
other left for the disk to do. Files are in the page cache when they are loaded; with --cold they are not. Meant for a
quiet machine, whose load is told.
"""

import contextlib
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatron.base.compose import ComposedConfig
from megatron.base.config import Config, flag, minimum_problems
from megatron.checkpointing import Placed, load_checkpoint, save_checkpoint
from megatron.mpu.sharding import Sharding
from megatron.training.arguments import parse_composed
from megatron.training.failure import exit_code

_GOAL = 0.7

# PyTorch's own saving and loading, in a process that has the tensors and does what it is told to, again and again.
# Weights only: what is loaded is nothing but tensors.
THEIRS = """
import os, sys, time, torch
path, number, elements, threads = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(threads)
tensors = {f"tensor{i}": torch.randn(elements) for i in range(number)}
targets = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
def save():
    with open(path, "wb") as stream:
        torch.save(tensors, stream)
        stream.flush()
        os.fsync(stream.fileno())
def load():
    for name, tensor in torch.load(path, mmap=True, weights_only=True).items():
        targets[name].copy_(tensor)
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    {"save": save, "load": load}[line.strip()]()
    print(time.perf_counter() - began, flush=True)
"""


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig(Config):
    """What is measured."""

    folder: str | None = flag(None, "where files are written, by default a temporary folder")
    mebibytes: int = flag(1024, "float32 values that are saved and loaded")
    tensors: int = flag(32, "tensors of equal size that they are in")
    rounds: int = flag(5, "measurements of each kind, of which the median counts")
    threads: int = flag(1, "threads of PyTorch; a rank under torchrun has one")
    cold: bool = flag(False, "load files that are not in the page cache")

    def problems(self) -> list[str]:
        found = minimum_problems(self, 1, "mebibytes", "tensors", "rounds", "threads")
        if not found and self.tensors > self.elements:
            words = f"--mebibytes {self.mebibytes} are {self.elements} elements, and each must have one"
            found.append(f"--tensors {self.tensors}: {words}")
        return found

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return self.mebibytes * 2**20 // 4


@dataclasses.dataclass(frozen=True)
class BenchmarkRun(ComposedConfig):
    """Measure the speed of checkpoints."""

    benchmark: BenchmarkConfig


class Theirs:
    """PyTorch's own way, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        self._process = process
        self.path = path
        self._answer()

    def seconds(self, what: str) -> float:
        """Do it, "save" or "load", and tell how long it took."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextlib.contextmanager
def their_process(config: BenchmarkConfig, path: Path, elements: int) -> Iterator[Theirs]:
    """The process, ready."""
    command = [sys.executable, "-c", THEIRS, str(path), *map(str, (config.tensors, elements, config.threads))]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        yield Theirs(process, path)
        assert process.stdin is not None
        process.stdin.close()


def placed(number: int, elements: int) -> Placed:
    """Tensors of random numbers, all of one rank."""
    names = [f"tensor{i}" for i in range(number)]
    return {name: (torch.randn(elements), Sharding(name, (elements,), None, 0)) for name in names}


def forget(paths: Sequence[Path]) -> None:
    """Take files out of the page cache."""
    for path in paths:
        with open(path, "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_saves(config: BenchmarkConfig, folder: Path, theirs: Theirs, tensors: Placed) -> dict[str, list[float]]:
    """Seconds of each save, in turns; the last files of both are left."""
    times: dict[str, list[float]] = {"torch.save": [], "save_checkpoint": []}
    for iteration in range(1, config.rounds + 1):
        theirs.path.unlink(missing_ok=True)
        shutil.rmtree(folder / f"iter_{iteration - 1:07d}", ignore_errors=True)
        os.sync()
        times["torch.save"].append(theirs.seconds("save"))
        os.sync()
        began = time.perf_counter()
        save_checkpoint(folder, iteration, tensors, {}, {}, rank=0, world_size=1, layout={})
        times["save_checkpoint"].append(time.perf_counter() - began)
    return times


def time_loads(config: BenchmarkConfig, folder: Path, theirs: Theirs, tensors: Placed) -> dict[str, list[float]]:
    """Seconds of each load, in turns, after one of both that does not count."""
    times: dict[str, list[float]] = {"torch.load": [], "load_checkpoint": []}
    files = [theirs.path, *folder.glob("iter_*/*.safetensors")]
    for _ in range(config.rounds + 1):
        for what, seconds in times.items():
            if config.cold:
                forget(files)
            began = time.perf_counter()
            if what == "torch.load":
                seconds.append(theirs.seconds("load"))
            else:
                load_checkpoint(folder, tensors, rank=0, layout={})
                seconds.append(time.perf_counter() - began)
    return {what: seconds[1:] for what, seconds in times.items()}


def lines(what: str, times: dict[str, list[float]], size: int) -> list[str]:
    """Medians, and the ratio of the two speeds."""
    medians = [statistics.median(seconds) for seconds in times.values()]
    told = [
        f"  {name}: {median:.3f} s, {size / median / 1e9:.2f} GB/s ({min(seconds):.3f} to {max(seconds):.3f} s)"
        for (name, seconds), median in zip(times.items(), medians, strict=True)
    ]
    return [*told, f"  {what}: {medians[0] / medians[1]:.2f} of PyTorch's speed, goal at least {_GOAL}"]


def benchmark(config: BenchmarkConfig) -> None:
    """Measure all and print it."""
    torch.set_num_threads(config.threads)
    elements = config.elements // config.tensors
    size, state = elements * 4 * config.tensors, "cold" if config.cold else "warm"
    with tempfile.TemporaryDirectory(dir=config.folder) as name:
        folder = Path(name)
        print(f"load of the machine at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
        with their_process(config, folder / "theirs.pt", elements) as theirs:
            tensors = placed(config.tensors, elements)
            print(f"{size / 2**20:,.0f} MiB in {config.tensors} tensors, {config.threads} threads, {state}:")
            saves = time_saves(config, folder / "ours", theirs, tensors)
            print(*lines("saving", saves, size), sep="\n", flush=True)
            loads = time_loads(config, folder / "ours", theirs, tensors)
            print(*lines("loading", loads, size), sep="\n", flush=True)
        print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for the user's mistakes."""
    return exit_code(
        lambda: benchmark(parse_composed(BenchmarkRun, argv, world_size=1, prog="benchmark_checkpoint.py").benchmark)
    )


if __name__ == "__main__":
    sys.exit(main())
