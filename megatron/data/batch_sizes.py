"""How many samples an iteration takes, as a pure function of the samples consumed: a ramp-up, then one size."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RampUp:
    """Begin with batches of `start` samples and add `increment` again and again, over the first `samples` samples."""

    start: int
    increment: int
    samples: int


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
    """The size of each global batch, by the rule of Megatron-LM 2.5.

    Without a ramp-up it is `global_batch_size`. With one it is `start + int(consumed / (samples / steps)) * increment`
    where `steps = (global_batch_size - start) / increment`, until `samples` are consumed.
    """

    global_batch_size: int
    ramp_up: RampUp | None = None

    def problems(self) -> list[str]:
        """A sentence for each number of the ramp-up that is out of its range or does not divide."""
        if self.ramp_up is None:
            return []
        start, increment, samples = dataclasses.astuple(self.ramp_up)
        name = f"--rampup-batch-size {start} {increment} {samples}"
        if start < 1 or increment < 1 or samples < 0:
            return [f"{name}: start and increment must be at least 1, and the samples at least 0"]
        if start > self.global_batch_size or (self.global_batch_size - start) % increment:
            return [
                f"{name}: some increments of {increment} must lead from {start} to {self.global_batch_size} samples"
            ]
        return []

    def size(self, consumed_samples: int) -> int:
        """Samples of the global batch that begins after `consumed_samples` samples."""
        ramp = self.ramp_up
        if ramp is None or consumed_samples >= ramp.samples:
            return self.global_batch_size
        steps = (self.global_batch_size - ramp.start) // ramp.increment
        if steps == 0:
            return self.global_batch_size
        return ramp.start + int(consumed_samples / (ramp.samples / steps)) * ramp.increment

    def consumed_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Samples consumed when `iterations` more have followed `consumed_samples`."""
        last = 0 if self.ramp_up is None else self.ramp_up.samples
        while iterations > 0 and consumed_samples < last:
            consumed_samples += self.size(consumed_samples)
            iterations -= 1
        return consumed_samples + iterations * self.global_batch_size

    def batches_until(self, total_samples: int, consumed_samples: int = 0) -> int:
        """Whole batches between `consumed_samples` and `total_samples`."""
        last = 0 if self.ramp_up is None else self.ramp_up.samples
        batches = 0
        while consumed_samples < last and consumed_samples + self.size(consumed_samples) <= total_samples:
            consumed_samples += self.size(consumed_samples)
            batches += 1
        if consumed_samples < last:
            return batches
        return batches + max(total_samples - consumed_samples, 0) // self.global_batch_size
