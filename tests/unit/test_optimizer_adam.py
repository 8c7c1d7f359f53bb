"""The updaters against PyTorch's own plain optimizers, with and without a package that stands for NVIDIA's apex."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.base.complaints import ConfigError
from megatron.optimizer import adam
from megatron.optimizer.adam import Updater, make_updater, trial_problem
from megatron.optimizer.config import OptimizerConfig
from tests.harness.closeness import assert_close

SHAPES = [(130,), (5, 7), (64,)]  # the first two are decayed
CONFIGS = {
    "adam": OptimizerConfig(weight_decay=0.1, adam_beta2=0.95, adam_eps=1e-6),
    "sgd": OptimizerConfig(optimizer="sgd", weight_decay=0.1, sgd_momentum=0.8),
    "plain sgd": OptimizerConfig(optimizer="sgd", weight_decay=0.1, sgd_momentum=0.0),
}


def draws(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in SHAPES]


def groups(tensors: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": tensors[:2], "weight_decay": 0.1}, {"params": tensors[2:], "weight_decay": 0.0}]


def plain(name: str, tensors: list[Tensor]) -> torch.optim.Optimizer:
    """PyTorch's loop over single tensors."""
    if name == "adam":
        return torch.optim.AdamW(groups(tensors), betas=(0.9, 0.95), eps=1e-6, foreach=False, fused=False)
    momentum = 0.8 if name == "sgd" else 0.0
    return torch.optim.SGD(groups(tensors), momentum=momentum, foreach=False, fused=False)


def plain_steps(name: str, steps: int) -> list[Tensor]:
    tensors = draws(0)
    optimizer = plain(name, tensors)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        for tensor, gradient in zip(tensors, draws(step + 1), strict=True):
            tensor.grad = gradient
        optimizer.step()
    return [tensor.detach() for tensor in tensors]


def steps_of(updater: Updater, steps: range, dtype: torch.dtype) -> None:
    for step in steps:
        updater.step(0.1 / (step + 1), draws(step + 1, dtype))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=str)
def test_steps_are_those_of_pytorch(name: str, dtype: torch.dtype, tolerance: float) -> None:
    tensors = draws(0, dtype)
    steps_of(make_updater(tensors[:2], tensors[2:], CONFIGS[name]), range(5), dtype)
    for ours, reference in zip(tensors, plain_steps(name, 5), strict=True):
        assert_close(ours.double(), reference, tolerance)
        assert ours.grad is None


@pytest.mark.parametrize(
    ("name", "kept"), [("adam", ["exp_avg", "exp_avg_sq"]), ("sgd", ["momentum_buffer"]), ("plain sgd", [])]
)
def test_state_is_there_from_the_start_and_goes_on_exactly(name: str, kept: list[str]) -> None:
    tensors = draws(0)
    updater = make_updater(tensors[:2], tensors[2:], CONFIGS[name])
    assert list(updater.state) == kept
    for state in updater.state.values():
        assert [(tuple(s.shape), s.dtype, int(s.count_nonzero())) for s in state] == [
            (shape, torch.float64, 0) for shape in SHAPES
        ]
    steps_of(updater, range(3), torch.float64)
    copies = [tensor.clone() for tensor in tensors]
    other = make_updater(copies[:2], copies[2:], CONFIGS[name])
    for state_name, state in updater.state.items():
        for mine, theirs in zip(other.state[state_name], state, strict=True):
            assert theirs.count_nonzero() > 0
            mine.copy_(theirs)
    other.set_step_count(3)
    steps_of(updater, range(3, 5), torch.float64)
    steps_of(other, range(3, 5), torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tensor_cut_at_multiples_of_64_moves_bit_for_bit_like_the_whole(name: str) -> None:
    """What makes the sharded optimizer equal to the plain one."""
    draw = torch.Generator().manual_seed(3)
    whole, gradient = torch.randn(2, 1000, generator=draw).unbind()
    cut = whole.clone()
    by_whole, by_parts = (make_updater(t, [], CONFIGS[name]) for t in ([whole], cut.split([64, 704, 232])))
    for step in range(4):
        by_whole.step(0.01, [gradient * step])
        by_parts.step(0.01, (gradient * step).split([64, 704, 232]))
    assert torch.equal(whole, cut)


def test_only_not_decayed_and_nothing_at_all() -> None:
    still, config = torch.ones(3), OptimizerConfig(weight_decay=0.5)
    make_updater([], [still], config).step(0.1, [torch.zeros(3)])
    assert still.tolist() == [1.0] * 3
    nothing = make_updater([], [], config)
    nothing.set_step_count(4)
    nothing.step(0.1, [])
    assert nothing.state == {"exp_avg": [], "exp_avg_sq": []}


# --- apex -------------------------------------------------------------------------------------------------------------


class FusedAdam(torch.optim.Optimizer):
    """What apex's class does by its documentation, written out: a step count for each group, decay by `adam_w_mode`."""

    made = 0

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode
        type(self).made += 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = t = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                m, v = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                decay = group["weight_decay"] * p
                gradient = p.grad if self.adam_w_mode else p.grad + decay
                m.mul_(beta1).add_(gradient, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                update = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
                p.sub_(group["lr"] * (update + decay if self.adam_w_mode else update))


class FormerAdam(FusedAdam):
    """Knows only the decay that is added to the gradient."""

    def __init__(self, params: Any, lr: float, adam_w_mode: bool) -> None:
        super().__init__(params, lr, adam_w_mode=False)


class StillAdam(FusedAdam):
    def step(self, closure: Any = None) -> Any:
        pass


@pytest.fixture
def no_cache() -> Iterator[None]:
    adam._fused_adam.cache_clear()
    yield
    adam._fused_adam.cache_clear()


def test_steps_of_apex_are_those_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "_fused_adam", lambda device: FusedAdam)
    FusedAdam.made = 0
    tensors = draws(0, torch.float32)
    updater = make_updater(tensors[:2], tensors[2:], CONFIGS["adam"])
    steps_of(updater, range(2), torch.float32)
    copies = [tensor.clone() for tensor in tensors]
    resumed = make_updater(copies[:2], copies[2:], CONFIGS["adam"])
    for name, state in updater.state.items():
        for mine, theirs in zip(resumed.state[name], state, strict=True):
            mine.copy_(theirs)
    resumed.set_step_count(2)
    steps_of(updater, range(2, 5), torch.float32)
    steps_of(resumed, range(2, 5), torch.float32)
    assert FusedAdam.made == 2
    for ours, again, reference in zip(tensors, copies, plain_steps("adam", 5), strict=True):
        assert torch.equal(ours, again)
        assert_close(ours.double(), reference, 1e-5)


def test_apex_takes_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "_fused_adam", lambda device: FusedAdam)
    FusedAdam.made = 0
    make_updater(draws(0), [], CONFIGS["adam"])
    assert FusedAdam.made == 0


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (FormerAdam, "a step of it went to 2.125 and not to 1.875"),
        (StillAdam, "a step of it went to 2.0 and not to 1.875"),
    ],
)
def test_an_apex_that_does_not_work_is_found_out(found: type[FusedAdam], reason: str) -> None:
    assert trial_problem(found, torch.device("cpu")) == reason
    assert trial_problem(FusedAdam, torch.device("cpu")) is None


@pytest.mark.usefixtures("no_cache")
def test_apex_is_tried_once_on_each_accelerator_and_not_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(module: str, name: str, problem_of: Any) -> type[FusedAdam]:
        asked.append((module, name, problem_of(FormerAdam)))
        return FusedAdam

    monkeypatch.setattr(adam, "load_from_apex", load)
    monkeypatch.setattr(adam, "trial_problem", lambda found, device: f"{found.__name__} on {device}")
    assert adam._fused_adam(torch.device("cpu")) is None
    assert [adam._fused_adam(torch.device("xpu")) for _ in range(3)] == [FusedAdam] * 3
    assert asked == [("optimizers", "FusedAdam", "FormerAdam on xpu")]


def test_the_unrelated_apex_stops_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.base.apex.apex_kind", lambda: "unrelated")
    with pytest.raises(ConfigError, match="pip uninstall apex"):
        make_updater([torch.ones(1)], [], OptimizerConfig())
    (problem,) = OptimizerConfig().input_problems()
    assert "pip uninstall apex" in problem
