"""What the benchmark measures is what it says: the set that it makes up, the indices, the samples fetched."""

from pathlib import Path

import pytest

from megatron.data import GPTDataset, IndexedDataset
from megatron.data.benchmark import measure_fetching, measure_indices, write_sparse_set


def test_indices_of_a_small_set(tmp_path: Path) -> None:
    figures = measure_indices(tmp_path, 2000, epochs=2, seq_length=64)
    indexed = IndexedDataset(tmp_path / "benchmark")
    assert len(indexed) == 2000
    assert figures.epochs == 2
    assert figures.samples == (2 * int(indexed.sizes.sum()) - 1) // 64
    assert 0 < figures.open_seconds < 60
    assert 0 < figures.build_seconds < 60
    assert 0.01 < figures.peak_gib < 4


@pytest.mark.slow
def test_ten_million_documents(tmp_path: Path) -> None:
    """The bounds that are promised, with room for a machine that does other things besides."""
    figures = measure_indices(tmp_path, 10_000_000)
    assert figures.epochs == 3
    assert figures.peak_gib < 2
    assert figures.build_seconds < 40
    assert figures.open_seconds < 0.8


def test_samples_are_fetched_fast(tmp_path: Path) -> None:
    write_sparse_set(tmp_path / "x", 5000)
    indexed = IndexedDataset(tmp_path / "x")
    dataset = GPTDataset(indexed, range(5000), None, 1024, seed=1, reset_position_ids=True, reset_attention_mask=True)
    assert measure_fetching(dataset, 300) > 300_000
