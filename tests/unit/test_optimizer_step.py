"""One optimizer in one process: AdamW's arithmetic, clipping, decay groups, refusals, state for checkpoints."""

import copy
import gc
import math
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.base.complaints import ConfigError
from megatron.mpu.sharding import parameter_shardings
from megatron.optimizer import Optimizer, OptimizerConfig
from tests.harness.closeness import assert_close


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 4))


def make_optimizer(model: nn.Module, **constants: float) -> Optimizer:
    return Optimizer(model, parameter_shardings(model), OptimizerConfig(**constants))


def train(model: nn.Module, optimizer: Optimizer, steps: range, lr: float = 0.05) -> list[float]:
    """Gradient norms of some iterations; the data of an iteration depend on its number only."""
    norms = []
    for step in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=model[0].weight.dtype)
        optimizer.zero_grad()
        for part in x.split(4):
            model(part).square().sum().backward()
        optimizer.reduce_gradients(8.0)
        norms.append(optimizer.step(lr).grad_norm)
    return norms


def test_weights_and_norms_follow_the_formulas() -> None:
    """AdamW of arXiv:1711.05101 written out in NumPy float64, gradients clipped by their norm."""
    model = make_model().double()
    constants = {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-6, "clip_grad": 0.5}
    optimizer = make_optimizer(model, **constants)
    twin = copy.deepcopy(model)
    weights = [p.detach().numpy() for p in twin.parameters()]
    first, second = [np.zeros_like(w) for w in weights], [np.zeros_like(w) for w in weights]
    for step in range(1, 6):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        gradients = [g.numpy() / 8 for g in torch.autograd.grad(twin(x).square().sum(), list(twin.parameters()))]
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
        assert norm > 0.5
        for w, g, m, v in zip(weights, gradients, first, second, strict=True):
            g = g * (0.5 / (norm + 1e-6))
            m[...] = 0.8 * m + 0.2 * g
            v[...] = 0.95 * v + 0.05 * g * g
            decay = 0.1 if w.ndim > 1 else 0.0
            w -= 0.05 * (decay * w + m / (1 - 0.8**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-6))
        assert train(model, optimizer, range(step, step + 1)) == pytest.approx([norm], rel=1e-12)
        assert_close(list(model.parameters()), weights, 1e-12)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_follows_the_plain_optimizers_of_pytorch(kind: str) -> None:
    model = make_model().double()
    config = OptimizerConfig(optimizer=kind, weight_decay=0.1, sgd_momentum=0.8, clip_grad=0.5, ddp_bucket_size=30)
    optimizer = Optimizer(model, parameter_shardings(model), config)
    twin = copy.deepcopy(model)
    groups = [
        {"params": [p for p in twin.parameters() if (p.dim() > 1) == matrix], "weight_decay": 0.1 if matrix else 0.0}
        for matrix in (True, False)
    ]
    plain: torch.optim.Optimizer
    if kind == "adam":
        plain = torch.optim.AdamW(groups, lr=0.05, foreach=False, fused=False)
    else:
        plain = torch.optim.SGD(groups, lr=0.05, momentum=0.8, foreach=False, fused=False)
    for step in range(5):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        plain.zero_grad()
        (twin(x).square().sum() / 8).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5).item()
        plain.step()
        assert train(model, optimizer, range(step, step + 1)) == pytest.approx([norm], rel=1e-12)
    assert_close(list(model.parameters()), list(twin.parameters()), 1e-12)


def test_without_clipping_the_norm_is_still_reported() -> None:
    clipped, free = make_model(), make_model()
    norms = [
        train(clipped, make_optimizer(clipped, clip_grad=1e9), range(3)),
        train(free, make_optimizer(free, clip_grad=0.0), range(3)),
    ]
    assert norms[0] == norms[1] and min(norms[0]) > 0.1
    assert all(torch.equal(a, b) for a, b in zip(clipped.parameters(), free.parameters(), strict=True))


def test_clipping_scales_to_the_limit() -> None:
    model = make_model()
    optimizer = make_optimizer(model, clip_grad=0.01)
    (norm,) = train(model, optimizer, range(1))
    gradients = torch.cat([g.flatten().double() for g in optimizer.gradients().values()])
    assert norm > 0.01
    assert gradients.norm().item() == pytest.approx(0.01, rel=1e-4)


def test_what_is_dropped_is_freed() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    kept = weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert kept() is None


def test_only_matrices_are_decayed() -> None:
    model = make_model()
    before = copy.deepcopy(model)
    optimizer = make_optimizer(model, weight_decay=0.5)
    optimizer.step(0.1)  # no gradient at all: what moves is decay
    for (name, after), old in zip(model.named_parameters(), before.parameters(), strict=True):
        expected = old * (1 - 0.1 * 0.5) if old.dim() > 1 else old
        assert_close(after, expected, 1e-6)
        assert (old.dim() > 1) == name.endswith(("0.weight", "3.weight"))


def test_first_iteration_of_a_warmup_moves_no_weight() -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = make_optimizer(model)
    train(model, optimizer, range(1), lr=0.0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert optimizer.step_count == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    weights = copy.deepcopy(model.state_dict())
    moments = {name: tensor.clone() for name, (tensor, _) in optimizer.state_tensors().items()}
    optimizer.gradients()["3.bias"][1] = bad
    with pytest.raises(FloatingPointError, match=r"3\.bias"):
        optimizer.step(0.1)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(moments[name], tensor) for name, (tensor, _) in optimizer.state_tensors().items())
    assert optimizer.step_count == 2


@pytest.mark.parametrize("divisor", [0.0, -1.0, math.nan])
def test_a_batch_without_counted_tokens_is_refused(divisor: float) -> None:
    with pytest.raises(ValueError, match="no token"):
        make_optimizer(make_model()).reduce_gradients(divisor)


def test_state_exists_from_the_start_under_global_names() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    state = optimizer.state_tensors()
    names = [name for name, _ in model.named_parameters()]
    assert list(state) == [f"optimizer.{m}.{name}" for name in names for m in ("exp_avg", "exp_avg_sq")]
    for name, (tensor, sharding) in state.items():
        assert sharding.name == name and sharding.global_shape == tuple(tensor.shape)
        assert torch.count_nonzero(tensor) == 0
    train(model, optimizer, range(1))
    after = optimizer.state_tensors()
    assert all(
        torch.count_nonzero(tensor) and tensor.data_ptr() == state[name][0].data_ptr()
        for name, (tensor, _) in after.items()
    )


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_state_put_into_a_new_optimizer_continues_bit_for_bit(stop: int) -> None:
    whole = make_model()
    norms = train(whole, make_optimizer(whole), range(8))
    first = make_model()
    optimizer = make_optimizer(first)
    train(first, optimizer, range(stop))
    second = make_model()
    second.load_state_dict(first.state_dict())
    resumed = make_optimizer(second)
    for name, (tensor, _) in resumed.state_tensors().items():
        tensor.copy_(optimizer.state_tensors()[name][0])
    resumed.step_count = optimizer.step_count
    assert train(second, resumed, range(stop, 8)) == norms[stop:]
    assert resumed.step_count == 8
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_tied_parameters_have_one_state() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.output = nn.Linear(3, 5, bias=False)
            self.output.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.output(self.embedding(ids))

    model = Tied()
    optimizer = make_optimizer(model)
    assert list(optimizer.gradients()) == ["embedding.weight"]
    model(torch.arange(5)).square().sum().backward()
    twin = copy.deepcopy(model.embedding.weight.detach()).requires_grad_()
    (twin @ twin.t()).square().sum().backward()
    assert twin.grad is not None
    assert optimizer.gradient_norm() == pytest.approx(twin.grad.norm().item(), rel=1e-5)


def test_refuses_what_it_cannot_train() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        make_optimizer(make_model().requires_grad_(False))
    model = make_model()
    shardings = parameter_shardings(model)
    del shardings["1.bias"]
    with pytest.raises(ValueError, match=r"1\.bias"):
        Optimizer(model, shardings, OptimizerConfig())


def test_a_parameter_that_is_unfrozen_later_is_refused() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(1))
    model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"^parameters 0\.weight were frozen when the optimizer was made"):
        optimizer.zero_grad()


def test_frozen_parameters_stay() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    moved = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert moved == {"1.weight", "1.bias", "3.weight", "3.bias"} == set(optimizer.gradients())


@pytest.mark.parametrize(
    ("field", "value"),
    [("weight_decay", -0.1), ("adam_beta1", 1.0), ("adam_beta2", -0.1), ("adam_eps", -1.0), ("clip_grad", math.nan)],
)
def test_complaints(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} {value}"):
        OptimizerConfig(**{field: value})
