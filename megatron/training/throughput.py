"""How fast a run goes and what it holds: the numbers of the log line."""

import contextlib
import dataclasses
import functools
import operator
import resource
import time
from collections.abc import Callable, Iterator

import torch

from megatron.base.devices import peak_flops
from megatron.training.step import Step

GIB = 1024**3


def memory_gib(device: torch.device) -> float:
    """The most memory held so far, in GiB: of the device where it is a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # Linux counts in KiB


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak floating-point operations a second of this rank's device, None where it is not known (a CPU, say)."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What one sample is, and what works on it: devices, and the peak of one, None where it is not known.

    `flops` are the model's (nothing recomputed), forward and backward, `hardware_flops` those that are executed, with
    recomputation; None where they are not known.
    """

    tokens: int
    flops: float | None
    hardware_flops: float | None
    world_size: int
    peak: float | None


class Interval:
    """Gathers the steps between two log lines."""

    def __init__(self, workload: Workload, clock: Callable[[], float] = time.perf_counter) -> None:
        self._workload = workload
        self._clock = clock
        self._restart()

    def _restart(self) -> None:
        self._began = self._clock()
        self._paused = 0.0
        self._steps: list[Step] = []
        self._samples = 0

    def add(self, step: Step, samples: int) -> None:
        """Count one iteration of that many samples."""
        self._steps.append(step)
        self._samples += samples

    @property
    def steps(self) -> int:
        """Iterations since the last report."""
        return len(self._steps)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the block, which is not training: an evaluation, a save."""
        began = self._clock()
        yield
        self._paused += self._clock() - began

    def report(self) -> dict[str, float]:
        """Mean loss, last gradient norm and speed since the last report, by the names of the log line.

        Steps that were skipped took their time, and have no share in the loss; where all were, there is none.
        """
        taken = [step for step in self._steps if not step.skipped]
        metrics: dict[str, float] = {}
        if taken:
            loss = functools.reduce(operator.add, (step.loss for step in taken))
            metrics = {**loss.means(), "grad-norm": taken[-1].grad_norm}
        metrics |= self._speed(self._clock() - self._began - self._paused)
        self._restart()
        return metrics

    def _speed(self, seconds: float) -> dict[str, float]:
        work = self._workload
        speed = {
            "ms-per-iteration": seconds / len(self._steps) * 1e3,
            "tokens-per-second": work.tokens * self._samples / seconds,
        }
        each = self._samples / seconds / work.world_size  # samples a second of one device
        if work.flops is not None:
            speed["TFLOPs-per-device"] = work.flops * each / 1e12
        if work.peak is not None:
            executed = None if work.hardware_flops == work.flops else work.hardware_flops
            shares = {"MFU": work.flops, "HFU": executed}
            speed |= {name: flops * each / work.peak for name, flops in shares.items() if flops is not None}
        return speed
