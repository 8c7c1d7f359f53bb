"""From samples to batches of tensors: a DataLoader that never touches the default random generator.

torch is imported where it is used: tools that only read and write token files start without it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader


class ArrayDataset(Protocol):
    """Samples by number, each a dict of arrays of equal shapes."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> dict[str, np.ndarray]: ...


def stack_samples(samples: Sequence[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """One tensor [b, ...] for each name, which owns its memory."""
    import torch

    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}


def build_loader(
    dataset: ArrayDataset, sampler: Iterable[list[int]], num_workers: int, seed: int, *, pin_memory: bool = False
) -> DataLoader[dict[str, torch.Tensor]]:
    """A loader that gives one batch for each list of sample numbers from `sampler`, in its order.

    A DataLoader draws the seed of its workers from a generator as soon as it is iterated. Here that is one of its own,
    made from `seed`: on a CPU dropout draws from the default generator, and a resumed run iterates a loader once more
    than the uninterrupted one. Each of `num_workers` processes has two batches ready; with `pin_memory` the tensors lie
    in memory that is copied to an accelerator without waiting. Workers are not in the process group of their parent,
    and ignore SIGTERM.
    """
    import torch
    from torch.utils.data import DataLoader

    source: Any = dataset
    return DataLoader(
        source,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=stack_samples,
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=_outlive_sigterm,
    )


def _outlive_sigterm(worker: int) -> None:
    """SIGTERM comes to a rank's whole group or container; the rank goes on to where it can save, with its workers.

    They end when the loader asks them to, and some seconds after a parent that is gone.
    """
    os.setpgid(0, 0)  # Ctrl-C is for the rank alone
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
