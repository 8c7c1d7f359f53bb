"""A model run by a pipeline's programs: losses, gradients and their order as without one, and nothing kept too long."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron import mpu
from megatron.pipeline import Action, build_schedule
from megatron.pipeline.executor import Event
from megatron.pipeline.validate import peak_in_flight
from tests.harness.closeness import assert_close
from tests.harness.pipeline_toy import (
    Block,
    Toy,
    check_against_twin,
    make_transport,
    residual,
    schedules,
    serial,
)
from tests.harness.ranks import Ranks


def every_schedule(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(1, world_size)
    transport = make_transport()
    for schedule in schedules(world_size):
        toy = Toy(schedule)
        toy.run(transport)
        check_against_twin(toy)
        assert toy.done() == toy.program
        assert tuple(i for i in toy.done() if isinstance(i, Action)) == schedule.actions[rank]
        check_last_backwards(toy)
        # Another run adds to the gradients, and starts with nothing left over.
        once = [linear.weight.grad.clone() for linear in toy.chunks]
        toy.run(transport)
        assert_close([linear.weight.grad for linear in toy.chunks], [2 * gradient for gradient in once], 1e-12)


def check_last_backwards(toy: Toy) -> None:
    """Each chunk's was announced once, and the next that was done was the last of its backward passes."""
    last = {a.chunk: a for a in toy.schedule.actions[toy.rank] if a.kind == "backward"}
    assert sorted(chunk for chunk, _ in toy.announced) == list(range(len(toy.chunks)))
    for chunk, events_before in toy.announced:
        assert next(e.what for e in toy.events[events_before:] if isinstance(e.what, Action)) == last[chunk]


@pytest.mark.parametrize("p", [1, 2, 4])
def test_every_schedule_gives_the_serial_gradients_in_the_order_of_its_list(ranks: Ranks, p: int) -> None:
    ranks(p, every_schedule)


def evaluation(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(1, world_size)
    transport = make_transport()
    graphs: list[bool] = []

    def watching(linear: nn.Linear, x: Tensor) -> Tensor:
        graphs.append(torch.is_grad_enabled() or x.requires_grad)
        return residual(linear, x)

    for m, v in ((1, 1), (5, 1), (8, 2)):
        toy = Toy(build_schedule("1f1b", world_size, m, v, forward_only=True), block=lambda stage: watching)
        toy.run(transport)
        assert graphs == [False] * (m * v)
        assert_close(toy.losses, serial(toy)[0] if rank == world_size - 1 else {}, 1e-12)
        graphs.clear()
        assert toy.done() == toy.program
        assert toy.announced == []
        assert all(linear.weight.grad is None for linear in toy.chunks)
    assert torch.is_grad_enabled()


def test_forward_only(ranks: Ranks) -> None:
    ranks(2, evaluation)
    ranks(4, evaluation)


class Keeps(torch.autograd.Function):
    """tanh, in whose graph a tensor lives that nobody else has: so it is seen how many graphs live."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[StorageWeakRef]) -> Tensor:
        own = x.clone()
        ctx.save_for_backward(own)
        kept.append(StorageWeakRef(own.untyped_storage()))
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * (1 - torch.tanh(ctx.saved_tensors[0]).square()), None


class Forgets(torch.autograd.Function):
    """x + 1 by a Python function: nothing but the output's tensor is there to keep this end of the graph alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1


def memory(rank: int, world_size: int, name: str, m: int, v: int) -> None:
    mpu.initialize_model_parallel(1, world_size)
    alive: dict[str, list[StorageWeakRef]] = {"input": [], "graph": [], "output": []}
    most = dict.fromkeys(alive, 0)

    def block(linear: nn.Linear, x: Tensor) -> Tensor:
        alive["input"].append(StorageWeakRef(x.untyped_storage()))
        h = Forgets.apply(Keeps.apply(linear(x * 1.5), alive["graph"]))
        alive["output"].append(StorageWeakRef(h.untyped_storage()))
        return h

    def look(event: Event) -> None:
        for key, references in alive.items():
            most[key] = max(most[key], sum(not reference.expired() for reference in references))

    toy = Toy(build_schedule(name, world_size, m, v), block=lambda stage: block)
    toy.run(make_transport(), look)
    assert most["graph"] == peak_in_flight(toy.schedule.actions[rank])
    # One that was just made and the one before it, which may be under way; none where all end in the loss.
    assert most["output"] <= 2
    assert most["output"] >= 1 or (rank, v) == (world_size - 1, 1)
    # The graph does not need its input, which goes with the pass; what comes in for the next ones is not counted yet.
    assert most["input"] <= 1
    assert all(reference.expired() for references in alive.values() for reference in references)
    assert len(alive["output"]) == m * v
    check_against_twin(toy)


@pytest.mark.parametrize(("p", "name", "m", "v"), [(2, "gpipe", 4, 1), (4, "1f1b", 8, 1), (2, "1f1b", 4, 3)])
def test_as_much_is_kept_as_the_schedule_says_and_no_output_once_it_is_sent(
    ranks: Ranks, p: int, name: str, m: int, v: int
) -> None:
    ranks(p, memory, name, m, v)


def identity(linear: nn.Linear, x: Tensor) -> Tensor:
    return x


def view_of_input(linear: nn.Linear, x: Tensor) -> Tensor:
    return x.transpose(0, 1).transpose(0, 1)


def not_contiguous(linear: nn.Linear, x: Tensor) -> Tensor:
    return residual(linear, x).transpose(0, 1).contiguous().transpose(0, 1)


def saved_output(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.sigmoid(linear(x))  # the graph keeps the very tensor that is sent


def input_kept(linear: nn.Linear, x: Tensor) -> Tensor:
    return x * linear(x)


def detached(linear: nn.Linear, x: Tensor) -> Tensor:
    return x.detach()


def unusual_stages(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(1, world_size)
    transport = make_transport()
    for odd in (identity, view_of_input, not_contiguous, saved_output, input_kept, detached):
        for schedule in (build_schedule("gpipe", world_size, 4), build_schedule("1f1b", world_size, 4, 2)):
            stages = world_size * schedule.virtual_size

            def block(stage: int, odd: Block = odd, stages: int = stages) -> Block:
                return odd if stage in (0, stages // 2) and stage < stages - 1 else residual

            toy = Toy(schedule, block=block)
            toy.run(transport)
            check_against_twin(toy, exact=False)  # a product of another layout may round otherwise


def test_outputs_that_share_storage_or_graph_with_others_come_to_no_harm(ranks: Ranks) -> None:
    ranks(2, unusual_stages)
    ranks(4, unusual_stages)


def clocked(rank: int, world_size: int) -> None:
    """Without processes: one rank, and a clock that counts."""
    ticks = iter(range(1000))
    toy = Toy(build_schedule("1f1b", 1, 2))
    toy.run(None, clock=lambda: float(next(ticks)))
    order: list[Any] = [(event.kind, event.start, event.end) for event in toy.events]
    assert order == [("forward", 0, 1), ("backward", 2, 3), ("forward", 4, 5), ("backward", 6, 7)]


def test_events_have_the_times_of_the_clock() -> None:
    clocked(0, 1)


def test_a_loss_without_gradient_is_refused() -> None:
    def no_gradient(stage: int) -> Callable[[nn.Linear, Tensor], Tensor]:
        return lambda linear, x: residual(linear, x).detach()

    with pytest.raises(RuntimeError, match="the loss that the last stage returned needs no gradient"):
        Toy(build_schedule("1f1b", 1, 2), block=no_gradient).run(None)
