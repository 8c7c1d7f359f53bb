"""Runs the program of one rank: forward and backward passes, and the exchanges between them.

It knows no model and no optimizer; whoever calls it gives the forward pass of a chunk as a function. Needs torch, and
is therefore imported by its own name: `from megatron.pipeline.executor import run_program`.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron.pipeline.actions import Action, Exchange, Message, Program
from megatron.pipeline.communication import input_of, output_of
from megatron.pipeline.freeing import Held
from megatron.pipeline.transport import Boundary, Transport

__all__ = ["Boundary", "Event", "ForwardPass", "Transport", "run_program"]

# (chunk, micro-batch, what the stage before has handed on, or None in the first stage) -> what is handed on; in the
# last stage the scalar to run backward from.
ForwardPass = Callable[[int, int, Tensor | None], Tensor]


class Event(NamedTuple):
    """Something that a rank did, and its time by the clock given to `run_program`.

    `kind` is that of an action, or "wait" for the input of one (`what` is the message), or "exchange" for the start of
    one, which takes long only where an earlier output, or a varying shape, has to be waited for.
    """

    kind: Literal["forward", "backward", "wait", "exchange"]
    what: Action | Message | Exchange
    start: float
    end: float


def run_program(
    program: Program,
    forward: ForwardPass,
    *,
    pipeline_size: int = 1,
    virtual_size: int = 1,
    rank: int = 0,
    transport: Transport | None = None,
    before_last_backward: Callable[[int], None] | None = None,
    observer: Callable[[Event], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run `program`, that of pipeline rank `rank`, to its end; its gradients are then accumulated.

    A program without backward passes runs without gradients; what the last stage's forward pass returns is not looked
    at. Outputs are let go of once they are sent, so `forward` must not keep them.

    Communication: each exchange is one batch of sends and receives over the pipeline group, with `scatter_gather` an
    all-gather over the tensor group before a pass. All tensor ranks of a stage must run the same program.

    Args:
        program: from `programs(schedule, [rank])`, checked or not.
        forward: see `ForwardPass`; it draws the micro-batch and keeps the losses. In training it may be given its input
            as part of a graph (`requires_grad`), and must not change it in place.
        pipeline_size, virtual_size, rank: `p`, `v` and the pipeline rank that the program was made for.
        transport: for more than one rank.
        before_last_backward: called with a chunk right before the backward pass that completes its gradients.
        observer: called after everything that this rank does, in order.
        clock: for `observer` only; one that waits for the device first gives times of the device.

    What `forward` and the backward pass raise goes up at once. ValueError for an output that is not as the boundary
    says, RuntimeError for a loss without gradient.
    """
    training = any(isinstance(i, Action) and i.kind == "backward" for i in program)
    last = {i.chunk: n for n, i in enumerate(program) if isinstance(i, Action) and i.kind == "backward"}
    run = _Run((pipeline_size, virtual_size, rank), forward, transport, training, observer, clock)
    with contextlib.nullcontext() if training else torch.no_grad():
        for n, instruction in enumerate(program):
            if isinstance(instruction, Exchange):
                run.exchange(instruction)
            elif instruction.kind == "forward":
                run.forward(instruction)
            else:
                if before_last_backward is not None and last[instruction.chunk] == n:
                    before_last_backward(instruction.chunk)
                run.backward(instruction)
    if transport is not None:
        transport.finish()


class _Run:
    """A program being run: what is kept between its instructions."""

    def __init__(
        self,
        place: tuple[int, int, int],
        forward: ForwardPass,
        transport: Transport | None,
        training: bool,
        observer: Callable[[Event], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._place, self._forward, self._transport, self._training = place, forward, transport, training
        self._observer, self._clock = observer, clock
        self._held: dict[tuple[int, int], Held] = {}  # by chunk and micro-batch: passed forwards, not yet backwards
        self._outputs: dict[Message, Tensor] = {}  # made and not yet sent

    def forward(self, action: Action) -> None:
        received = self._input(action)
        with self._observed(action.kind, action):
            held = Held()
            if received is not None and self._training:
                received = held.enter(received)
            output = self._forward(action.chunk, action.micro_batch, received)
            if self._training:
                held.leave(output)
                self._held[action.chunk, action.micro_batch] = held
        self._keep(action, output)

    def backward(self, action: Action) -> None:
        gradient = self._input(action)
        with self._observed(action.kind, action):
            given = self._held.pop((action.chunk, action.micro_batch)).backward(gradient)
        self._keep(action, given)

    def exchange(self, exchange: Exchange) -> None:
        with self._observed("exchange", exchange):
            sends = [(message, self._outputs.pop(message)) for message in exchange.sends]
            self._between_ranks().start(sends, exchange.receives)

    def _input(self, action: Action) -> Tensor | None:
        message = input_of(*self._place, action)
        if message is None:
            return None
        with self._observed("wait", message):
            return self._between_ranks().take(message)

    def _keep(self, action: Action, output: Tensor | None) -> None:
        message = output_of(*self._place, action)
        if message is not None:
            assert output is not None
            self._outputs[message] = output.detach()

    def _between_ranks(self) -> Transport:
        assert self._transport is not None, "a program of several ranks needs a transport"
        return self._transport

    @contextlib.contextmanager
    def _observed(
        self, kind: Literal["forward", "backward", "wait", "exchange"], what: Action | Message | Exchange
    ) -> Iterator[None]:
        if self._observer is None:
            yield
            return
        start = self._clock()
        yield
        self._observer(Event(kind, what, start, self._clock()))
