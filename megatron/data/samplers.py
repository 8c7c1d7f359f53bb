"""Which samples a data-parallel rank loads next."""

import dataclasses
from collections.abc import Iterator

from megatron.data.batch_sizes import BatchSchedule, RampUp


@dataclasses.dataclass(frozen=True)
class GlobalBatchSampler:
    """Consecutive samples, dealt to the data-parallel ranks a micro-batch at a time.

    A global batch is the next `global_batch_size` samples after those consumed, or as many as `ramp_up` says at that
    point. Its micro-batch j is the next `micro_batch_size * data_size` of them, of which rank r takes the r-th run of
    `micro_batch_size`. So which samples a global batch holds depends neither on the number of ranks nor on the
    micro-batch size. Iterating gives the lists of sample numbers [b] of one rank, whole global batches only, from
    `consumed_samples` (any number) to the end of the samples; there is nothing left to give when fewer than a global
    batch remain.

    Raises ValueError where the sizes do not divide.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    global_batch_size: int
    data_rank: int = 0
    data_size: int = 1
    ramp_up: RampUp | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.data_rank < self.data_size and self.consumed_samples >= 0
        together = self.micro_batch_size * self.data_size
        if self.micro_batch_size < 1 or self.global_batch_size < 1 or self.global_batch_size % together:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size}: it must be a multiple of --micro-batch-size "
                f"{self.micro_batch_size} times {self.data_size} data-parallel ranks"
            )
        ramp = self.ramp_up
        if ramp is not None and (ramp.start % together or ramp.increment % together):
            raise ValueError(
                f"--rampup-batch-size {ramp.start} {ramp.increment} {ramp.samples}: start and increment must be "
                f"multiples of --micro-batch-size {self.micro_batch_size} times {self.data_size} data-parallel ranks"
            )

    @property
    def schedule(self) -> BatchSchedule:
        """The size of each global batch."""
        return BatchSchedule(self.global_batch_size, self.ramp_up)

    def __len__(self) -> int:
        """Micro-batches that iterating gives."""
        batches = self.schedule.batches_until(self.total_samples, self.consumed_samples)
        samples = self.schedule.consumed_after(batches, self.consumed_samples) - self.consumed_samples
        return samples // (self.micro_batch_size * self.data_size)

    def __iter__(self) -> Iterator[list[int]]:
        mine = self.data_rank * self.micro_batch_size
        together = self.micro_batch_size * self.data_size
        schedule, batch = self.schedule, self.consumed_samples
        while (end := batch + schedule.size(batch)) <= self.total_samples:
            for start in range(batch + mine, end, together):
                yield list(range(start, start + self.micro_batch_size))
            batch = end
