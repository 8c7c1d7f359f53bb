"""Gradient buffers: flat, added to over micro-batches, each parameter once."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.optimizer.gradients import GradientBuffers, main_gradient
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


def test_micro_batches_add_up_to_autograd_on_all_at_once() -> None:
    model = Tied()
    twin = copy.deepcopy(model).double()
    buffers = GradientBuffers(model.parameters())
    ids = torch.arange(24).view(4, 6) % 11
    for part in ids.split(1):
        loss_of(model, part).backward()
    loss_of(twin, ids).backward()
    for (name, parameter), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert parameter.grad is None, name
        gradient = expected.grad if expected.grad is not None else torch.zeros_like(expected)
        assert_close(main_gradient(parameter), gradient, 2e-6, floor=1.0)
    assert torch.count_nonzero(main_gradient(model.unused.weight)) == 0
    buffers.zero()
    assert all(torch.count_nonzero(main_gradient(p)) == 0 for p in model.parameters())


def test_one_flat_buffer_holds_all_views_without_a_gap() -> None:
    model = Tied()
    buffers = GradientBuffers(model.parameters())
    (flat,) = buffers.flats
    parameters = list(model.parameters())
    assert flat.dim() == 1 and flat.is_contiguous()
    assert flat.numel() == sum(p.numel() for p in parameters) == 11 * 6 + 42 + 8
    begin = flat.data_ptr()
    for parameter in parameters:
        view = main_gradient(parameter)
        assert view.shape == parameter.shape and view.is_contiguous()
        assert view.data_ptr() == begin
        begin += view.numel() * view.element_size()


def test_a_buffer_for_each_dtype_and_none_for_frozen_parameters() -> None:
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(3, 3).double(), nn.Linear(4, 4), nn.Linear(5, 5)])
    layers[3].requires_grad_(False)
    buffers = GradientBuffers(layers.parameters())
    assert {(flat.dtype, flat.numel()) for flat in buffers.flats} == {(torch.float32, 26), (torch.float64, 12)}
    assert not hasattr(layers[3].weight, "main_grad")


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


def test_a_layer_may_add_to_main_grad_itself() -> None:
    weight = nn.Parameter(torch.randn(3, 4))
    GradientBuffers([weight])
    x = torch.randn(5, 4, requires_grad=True)
    AddsItself.apply(x, weight).sum().backward()
    AddsItself.apply(x, weight).sum().backward()
    assert weight.grad is None
    assert_close(main_gradient(weight), 2 * x.detach().sum(0).expand(3, 4), 1e-6)


@pytest.mark.parametrize("factor", [0.25, 1.0 / 3.0])
def test_scale(factor: float) -> None:
    weight = nn.Parameter(torch.randn(7))
    buffers = GradientBuffers([weight])
    (weight * torch.arange(7.0)).sum().backward()
    buffers.scale(factor)
    assert torch.equal(main_gradient(weight), torch.arange(7.0) * factor)
