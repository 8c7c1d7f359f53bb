"""Where the time of an iteration goes: each rank measures, and the least and the most of all ranks are told."""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import distributed as dist

from megatron import mpu

TIMERS = ("forward-compute", "backward-compute", "pipeline-wait", "reduce-gradients", "optimizer-step")


class Timers:
    """The seconds that this rank has spent in each of `TIMERS` since the last report.

    On an accelerator every measured part is waited for, so that the parts of an iteration overlap less than they would
    without.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._seconds = dict.fromkeys(TIMERS, 0.0)

    def now(self) -> float:
        """The time at which all that was asked of the device is done."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._clock()

    def add(self, name: str, seconds: float) -> None:
        """Count these seconds as spent in `name`, one of `TIMERS`."""
        self._seconds[name] += seconds

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the time of the block as spent in `name`, one of `TIMERS`."""
        began = self.now()
        yield
        self.add(name, self.now() - began)

    def report(self, iterations: int) -> dict[str, float]:
        """Milliseconds of an iteration by the names of the log line, the least and the most of all ranks; starts anew.

        Collective: one all-gather of a float64 for each timer over all ranks.
        """
        mine = torch.tensor([[self._seconds[name] for name in TIMERS]], dtype=torch.float64, device=self._device)
        everyone = mpu.resolve_group(dist.group.WORLD) if dist.is_initialized() else mpu.SERIAL_GROUP
        every = mpu.all_gather_first_dim(mine, everyone)  # [ranks, timers]
        self._seconds = dict.fromkeys(TIMERS, 0.0)
        each = (every * 1e3 / iterations).T.tolist()  # [timers][ranks]
        return {
            f"{name}-{kind}-ms": choose(times)
            for name, times in zip(TIMERS, each, strict=True)
            for kind, choose in (("min", min), ("max", max))
        }
