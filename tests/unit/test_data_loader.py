"""The loader: batches of tensors in the sampler's order, and no draw from the default generator."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed import IndexedDataset
from megatron.data.loader import build_loader
from megatron.data.samplers import GlobalBatchSampler
from megatron.training.pipeline import to_device
from tests.harness.token_files import write_token_files


@pytest.fixture
def dataset(tmp_path: Path) -> GPTDataset:
    documents = [[[(7 * i + j) % 50 for j in range(20)]] for i in range(30)]
    return GPTDataset(IndexedDataset(write_token_files(tmp_path / "x", documents)), range(30), None, 8, seed=1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_come_in_order_and_the_default_generator_is_left_alone(dataset: GPTDataset, num_workers: int) -> None:
    sampler = GlobalBatchSampler(40, 8, micro_batch_size=2, global_batch_size=4, data_rank=1, data_size=2)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    batches = list(build_loader(dataset, sampler, num_workers, seed=5))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(batches) == len(sampler) == 8
    for batch, numbers in zip(batches, sampler, strict=True):
        assert list(batch) == ["tokens", "labels", "loss_mask"]
        assert [batch[name].dtype for name in batch] == [torch.int64, torch.int64, torch.float32]
        for name in batch:
            expected = torch.stack([torch.from_numpy(dataset[number][name]) for number in numbers])
            assert torch.equal(batch[name], expected)


def test_workers_go_on_when_sigterm_comes_to_all(dataset: GPTDataset) -> None:
    """As a container's end sends it, or a kill by name; after the last batch they are gone all the same."""
    others = multiprocessing.active_children()
    loader = build_loader(dataset, GlobalBatchSampler(40, 0, 2, 2), 2, seed=5)
    batches = iter(loader)
    first = [next(batches) for _ in range(2)]  # one of each worker
    workers = [child for child in multiprocessing.active_children() if child not in others]
    for worker in workers:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGTERM)
    assert len([*first, *batches]) == len(loader) == 20
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_a_batch_owns_its_tensors(dataset: GPTDataset) -> None:
    loader = build_loader(dataset, GlobalBatchSampler(8, 0, 2, 2), 0, seed=5)
    expected = [batch["tokens"].clone() for batch in loader]
    for batch in loader:
        batch["tokens"].fill_(-1)
        batch["loss_mask"].fill_(0)
    assert all(torch.equal(batch["tokens"], tokens) for batch, tokens in zip(loader, expected, strict=True))


def test_memory_is_pinned_where_it_is_asked_for(dataset: GPTDataset) -> None:
    sampler = GlobalBatchSampler(8, 0, 2, 2)
    assert build_loader(dataset, sampler, 2, seed=5, pin_memory=True).pin_memory
    assert not build_loader(dataset, sampler, 0, seed=5).pin_memory
    assert build_loader(dataset, sampler, 2, seed=5).prefetch_factor == 2


def test_lengths_of_documents_stay_on_the_host(dataset: GPTDataset) -> None:
    divided = GPTDataset(dataset.indexed, range(30), None, 8, seed=1, reset_attention_mask=True)
    (batch,) = build_loader(divided, GlobalBatchSampler(4, 0, 4, 4), 0, seed=5)
    moved = to_device(batch, torch.device("meta"))
    assert {name: tensor.device.type for name, tensor in moved.items()} == {
        "tokens": "meta",
        "labels": "meta",
        "loss_mask": "meta",
        "document_lengths": "cpu",
    }
