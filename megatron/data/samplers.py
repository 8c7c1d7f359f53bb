"""Which samples a data-parallel rank loads next."""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class GlobalBatchSampler:
    """Consecutive samples, dealt to the data-parallel ranks a micro-batch at a time.

    A global batch is the next `global_batch_size` samples after those consumed. Its micro-batch j is the next
    `micro_batch_size * data_size` of them, of which rank r takes the r-th run of `micro_batch_size`. So which samples a
    global batch holds depends neither on the number of ranks nor on the micro-batch size. Iterating gives the
    lists of sample numbers [b] of one rank, whole global batches only, from `consumed_samples` (any number) to the end
    of the samples; there is nothing left to give when fewer than a global batch remain.

    Raises ValueError where the sizes do not divide.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    global_batch_size: int
    data_rank: int = 0
    data_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.data_rank < self.data_size and self.consumed_samples >= 0
        together = self.micro_batch_size * self.data_size
        if self.micro_batch_size < 1 or self.global_batch_size < 1 or self.global_batch_size % together:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size}: it must be a multiple of --micro-batch-size "
                f"{self.micro_batch_size} times {self.data_size} data-parallel ranks"
            )

    def __len__(self) -> int:
        """Micro-batches that iterating gives."""
        batches = max(self.total_samples - self.consumed_samples, 0) // self.global_batch_size
        return batches * (self.global_batch_size // (self.micro_batch_size * self.data_size))

    def __iter__(self) -> Iterator[list[int]]:
        mine = self.data_rank * self.micro_batch_size
        together = self.micro_batch_size * self.data_size
        for batch in range(
            self.consumed_samples, self.total_samples - self.global_batch_size + 1, self.global_batch_size
        ):
            for start in range(batch + mine, batch + self.global_batch_size, together):
                yield list(range(start, start + self.micro_batch_size))
