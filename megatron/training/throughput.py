"""How fast a run goes and what it holds: the numbers of the log line."""

import contextlib
import dataclasses
import resource
import time
from collections.abc import Callable, Iterator

import torch

from megatron.base.devices import peak_flops
from megatron.training.step import LossSum, Step

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

    `flops` are the model's (nothing recomputed), forward and backward; None where they are not known.
    """

    tokens: int
    flops: float | None
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

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the block, which is not training: an evaluation, a save."""
        began = self._clock()
        yield
        self._paused += self._clock() - began

    def report(self) -> dict[str, float]:
        """Mean loss, last gradient norm and speed since the last report, by the names of the log line."""
        work, steps = self._workload, self._steps
        seconds = self._clock() - self._began - self._paused
        loss = LossSum(sum(s.loss.total for s in steps), sum(s.loss.count for s in steps)).mean
        metrics = {
            "loss": loss,
            "grad-norm": steps[-1].grad_norm,
            "ms-per-iteration": seconds / len(steps) * 1e3,
            "tokens-per-second": work.tokens * self._samples / seconds,
        }
        if work.flops is not None:
            flops = work.flops * self._samples / seconds / work.world_size
            metrics["TFLOPs-per-device"] = flops / 1e12
            if work.peak is not None:
                metrics["MFU"] = flops / work.peak
        self._restart()
        return metrics
