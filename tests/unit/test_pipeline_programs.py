"""Programs: for any schedule nothing can deadlock and pairs agree on the order; the checker finds what is wrong."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from graphlib import TopologicalSorter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline import (
    SCHEDULES,
    Action,
    Exchange,
    Message,
    Program,
    Schedule,
    build_schedule,
    input_of,
    output_of,
    program_problems,
    programs,
    schedule_problems,
)
from megatron.pipeline.actions import Kind
from megatron.pipeline.simulate import simulate

KINDS: tuple[Kind, Kind] = ("forward", "backward")
SHAPES = [
    (1, 1, 3),
    (2, 1, 1),
    (2, 1, 5),
    (2, 2, 4),
    (2, 4, 6),
    (3, 1, 2),
    (4, 1, 9),
    (4, 2, 8),
    (5, 3, 10),
    (8, 2, 16),
]


def any_schedule(p: int, v: int, m: int, rng: random.Random) -> Schedule:
    """Actions in an order that random ranks take whatever they can, so of no pattern at all."""
    stages = p * v
    lists: list[list[Action]] = [[] for _ in range(p)]
    way: list[tuple[Kind, int]] = [("forward", stage) for stage in range(stages)]
    way += [("backward", stage) for stage in reversed(range(stages))]
    ready = [(micro_batch, 0) for micro_batch in range(m)]
    while ready:
        micro_batch, gone = ready.pop(rng.randrange(len(ready)))
        kind, stage = way[gone]
        lists[stage % p].append(Action(kind, micro_batch, stage // p))
        ready += [(micro_batch, gone + 1)] * (gone + 1 < len(way))
    return Schedule(p, v, m, tuple(map(tuple, lists)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_programs_of_the_schedules_pass_the_checker(shape: tuple[int, int, int], name: str, forward_only: bool) -> None:
    p, v, m = shape
    schedule = build_schedule(name, p, m, v, forward_only=forward_only)
    made = programs(schedule)
    assert program_problems(schedule, made) == []
    for rank in range(p):
        assert programs(schedule, [rank]) == [made[rank]]


@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 6), st.randoms(use_true_random=False))
def test_programs_of_any_order_that_can_be_run_pass_the_checker(p: int, v: int, m: int, rng: random.Random) -> None:
    schedule = any_schedule(p, v, m, rng)
    assert schedule_problems(schedule) == []
    made = programs(schedule)
    assert program_problems(schedule, made) == []
    for exchange in (i for program in made for i in program if isinstance(i, Exchange)):
        assert len(exchange.sends) <= 1
        assert len({message.source for message in exchange.receives}) == len(exchange.receives)


def test_a_program_in_full() -> None:
    """Two stages: each exchange joins what is ready at one time, and what comes early is received before a pass."""
    to = [Message("activation", i, 0, 0, 1, 0) for i in range(3)]
    back = [Message("gradient", i, 1, 0, 0, 0) for i in range(3)]
    forward, backward = ([Action(kind, i, 0) for i in range(3)] for kind in KINDS)
    assert programs(build_schedule("1f1b", 2, 3)) == [
        [
            forward[0],
            Exchange((to[0],), ()),
            forward[1],
            Exchange((to[1],), ()),
            Exchange((), (back[0],)),
            backward[0],
            forward[2],
            Exchange((to[2],), (back[1],)),
            backward[1],
            Exchange((), (back[2],)),
            backward[2],
        ],
        [
            Exchange((), (to[0],)),
            forward[0],
            Exchange((), (to[1],)),
            backward[0],
            Exchange((back[0],), ()),
            forward[1],
            backward[1],
            Exchange((back[1],), (to[2],)),
            forward[2],
            backward[2],
            Exchange((back[2],), ()),
        ],
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_and_outputs_of_actions_are_what_the_program_exchanges(shape: tuple[int, int, int]) -> None:
    p, v, m = shape
    schedule = build_schedule("1f1b", p, m, v)
    for rank, program in enumerate(programs(schedule)):
        exchanges = [instruction for instruction in program if isinstance(instruction, Exchange)]
        needed = {input_of(p, v, rank, action) for action in schedule.actions[rank]} - {None}
        made = [output_of(p, v, rank, action) for action in schedule.actions[rank]]
        assert {message for exchange in exchanges for message in exchange.receives} == needed
        assert [m for exchange in exchanges for m in exchange.sends] == [m for m in made if m is not None]


def test_nothing_is_received_long_before_it_is_needed() -> None:
    """At most two inputs lie on a rank of 1F1B, those of its next forward and of its next backward pass."""
    for p, m in ((2, 8), (5, 3), (8, 32)):
        for rank, program in enumerate(programs(build_schedule("1f1b", p, m))):
            lying = 0
            for instruction in program:
                if isinstance(instruction, Exchange):
                    lying += len(instruction.receives)
                else:
                    lying -= input_of(p, 1, rank, instruction) is not None
                assert 0 <= lying <= 2
            assert lying == 0


# --- the time that exchanges cost -------------------------------------------------------------------------------------


Node = tuple[str, int, int]  # start or end, rank, place in the program


def strict_makespan(schedule: Schedule, made: Sequence[Program], forward: float, backward: float) -> float:
    """The time where transfers take none, but a rank has one exchange at a time and waits for whole exchanges.

    So does a rank on one NCCL stream: an exchange starts when the one before is done and the passes before it in the
    program have been run; it is done when all of its messages have moved, each once both its exchanges have started.
    """
    where = {
        (message, side): (rank, at)
        for rank, program in enumerate(made)
        for at, instruction in enumerate(program)
        if isinstance(instruction, Exchange)
        for side, messages in enumerate(instruction)
        for message in messages
    }
    needs: dict[Node, list[Node]] = {}
    took: dict[Node, float] = defaultdict(float)
    for rank, program in enumerate(made):
        computed: list[Node] = []
        exchanged: list[Node] = []
        for at, instruction in enumerate(program):
            start, end = ("start", rank, at), ("end", rank, at)
            if isinstance(instruction, Exchange):
                partners = [where[m, 1] for m in instruction.sends] + [where[m, 0] for m in instruction.receives]
                needs[start] = computed + exchanged
                needs[end] = [start, *(("start", *place) for place in partners)]
                exchanged = [end]
            else:
                message = input_of(schedule.pipeline_size, schedule.virtual_size, rank, instruction)
                needs[end] = computed + ([("end", *where[message, 1])] if message else [])
                took[end] = forward if instruction.kind == "forward" else backward
                computed = [end]
    times: dict[Node, float] = {}
    for node in TopologicalSorter(needs).static_order():
        times[node] = max((times[n] for n in needs[node]), default=0.0) + took[node]
    return max(times.values())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_exchanges_one_at_a_time_cost_nothing(shape: tuple[int, int, int], name: str) -> None:
    p, v, m = shape
    schedule = build_schedule(name, p, m, v)
    made = programs(schedule)
    assert strict_makespan(schedule, made, 1, 2) == simulate(schedule, 1, 2).makespan
    # With other times than those that they are made for they cost little: 3 is a backward pass that recomputes.
    for backward in (1, 3):
        assert strict_makespan(schedule, made, 1, backward) <= 1.02 * float(simulate(schedule, 1, backward).makespan)


# --- the checker ------------------------------------------------------------------------------------------------------


def without(messages: tuple[Message, ...], message: Message) -> tuple[Message, ...]:
    return tuple(other for other in messages if other != message)


@given(st.sampled_from(SHAPES[2:]), st.sampled_from(SCHEDULES), st.data())
def test_a_dropped_or_misdirected_message_is_found(shape: tuple[int, int, int], name: str, data: st.DataObject) -> None:
    p, v, m = shape
    schedule = build_schedule(name, p, m, v)
    made = programs(schedule)
    rank = data.draw(st.integers(0, p - 1))
    at = data.draw(st.sampled_from([at for at, i in enumerate(made[rank]) if isinstance(i, Exchange)]))
    exchange = made[rank][at]
    assert isinstance(exchange, Exchange)
    message = data.draw(st.sampled_from(exchange.sends + exchange.receives))
    sends, receives = without(exchange.sends, message), without(exchange.receives, message)
    elsewhere = message._replace(micro_batch=(message.micro_batch + 1) % m, destination_chunk=v)
    sent = message in exchange.sends
    other = Exchange((*sends, elsewhere) if sent else sends, receives if sent else (*receives, elsewhere))
    for wrong in (Exchange(sends, receives), other):
        broken = [list(program) for program in made]
        broken[rank][at] = wrong
        (problem,) = program_problems(schedule, broken)
        assert problem.startswith(f"rank {rank}: ")


@given(st.sampled_from(SHAPES[2:]), st.sampled_from(SCHEDULES), st.data())
def test_swapped_actions_and_receives_that_come_late_are_found(
    shape: tuple[int, int, int], name: str, data: st.DataObject
) -> None:
    p, v, m = shape
    schedule = build_schedule(name, p, m, v)
    made = programs(schedule)
    rank = data.draw(st.integers(0, p - 1))
    program = made[rank]
    one, two = sorted(data.draw(st.permutations([at for at, i in enumerate(program) if isinstance(i, Action)]))[:2])
    swapped = [*program[:one], program[two], *program[one + 1 : two], program[one], *program[two + 1 :]]
    receiving = [at for at, i in enumerate(program) if isinstance(i, Exchange) and i.receives]
    late = data.draw(st.sampled_from(receiving))
    for broken in (swapped, [*program[:late], *program[late + 1 :], program[late]]):
        (problem,) = program_problems(schedule, [*made[:rank], broken, *made[rank + 1 :]])
        assert problem.startswith(f"rank {rank}: ")


def test_what_is_sent_or_received_twice_and_a_missing_program_are_found() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    made = programs(schedule)
    for rank in range(2):
        again = next(i for i in made[rank] if isinstance(i, Exchange))
        assert program_problems(schedule, [*made[:rank], [*made[rank], again], *made[rank + 1 :]]) != []
    assert program_problems(schedule, made[:1]) == ["there are programs of 1 ranks, not of 2"]


def test_sends_in_another_order_than_receives_are_found() -> None:
    schedule = build_schedule("gpipe", 2, 3)
    first, second = programs(schedule)
    assert isinstance(first[1], Exchange)
    late = [first[0], first[2], first[3], first[1], *first[4:]]  # micro-batch 0 is sent behind micro-batch 1
    assert program_problems(schedule, [late, second]) == [
        "rank 0 sends to rank 1 in another order than is received there: the activation of micro-batch 1 from chunk 0 "
        "of rank 0 to chunk 0 of rank 1"
    ]


def split(program: Program, order: Callable[[Exchange], Sequence[Exchange]]) -> Program:
    parts = [order(i) if isinstance(i, Exchange) and i.sends and i.receives else [i] for i in program]
    return [instruction for part in parts for instruction in part]


def test_exchanges_that_wait_for_each_other_are_found() -> None:
    """Two neighbours that both send before they receive, or the other way round, where an exchange did both at once."""
    schedule = build_schedule("1f1b", 2, 4, 2)
    made = programs(schedule)

    def sends_first(exchange: Exchange) -> list[Exchange]:
        return [Exchange(exchange.sends, ()), Exchange((), exchange.receives)]

    def receives_first(exchange: Exchange) -> list[Exchange]:
        return sends_first(exchange)[::-1]

    for order in (sends_first, receives_first):
        problems = program_problems(schedule, [split(program, order) for program in made])
        assert [problem.split(" of exchange")[0] for problem in problems] == [
            "rank 0 never gets out",
            "rank 1 never gets out",
        ]
        # One side alone may: the other's exchange moves each of its messages when it can.
        assert program_problems(schedule, [split(made[0], order), made[1]]) == []
