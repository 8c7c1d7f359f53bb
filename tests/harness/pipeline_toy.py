"""A toy model in stages, its serial twin, and a rank of its pipeline that records what it does."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.pipeline import Action, Exchange, Program, Schedule, build_schedule, programs
from megatron.pipeline.executor import Boundary, Event, Transport, run_program
from tests.harness.closeness import assert_close

SHAPE = (3, 2, 8)
Block = Callable[[nn.Linear, Tensor], Tensor]


def residual(linear: nn.Linear, x: Tensor) -> Tensor:
    return x + torch.tanh(linear(x))


def seeded(number: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def stage_weights(stage: int) -> nn.Linear:
    linear = nn.Linear(8, 8, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(seeded(1000 + stage, (8, 8)) / 3)
        linear.bias.copy_(seeded(2000 + stage, (8,)))
    return linear


def loss_of(h: Tensor, micro_batch: int) -> Tensor:
    return (h - seeded(3000 + micro_batch, h.shape)).square().sum()


def same_shape(micro_batch: int) -> tuple[int, ...]:
    return SHAPE


@dataclasses.dataclass
class Toy:
    """The chunks of one rank, the losses and events of its last run. `block` is what a stage does, by its number."""

    schedule: Schedule
    block: Callable[[int], Block] = lambda stage: residual
    shape_of: Callable[[int], tuple[int, ...]] = same_shape
    rank: int = dataclasses.field(default_factory=mpu.get_pipeline_model_parallel_rank)

    def __post_init__(self) -> None:
        self.stages = range(self.rank, self.schedule.pipeline_size * self.schedule.virtual_size, self.p)
        self.chunks = [stage_weights(stage) for stage in self.stages]
        self.losses: dict[int, Tensor] = {}
        self.events: list[Event] = []
        self.announced: list[tuple[int, int]] = []  # chunks told to be completed next, and the events up to then

    @property
    def p(self) -> int:
        return self.schedule.pipeline_size

    @property
    def program(self) -> Program:
        return programs(self.schedule, [self.rank])[0]

    def forward(self, chunk: int, micro_batch: int, received: Tensor | None) -> Tensor:
        x = seeded(micro_batch, self.shape_of(micro_batch)) if received is None else received
        stage = self.stages[chunk]
        h = self.block(stage)(self.chunks[chunk], x)
        del x, received
        if stage < self.p * self.schedule.virtual_size - 1:
            return h
        self.losses[micro_batch] = (loss := loss_of(h, micro_batch)).detach()
        return loss

    def run(self, transport: Transport | None, observer: Callable[[Event], None] | None = None, **kwargs: Any) -> None:
        self.losses, self.events, self.announced = {}, [], []

        def observe(event: Event) -> None:
            self.events.append(event)
            if observer is not None:
                observer(event)

        run_program(
            self.program,
            self.forward,
            pipeline_size=self.p,
            virtual_size=self.schedule.virtual_size,
            rank=self.rank,
            transport=transport,
            before_last_backward=lambda chunk: self.announced.append((chunk, len(self.events))),
            observer=observe,
            **kwargs,
        )

    def done(self) -> list[Action | Exchange]:
        """The instructions that were run, in the order in which they were."""
        return [event.what for event in self.events if isinstance(event.what, Action | Exchange)]


def make_transport(shape: tuple[int, ...] | None = SHAPE, **kwargs: Any) -> Transport | None:
    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return None
    return Transport(Boundary(shape, torch.float64), mpu.get_pipeline_model_parallel_group(), **kwargs)


def serial(toy: Toy) -> tuple[dict[int, Tensor], list[nn.Linear]]:
    """Losses by micro-batch and all stages with their gradients, of the same model without a pipeline."""
    stages = [stage_weights(stage) for stage in range(toy.p * toy.schedule.virtual_size)]
    losses = {}
    for k in range(toy.schedule.num_micro_batches):
        h = seeded(k, toy.shape_of(k))
        for number, linear in enumerate(stages):
            h = toy.block(number)(linear, h)
        losses[k] = (loss := loss_of(h, k)).detach()
        if not toy.schedule.forward_only and loss.requires_grad:
            loss.backward()
    return losses, stages


def check_against_twin(toy: Toy, exact: bool = True) -> None:
    """Losses and gradients are the serial model's; to the bit, so that each chunk added them in the order 0, 1, ...

    Where nothing depends on a stage the serial model has no gradient, the pipeline may have one of zero.
    """
    losses, stages = serial(toy)
    mine = [filled(parameter) for linear in toy.chunks for parameter in linear.parameters()]
    theirs = [filled(parameter) for stage in toy.stages for parameter in stages[stage].parameters()]
    assert_close(mine, theirs, 1e-12)
    assert not exact or all(map(torch.equal, mine, theirs))
    assert_close(toy.losses, losses if toy.rank == toy.p - 1 else {}, 1e-12)


def filled(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def schedules(p: int) -> list[Schedule]:
    """All of `p` ranks: both kinds, few and many micro-batches, several chunks."""
    found = [build_schedule(name, p, m) for name in ("gpipe", "1f1b") for m in sorted({1, 2, p, 2 * p + 1})]
    return found + [build_schedule("1f1b", p, m, v) for v in (2, 3) for m in (p, 2 * p) if p > 1]
