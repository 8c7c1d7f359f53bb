"""Schedules against the papers: their lists, their bubble, their memory; and the checker finds what is wrong."""

import dataclasses
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.complaints import ConfigError
from megatron.pipeline import (
    SCHEDULES,
    Action,
    Schedule,
    bubble,
    build_schedule,
    peak_in_flight,
    schedule_problems,
    validate,
)
from megatron.pipeline.actions import Kind
from megatron.pipeline.simulate import simulate


def words(actions: Iterable[Action]) -> str:
    """Micro-batches from 1, `'` for the second chunk, backward passes in brackets, as one reads the paper's figures."""
    texts = (f"{a.micro_batch + 1}{chr(39) * a.chunk}" for a in actions)
    kinds = (a.kind for a in actions)
    return " ".join(f"({text})" if kind == "backward" else text for text, kind in zip(texts, kinds, strict=True))


def test_1f1b_is_the_list_of_the_paper() -> None:
    """arXiv:2104.04473, figure 4, above: four devices, eight micro-batches."""
    first, *_, last = build_schedule("1f1b", 4, 8).actions
    assert words(first) == "1 2 3 4 (1) 5 (2) 6 (3) 7 (4) 8 (5) (6) (7) (8)"
    assert words(last) == "1 (1) 2 (2) 3 (3) 4 (4) 5 (5) 6 (6) 7 (7) 8 (8)"


def test_interleaved_1f1b_is_the_list_of_the_paper() -> None:
    """arXiv:2104.04473, figure 4, below: the same with two chunks on each device."""
    first, *_, last = build_schedule("1f1b", 4, 8, 2).actions
    assert words(first[:15]) == "1 2 3 4 1' 2' 3' 4' 5 6 7 (1') 8 (2') 5'"
    assert words(last[:13]) == "1 2 3 4 1' (1') 2' (2') 3' (3') 4' (4') 5"


def test_gpipe_runs_all_forward_passes_first() -> None:
    assert [words(a) for a in build_schedule("gpipe", 2, 3).actions] == ["1 2 3 (1) (2) (3)"] * 2


def test_without_a_pipeline_each_forward_pass_is_followed_by_its_backward_pass() -> None:
    assert words(build_schedule("1f1b", 1, 3).actions[0]) == "1 (1) 2 (2) 3 (3)"


def test_evaluation_has_forward_passes_alone() -> None:
    schedule = build_schedule("1f1b", 2, 4, 2, forward_only=True)
    assert [words(a) for a in schedule.actions] == ["1 2 1' 2' 3 4 3' 4'"] * 2
    assert schedule_problems(schedule) == []


SHAPES = [
    (p, v, m)
    for p in range(2, 17)
    for v in range(1, 5)
    for m in (sorted({1, 2, 7, p - 1, p, p + 1, 40, 64}) if v == 1 else range(p, 65, p))
]


@pytest.mark.parametrize("p", range(2, 17))
def test_bubble_and_memory_are_those_of_the_closed_forms(p: int) -> None:
    for _, v, m in (shape for shape in SHAPES if shape[0] == p):
        schedule = build_schedule("1f1b", p, m, v)
        assert schedule_problems(schedule) == []
        for backward in (1, 2):
            assert simulate(schedule, 1, backward).bubble == pytest.approx((p - 1) / (v * m), abs=1e-12)
        for rank, actions in enumerate(schedule.actions):
            deepest = min(p - rank, m) if v == 1 else min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1)
            assert validate.peak_in_flight(actions) == peak_in_flight("1f1b", p, v, m, rank) == deepest
    assert bubble(p, 1, p) == (p - 1) / p


@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_gpipe_holds_everything_and_has_the_same_bubble(
    p: int, v: int, groups: int, forward: int, backward: int
) -> None:
    v = v if p > 1 else 1
    m = groups * p if v > 1 else groups
    schedule = build_schedule("gpipe", p, m, v)
    assert schedule_problems(schedule) == []
    assert simulate(schedule, forward, backward).bubble == pytest.approx((p - 1) / (v * m), abs=1e-12)
    assert {validate.peak_in_flight(actions) for actions in schedule.actions} == {m * v}
    assert {peak_in_flight("gpipe", p, v, m, rank) for rank in range(p)} == {m * v}


@given(st.sampled_from(SCHEDULES), st.sampled_from(SHAPES))
def test_gradients_are_added_in_the_same_order_by_every_schedule(name: str, shape: tuple[int, int, int]) -> None:
    p, v, m = shape
    for actions in build_schedule(name, p, m, v).actions:
        for kind in ("forward", "backward"):
            for chunk in range(v):
                assert [a.micro_batch for a in actions if (a.kind, a.chunk) == (kind, chunk)] == list(range(m))


def test_numbers_that_make_no_schedule_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build_schedule("1f1b", 4, 6, 2)
    assert str(caught.value) == (
        "6 micro-batches: with virtual stages their number must be a multiple of --pipeline-model-parallel-size 4; "
        "the nearest are 4 and 8"
    )
    for name, p, m, v in (("zigzag", 2, 2, 1), ("1f1b", 0, 2, 1), ("1f1b", 2, 0, 1), ("gpipe", 1, 2, 2)):
        with pytest.raises(ValueError, match="accepted are 1f1b and gpipe"):
            build_schedule(name, p, m, v)


def test_large_schedules_take_seconds() -> None:
    schedule = build_schedule("1f1b", 64, 512, 8)
    assert sum(map(len, schedule.actions)) == 2 * 64 * 512 * 8
    assert schedule_problems(schedule) == []


# --- the checker ------------------------------------------------------------------------------------------------------


def with_actions(schedule: Schedule, rank: int, actions: Iterable[Action]) -> Schedule:
    lists = list(schedule.actions)
    lists[rank] = tuple(actions)
    return dataclasses.replace(schedule, actions=tuple(lists))


WRONG_SHAPES = st.sampled_from([(2, 1, 4), (2, 2, 4), (4, 1, 6), (3, 3, 6), (4, 2, 8)])


@given(WRONG_SHAPES, st.sampled_from(SCHEDULES), st.data())
def test_a_pass_left_out_or_run_twice_is_found(shape: tuple[int, int, int], name: str, data: st.DataObject) -> None:
    p, v, m = shape
    schedule = build_schedule(name, p, m, v)
    rank = data.draw(st.integers(0, p - 1))
    actions = list(schedule.actions[rank])
    at, to = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
    without = with_actions(schedule, rank, actions[:at] + actions[at + 1 :])
    twice = with_actions(schedule, rank, actions[:to] + [actions[at]] + actions[to:])
    for broken in (without, twice):
        (problem,) = schedule_problems(broken)
        assert problem.startswith(f"rank {rank}: ")
    assert f"no {actions[at]}" in schedule_problems(without)[0] or actions[at].kind == "forward"


@given(WRONG_SHAPES, st.data())
def test_a_backward_pass_before_its_forward_pass_is_found(shape: tuple[int, int, int], data: st.DataObject) -> None:
    p, v, m = shape
    schedule = build_schedule("1f1b", p, m, v)
    rank, micro_batch, chunk = (data.draw(st.integers(0, n - 1)) for n in (p, m, v))
    swapped = {
        Action("forward", micro_batch, chunk): Action("backward", micro_batch, chunk),
        Action("backward", micro_batch, chunk): Action("forward", micro_batch, chunk),
    }
    broken = with_actions(schedule, rank, (swapped.get(action, action) for action in schedule.actions[rank]))
    assert schedule_problems(broken) == [
        f"rank {rank}: the backward of micro-batch {micro_batch} in chunk {chunk} comes once too often, or before its "
        "forward pass"
    ]


@pytest.mark.parametrize("wrong", [Action("forward", 4, 0), Action("forward", 0, 1), Action("forward", -1, 0)])
def test_passes_of_what_there_is_not_are_found(wrong: Action) -> None:
    schedule = build_schedule("1f1b", 2, 4)
    assert schedule_problems(with_actions(schedule, 1, [wrong, *schedule.actions[1]])) == [
        f"rank 1: the {wrong} is outside 4 micro-batches and 1 chunks"
    ]


def test_a_missing_rank_and_a_backward_pass_in_evaluation_are_found() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    assert schedule_problems(dataclasses.replace(schedule, actions=schedule.actions[:1])) != []
    assert schedule_problems(dataclasses.replace(schedule, forward_only=True)) != []


def test_lists_that_wait_for_each_other_are_found() -> None:
    """The first rank goes on when gradients of 0 are back, the second makes them when it has activations of 1."""
    names: dict[str, Kind] = {"F": "forward", "B": "backward"}
    first, second = ([Action(names[w[0]], int(w[1]), 0) for w in t.split()] for t in ("F0 B0 F1 B1", "F0 F1 B0 B1"))
    circle = Schedule(2, 1, 2, (tuple(first), tuple(second)))
    assert schedule_problems(circle) == [
        "rank 0 waits for ever for the input of the backward of micro-batch 0 in chunk 0",
        "rank 1 waits for ever for the input of the forward of micro-batch 1 in chunk 0",
    ]
    with pytest.raises(ValueError, match="rank 0 for the input of the backward of micro-batch 0 in chunk 0, rank 1"):
        simulate(circle)


@settings(max_examples=200)
@given(st.sampled_from([(2, 1, 2), (2, 2, 2), (3, 1, 3), (3, 2, 3)]), st.randoms(use_true_random=False))
def test_the_checker_and_the_simulation_agree_on_what_can_be_run(
    shape: tuple[int, int, int], rng: random.Random
) -> None:
    p, v, m = shape
    schedule = build_schedule(rng.choice(SCHEDULES), p, m, v)
    for _ in range(rng.randint(0, 6)):
        rank = rng.randrange(p)
        actions = list(schedule.actions[rank])
        at = rng.randrange(len(actions) - 1)
        actions[at], actions[at + 1] = actions[at + 1], actions[at]
        swapped = with_actions(schedule, rank, actions)
        # A swap of a forward pass with its own backward pass is for the test above.
        schedule = (
            schedule if any("before its forward" in problem for problem in schedule_problems(swapped)) else swapped
        )
    try:
        simulate(schedule)
    except ValueError:
        assert schedule_problems(schedule) != []
    else:
        assert schedule_problems(schedule) == []
