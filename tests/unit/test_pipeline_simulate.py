"""Simulation: times of stages that differ, transfers, and no pass before its input or beside another of its rank."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline import Action, build_schedule
from megatron.pipeline.simulate import Time, Timeline, simulate


def when(timeline: Timeline) -> dict[tuple[int, Action], tuple[Time, Time]]:
    """Start and end of each action, by its rank and itself."""
    lists = zip(timeline.schedule.actions, timeline.starts, timeline.ends, strict=True)
    return {
        (rank, action): (start, end)
        for rank, rows in enumerate(lists)
        for action, start, end in zip(*rows, strict=True)
    }


def test_two_stages_by_hand() -> None:
    """Rank 0: F0 1-2 (times from 0), F1, B0, B1; rank 1 is twice as slow and starts a transfer of 0.5 later."""
    timeline = simulate(build_schedule("1f1b", 2, 2), forward=[1, 2], backward=[1.5, 3], transfer=0.5)
    first, second = (list(zip(timeline.starts[rank], timeline.ends[rank], strict=True)) for rank in range(2))
    assert first == [(0, 1), (1, 2), (7, 8.5), (12, 13.5)]
    assert second == [(1.5, 3.5), (3.5, 6.5), (6.5, 8.5), (8.5, 11.5)]
    assert timeline.makespan == 13.5
    assert [timeline.busy(rank) for rank in range(2)] == [5, 10]
    assert timeline.bubble == pytest.approx(0.35)


TIMES = st.fractions(min_value=Fraction(1, 4), max_value=4, max_denominator=4)


@given(st.sampled_from([(2, 1, 3), (2, 2, 4), (3, 1, 2), (4, 2, 8)]), TIMES, st.data())
def test_every_pass_waits_for_its_rank_and_its_input_and_for_nothing_else(
    shape: tuple[int, int, int], transfer: Fraction, data: st.DataObject
) -> None:
    p, v, m = shape
    stages = p * v
    forward, backward = (data.draw(st.lists(TIMES, min_size=stages, max_size=stages)) for _ in range(2))
    timeline = simulate(build_schedule("1f1b", p, m, v), forward, backward, transfer)
    times = when(timeline)

    ends = {(a.kind, a.micro_batch, a.chunk * p + rank): end for (rank, a), (_, end) in times.items()}
    for rank, actions in enumerate(timeline.schedule.actions):
        free: Time = 0
        for action in actions:
            kind, micro_batch, chunk = action
            stage = chunk * p + rank
            start, finished = times[rank, action]
            took = (forward if kind == "forward" else backward)[stage]
            source = (kind, micro_batch, stage - 1 if kind == "forward" else stage + 1)
            arrived = ends[source] + transfer if source in ends else 0
            assert start == max(free, arrived)
            assert finished == start + took
            free = finished


def test_evaluation_with_transfers_takes_the_closed_form() -> None:
    p, m, forward, transfer = 5, 7, Fraction(3, 10), Fraction(1, 10)
    timeline = simulate(build_schedule("1f1b", p, m, forward_only=True), forward, transfer=transfer)
    assert timeline.makespan == (m + p - 1) * forward + (p - 1) * transfer
    assert all(later >= earlier for earlier, later in pairwise(timeline.ends[-1]))


def test_times_that_are_no_times_are_refused() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    for wrong in ([1.0], [1.0, 0.0], 0, -1.0):
        with pytest.raises(ValueError, match="there must be 2, all above 0"):
            simulate(schedule, forward=wrong)
