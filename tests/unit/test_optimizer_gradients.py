"""Gradient buckets in one process: flat, added to over micro-batches, each parameter once, unused ones named."""

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron import mpu
from megatron.optimizer import Optimizer, OptimizerConfig, main_gradient
from tests.harness.closeness import assert_close


class Tied(nn.Module):
    """A tied embedding and output, and a matrix that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 2)
        self.output = nn.Linear(6, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(torch.tanh(self.inner(self.embedding(ids))))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).view(-1, 11), ids.roll(1, -1).view(-1), reduction="sum")


def make_optimizer(model: nn.Module, **choices: Any) -> Optimizer:
    return Optimizer(model, mpu.parameter_shardings(model), OptimizerConfig(**choices))


@pytest.mark.parametrize("overlap", [False, True])
def test_micro_batches_add_up_to_autograd_on_all_at_once(overlap: bool) -> None:
    model = Tied()
    twin = copy.deepcopy(model).double()
    optimizer = make_optimizer(model, overlap_grad_reduce=overlap, ddp_bucket_size=20)
    ids = torch.arange(24).view(4, 6) % 11
    for _ in range(2):  # the second time begins from zero again
        optimizer.zero_grad()
        assert all(torch.count_nonzero(gradient) == 0 for gradient in optimizer.gradients().values())
        for number, part in enumerate(ids.split(1)):
            if number == 3:
                optimizer.last_micro_batch()
            loss_of(model, part).backward()
        optimizer.reduce_gradients(1.0)
    loss_of(twin, ids).backward()
    for (name, parameter), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert parameter.grad is None, name
        gradient = expected.grad if expected.grad is not None else torch.zeros_like(expected)
        assert_close(main_gradient(parameter), gradient, 2e-6, floor=1.0)
    assert torch.count_nonzero(main_gradient(model.unused.weight)) == 0


def storages(tensors: Any) -> dict[int, torch.UntypedStorage]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}


def test_parameters_and_gradients_are_views_of_flat_buffers() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).half()
    weights = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    model[0].weight.partition_dim = 0
    optimizer = make_optimizer(model)
    for name, parameter in model.named_parameters():
        same, values = weights[name]
        assert parameter is same and torch.equal(parameter, values) and parameter.is_contiguous()
        gradient = main_gradient(parameter)
        assert gradient.shape == parameter.shape and gradient.is_contiguous()
        assert gradient.storage_offset() == parameter.storage_offset() and parameter.storage_offset() % 64 == 0
    assert model[0].weight.partition_dim == 0
    assert len(storages(model.parameters())) == len(storages(optimizer.gradients().values())) == 1


def test_buckets_by_dtype_and_size_and_none_for_frozen_parameters() -> None:
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(3, 3).double(), nn.Linear(4, 4), nn.Linear(5, 5)])
    layers[3].requires_grad_(False)
    make_optimizer(layers, ddp_bucket_size=17)
    assert not hasattr(layers[3].weight, "main_grad")
    assert {main_gradient(p).dtype for p in layers[1].parameters()} == {torch.float64}
    # In the order of backward: the last layer fills a bucket, the first begins another of its dtype.
    found = [len(storages(layer.parameters())) for layer in layers]
    assert found[:3] == [1, 1, 1] and len(storages(layers[:3].parameters())) == 3


class AddsItself(torch.autograd.Function):
    """A product whose weight gradient goes straight into `main_grad`, as a fused layer does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        main_gradient(weight).add_(gradient.t() @ x)
        return gradient @ weight, None


def test_a_layer_may_add_to_main_grad_itself(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = make_optimizer(model, overlap_grad_reduce=True)
    x = torch.randn(5, 4, requires_grad=True)
    AddsItself.apply(x, model.weight).sum().backward()
    optimizer.last_micro_batch()
    AddsItself.apply(x, model.weight).sum().backward()
    optimizer.reduce_gradients(1.0)
    assert model.weight.grad is None
    assert_close(main_gradient(model.weight), 2 * x.detach().sum(0).expand(3, 4), 1e-6)
    assert caplog.records == []  # it counts as having a gradient


def test_unused_parameters_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Tied()
    optimizer = make_optimizer(model, overlap_grad_reduce=True)
    with caplog.at_level(logging.WARNING, "megatron"):
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.last_micro_batch()
            loss_of(model, torch.arange(6).view(1, 6)).backward()
            optimizer.reduce_gradients(1.0)
    (record,) = caplog.records
    message = record.getMessage()
    assert "unused.weight" in message and "unused.bias" in message and "inner" not in message


@pytest.mark.parametrize("again", ["inner", "unused"])
def test_a_second_backward_after_the_last_one_is_refused(again: str) -> None:
    model = Tied()
    optimizer = make_optimizer(model, overlap_grad_reduce=True)
    optimizer.last_micro_batch()
    loss_of(model, torch.arange(6).view(1, 6)).backward()
    with pytest.raises(RuntimeError, match=rf"{again}\.bias .*last_micro_batch"):
        model.get_submodule(again).bias.sum().backward()


def test_reentrant_checkpoints_are_refused_with_a_reason() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = make_optimizer(model, overlap_grad_reduce=True, ddp_bucket_size=1)
    for reentrant in (False, True):
        optimizer.zero_grad()
        optimizer.last_micro_batch()
        x = torch.ones(1, 2, requires_grad=True)
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        if not reentrant:
            x.sum().backward()
            optimizer.reduce_gradients(1.0)
            continue
        with pytest.raises(RuntimeError, match=r"0\.bias has .* checkpoint activations with use_reentrant=False"):
            x.sum().backward()


def test_a_pass_that_is_announced_after_the_last_one_is_refused() -> None:
    model = Tied()
    optimizer = make_optimizer(model, overlap_grad_reduce=True)
    optimizer.last_micro_batch()
    loss_of(model, torch.arange(6).view(1, 6)).backward()
    with pytest.raises(RuntimeError, match="has begun"):
        optimizer.last_micro_batch()
    optimizer.reduce_gradients(1.0)
    optimizer.zero_grad()
    optimizer.last_micro_batch()


def test_parameters_that_share_a_bucket_have_their_last_pass_together() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = make_optimizer(model, overlap_grad_reduce=True)
    with pytest.raises(ValueError, match=r"0\.bias is said .* without 1\.bias"):
        optimizer.last_micro_batch(["0.weight", "0.bias", "another chunk's"])
    shardings = mpu.parameter_shardings(model)
    with pytest.raises(ValueError, match=r"which part of the model 1\.bias belong"):
        Optimizer(model, shardings, OptimizerConfig(), parts={"0.weight": 0, "0.bias": 0, "1.weight": 1})
    parts = {name: int(name[0]) for name in shardings}
    optimizer = Optimizer(model, shardings, OptimizerConfig(overlap_grad_reduce=True), parts=parts)
    optimizer.last_micro_batch(["0.weight", "0.bias"])


def test_a_parameter_that_was_moved_away_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = make_optimizer(model)
    model.load_state_dict(copy.deepcopy(model.state_dict()))  # copies into the buffers
    optimizer.zero_grad()
    model.double()
    with pytest.raises(ValueError, match=r"parameter 1\.bias was given other memory"):
        optimizer.zero_grad()
