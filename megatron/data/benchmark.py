"""How fast sample indices are made, a large set is opened and samples are fetched: measurements for a benchmark.

Sets are made up here: documents of 1 to 999 tokens, of zeros in a sparse file, so that ten million take little disk.
"""

import dataclasses
import multiprocessing
import resource
import time
from pathlib import Path

import numpy as np

from megatron.data.config import DataConfig
from megatron.data.gpt_build import build_gpt_datasets
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_format import MAGIC, VERSION, Header, data_path, dtype_code, index_path

SEED = 1234


@dataclasses.dataclass(frozen=True)
class IndexFigures:
    """Seconds to make the indices of a set and to open the set with them, and the most memory held, in GiB."""

    build_seconds: float
    open_seconds: float
    peak_gib: float
    samples: int
    epochs: int


def write_sparse_set(prefix: Path, documents: int) -> int:
    """A set of `documents` documents whose tokens take no space on disk; returns how many tokens they have."""
    sizes = np.random.default_rng(SEED).integers(1, 1000, documents).astype("<i4")
    ends = np.cumsum(sizes, dtype="<i8") * 2
    with open(index_path(prefix), "wb") as index:
        index.write(Header(MAGIC, VERSION, dtype_code(np.dtype("<u2")), documents, documents + 1).pack())
        index.write(sizes.data)
        index.write((ends - 2 * sizes).data)
        index.write(np.arange(documents + 1, dtype="<i8").data)
    with open(data_path(prefix), "wb") as data:
        data.truncate(int(ends[-1]))
    return int(ends[-1]) // 2


def measure_indices(folder: Path, documents: int, epochs: int = 3, seq_length: int = 1024) -> IndexFigures:
    """Make the indices of a new set in `folder` in a process of its own, then open it in another."""
    tokens = write_sparse_set(folder / "benchmark", documents)
    samples = (epochs * tokens - 1) // seq_length
    config = DataConfig(
        data_path=(str(folder / "benchmark"),),
        split="1,0,0",
        seq_length=seq_length,
        data_cache_path=str(folder / "index_cache"),
    )
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        built = pool.apply(_open, (config, samples))
        opened = pool.apply(_open, (config, samples))
    return IndexFigures(built[0], opened[0], built[1], samples, built[2])


def _open(config: DataConfig, samples: int) -> tuple[float, float, int]:
    began = time.perf_counter()
    train = build_gpt_datasets(config, num_samples=(samples, 0, 0), seed=SEED, eod_id=None)[0]
    seconds = time.perf_counter() - began
    assert isinstance(train, GPTDataset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    return seconds, peak, train.indices.epochs


def measure_fetching(dataset: GPTDataset, samples: int) -> float:
    """Tokens a second of one process that fetches `samples` samples in the shuffled order, from a warm page cache."""
    numbers = [i % len(dataset) for i in range(samples)]
    for number in numbers:
        dataset[number]
    began = time.perf_counter()
    for number in numbers:
        dataset[number]
    return samples * dataset.seq_length / (time.perf_counter() - began)
