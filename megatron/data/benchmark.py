"""How fast sample indices are made, a large set is opened and samples are fetched: measurements for a benchmark.

Sets are made up here, of documents of 1 to 999 tokens. For indices, which do not look at tokens, these are zeros in a
sparse file, so that ten million documents take little disk; for fetching they are random, in a real file.
"""

import dataclasses
import multiprocessing
import re
import resource
import time
from pathlib import Path

import numpy as np

from megatron.data.config import DataConfig
from megatron.data.gpt_build import build_gpt_datasets
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed import IndexedDataset, IndexedWriter
from megatron.data.indexed_format import MAGIC, VERSION, Header, data_path, dtype_code, index_path

SEED = 1234
_TOGETHER = 1 << 14  # documents written at once


@dataclasses.dataclass(frozen=True)
class IndexFigures:
    """Seconds to make the indices of a set and to open the set with them, and the most memory held, in GiB."""

    build_seconds: float
    open_seconds: float
    peak_gib: float
    samples: int
    epochs: int


def document_sizes(documents: int) -> np.ndarray:
    """Tokens in each document: int32 [documents]."""
    return np.random.default_rng(SEED).integers(1, 1000, documents).astype("<i4")


def write_sparse_set(prefix: Path, documents: int) -> int:
    """A set of `documents` documents whose tokens take no space on disk; returns how many tokens they have."""
    sizes = document_sizes(documents)
    ends = np.cumsum(sizes, dtype="<i8") * 2
    with open(index_path(prefix), "wb") as index:
        index.write(Header(MAGIC, VERSION, dtype_code(np.dtype("<u2")), documents, documents + 1).pack())
        index.write(sizes.data)
        index.write((ends - 2 * sizes).data)
        index.write(np.arange(documents + 1, dtype="<i8").data)
    with open(data_path(prefix), "wb") as data:
        data.truncate(int(ends[-1]))
    return int(ends[-1]) // 2


def write_random_set(prefix: Path, documents: int) -> None:
    """A set of `documents` documents of random tokens of 16 bits, about 1 KB each, every byte of it on disk."""
    sizes, random = document_sizes(documents), np.random.default_rng(SEED)
    with IndexedWriter(prefix, np.uint16) as writer:
        for start in range(0, documents, _TOGETHER):
            part = sizes[start : start + _TOGETHER]
            writer.add_documents(random.integers(0, 2**16, part.sum(), np.uint16), part)


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
    return seconds, _peak_gib(), train.indices.epochs


def _peak_gib() -> float:
    """The most memory that this program has held.

    `ru_maxrss` would count what the process held before it became this program, which is all that its parent held.
    """
    status = Path("/proc/self/status")
    kib = re.search(r"VmHWM:\s+(\d+) kB", status.read_text() if status.exists() else "")
    return (int(kib[1]) if kib else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 2**20


def measure_fetching(folder: Path, documents: int, samples: int, seq_length: int = 1024) -> float:
    """Tokens a second of one process that fetches `samples` samples in the shuffled order, from a warm page cache.

    They come from a new set of random tokens in `folder`, documents told apart, which is read once before.
    """
    prefix = folder / "fetched"
    write_random_set(prefix, documents)
    indexed = IndexedDataset(prefix)
    dataset = GPTDataset(
        indexed, np.arange(documents), None, seq_length, SEED, reset_position_ids=True, reset_attention_mask=True
    )
    indexed.max_token_id()  # reads every byte, which warms the page cache and the map
    began = time.perf_counter()
    for number in range(samples):
        dataset[number % len(dataset)]
    return samples * seq_length / (time.perf_counter() - began)
