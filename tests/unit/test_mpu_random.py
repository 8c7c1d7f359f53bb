"""Random streams: forks, states that go round exactly, seeds; recomputation that draws the same again."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from megatron import mpu

TRACKER = mpu.get_rng_tracker()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    TRACKER.reset()
    torch.manual_seed(1)
    yield
    TRACKER.reset()


def draw() -> list[float]:
    return torch.rand(3).tolist()


def draw_from(name: str) -> list[float]:
    with TRACKER.fork(name):
        return draw()


def test_a_fork_draws_from_its_stream_and_from_nothing_else() -> None:
    outside = [draw(), draw()]
    alone = [torch.rand(3, generator=torch.Generator().manual_seed(7)).tolist()]
    torch.manual_seed(1)
    TRACKER.add("mine", 7)
    assert draw() == outside[0]
    assert draw_from("mine") == alone[0]
    assert draw() == outside[1]
    assert draw_from("mine") != alone[0]  # it goes on where it was


def test_forks_inside_each_other() -> None:
    TRACKER.add("a", 1)
    TRACKER.add("b", 2)
    expected = {name: [draw_from(name), draw_from(name), draw_from(name)] for name in "ab"}
    TRACKER.reset()
    TRACKER.add("a", 1)
    TRACKER.add("b", 2)
    with TRACKER.fork("a"):
        first = draw()
        assert draw_from("b") == expected["b"][0]
        assert draw_from("a") == expected["a"][1]  # a fork of itself goes on
        third = draw()
    assert [first, third] == [expected["a"][0], expected["a"][2]]


def test_a_stream_forked_to_again_further_in_goes_on() -> None:
    TRACKER.add("a", 1)
    TRACKER.add("b", 2)
    alone = {name: torch.rand(12, generator=torch.Generator().manual_seed(seed)) for name, seed in (("a", 1), ("b", 2))}
    outside = torch.rand(3, generator=torch.Generator().manual_seed(1)).tolist()
    drawn: dict[str, list[float]] = {"a": [], "b": []}
    with TRACKER.fork("a"):
        drawn["a"] += draw()
        with TRACKER.fork("b"):
            drawn["b"] += draw()
            drawn["a"] += draw_from("a")
            drawn["b"] += draw()
            drawn["a"] += draw_from("a")
        drawn["a"] += draw()
    drawn["b"] += draw_from("b")
    assert drawn["a"] == alone["a"].tolist()
    assert drawn["b"] == alone["b"][:9].tolist()
    assert draw() == outside


def test_states_set_inside_a_fork_count() -> None:
    TRACKER.add("a", 1)
    TRACKER.add("b", 2)
    states = TRACKER.get_states()
    first = {name: draw_from(name) for name in "ab"}
    with TRACKER.fork("b"), TRACKER.fork("a"):
        draw()
        TRACKER.set_states(states)
        assert draw() == first["a"]
        here = TRACKER.get_states()
        second = draw()
        TRACKER.set_states(here)
        assert draw() == second
    third = draw_from("a")
    assert draw_from("b") == first["b"]
    TRACKER.set_states(states)
    assert [draw_from("a"), draw_from("a"), draw_from("a")] == [first["a"], second, third]
    with TRACKER.fork("a"):
        TRACKER.reset()
        TRACKER.add("a", 1)
        assert draw() == first["a"]


def test_what_needs_the_default_generators_is_refused_inside_a_fork() -> None:
    mpu.model_parallel_manual_seed(1)
    state = mpu.rng_state()
    for call in (mpu.rng_state, lambda: mpu.set_rng_state(state), lambda: mpu.model_parallel_manual_seed(2)):
        with TRACKER.fork(), pytest.raises(RuntimeError, match="inside a fork of random stream 'model-parallel-rng'"):
            call()
    again = mpu.rng_state()
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_an_error_inside_a_fork_leaves_the_streams_right() -> None:
    TRACKER.add("mine", 7)
    outside = torch.get_rng_state()
    first: list[float] = []

    def fail() -> None:
        with TRACKER.fork("mine"):
            first.extend(draw())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(torch.get_rng_state(), outside)
    assert draw_from("mine") != first


def test_unknown_and_double_names() -> None:
    with pytest.raises(ValueError, match="'mine': the streams are none yet"):
        draw_from("mine")
    mpu.model_parallel_manual_seed(1)
    with pytest.raises(ValueError, match="'mine': the streams are model-parallel-rng, parameter-init-rng"):
        draw_from("mine")
    with pytest.raises(ValueError, match="exists already"):
        TRACKER.add("model-parallel-rng", 5)


def test_before_seeding_the_default_stream_is_the_default_generator() -> None:
    expected = [draw(), draw()]
    torch.manual_seed(1)
    with TRACKER.fork():
        assert draw() == expected[0]
    assert draw() == expected[1]


def test_states_go_round_exactly() -> None:
    mpu.model_parallel_manual_seed(3)
    draw_from("model-parallel-rng")
    draw()
    state = mpu.rng_state()
    assert set(state) >= {"cpu", "stream:model-parallel-rng", "stream:parameter-init-rng"}
    assert all(x.dtype == torch.uint8 for x in state.values())
    kept = {name: x.clone() for name, x in state.items()}
    expected = [draw(), draw_from("model-parallel-rng"), draw_from("parameter-init-rng")]
    assert all(torch.equal(state[name], kept[name]) for name in kept), "a state changed after it was taken"
    mpu.model_parallel_manual_seed(4)
    mpu.set_rng_state(state)
    assert [draw(), draw_from("model-parallel-rng"), draw_from("parameter-init-rng")] == expected
    mpu.set_rng_state(state)
    again = mpu.rng_state()
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_tracker_states_go_round() -> None:
    mpu.model_parallel_manual_seed(3)
    states = TRACKER.get_states()
    assert "model-parallel-rng" in states
    first = draw_from("model-parallel-rng")
    TRACKER.set_states(states)
    assert draw_from("model-parallel-rng") == first


def test_a_cuda_state_waits_for_cuda() -> None:
    """States of a device that is not in use here survive forks, and are said not to be restored."""
    mpu.model_parallel_manual_seed(3)
    states = mpu.rng_state()
    foreign = torch.arange(16, dtype=torch.uint8)
    states |= {"cuda": foreign, "stream:model-parallel-rng@cuda": foreign}
    if torch.cuda.is_available():
        pytest.skip("this is about machines without CUDA")
    with pytest.warns(UserWarning, match="not restored: there is no CUDA"):
        mpu.set_rng_state(states)
    draw_from("model-parallel-rng")
    assert torch.equal(mpu.rng_state()["stream:model-parallel-rng@cuda"], foreign)


def test_states_that_are_none() -> None:
    with pytest.raises(ValueError, match="accepted are cpu"):
        mpu.set_rng_state({"cpu": torch.get_rng_state(), "gpu": torch.get_rng_state()})
    with pytest.raises(ValueError, match="accepted are cpu"):
        mpu.set_rng_state({})
    with pytest.raises(ValueError, match="no CPU state"):
        TRACKER.set_states({"mine@cuda": torch.get_rng_state()})


def test_seeds() -> None:
    assert mpu.derive_seed(1, "init") == mpu.derive_seed(1, "init")
    seeds = {mpu.derive_seed(*parts) for parts in ((1, "init"), (2, "init"), (1, 2), (12,), ("1", 2), ("1, 2",), ())}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)
    many = [mpu.derive_seed(1, "tensor", rank) for rank in range(1000)]
    assert len(set(many)) == 1000


def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Dropout from both streams, something nonlinear between."""
    x = F.dropout(torch.tanh(x @ w), 0.5)
    with TRACKER.fork():
        x = F.dropout(torch.sin(x @ w), 0.5)
    return F.dropout(x @ w, 0.5)


def gradients(run: Callable[..., torch.Tensor], times: int = 1) -> tuple[list[torch.Tensor], list[float]]:
    """Output and gradients of two applications, and what the streams draw after the backward pass."""
    mpu.model_parallel_manual_seed(9)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(6, 6, generator=generator, requires_grad=True) for _ in range(2))
    y = run(dropped, run(dropped, x, w), w)
    between = draw()
    for _ in range(times):
        y.square().sum().backward(retain_graph=times > 1)
    assert x.grad is not None
    assert w.grad is not None
    return [y.detach(), x.grad, w.grad], between + draw() + draw_from("model-parallel-rng")


@pytest.mark.parametrize("times", [1, 2])
def test_recomputation_changes_nothing(times: int) -> None:
    plain, drawn = gradients(lambda function, *args: function(*args), times)
    again, drawn_again = gradients(mpu.checkpoint, times)
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    assert drawn_again == drawn, "recomputation moved a random stream"
    assert (plain[0] == 0).any()


def test_recomputation_inside_a_fork() -> None:
    def inside(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
        with TRACKER.fork():
            return function(*args)

    plain, drawn = gradients(inside)
    again, drawn_again = gradients(lambda function, *args: inside(mpu.checkpoint, function, *args))
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    assert drawn_again == drawn


def test_recomputation_keeps_only_its_inputs() -> None:
    kept: list[int] = []
    x = torch.randn(4, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
        dropped(x, x)
        plain = len(kept)
        kept.clear()
        mpu.checkpoint(dropped, x, x)
    assert plain > 2
    assert len(kept) == 2


def test_recomputation_without_gradients() -> None:
    mpu.model_parallel_manual_seed(2)
    with torch.no_grad():
        assert not mpu.checkpoint(dropped, torch.ones(3, 3), torch.ones(3, 3)).requires_grad
