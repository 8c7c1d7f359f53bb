"""Batch sizes that ramp up: Megatron-LM 2.5's formula, and the same batches after a resume and at any layout."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data import BatchSchedule, GlobalBatchSampler, RampUp


def sizes(schedule: BatchSchedule, iterations: int) -> list[int]:
    consumed, found = 0, []
    for _ in range(iterations):
        found.append(schedule.size(consumed))
        consumed += found[-1]
    return found


@st.composite
def schedules(draw: st.DrawFn, unit: int = 1) -> BatchSchedule:
    start, increment = draw(st.integers(1, 4)) * unit, draw(st.integers(1, 4)) * unit
    steps = draw(st.integers(0, 5))
    return BatchSchedule(start + steps * increment, RampUp(start, increment, draw(st.integers(0, 120))))


def test_a_ramp_up_by_hand() -> None:
    schedule = BatchSchedule(8, RampUp(2, 2, 30))  # three increments, one every 10 samples
    assert sizes(schedule, 11) == [2, 2, 2, 2, 2, 4, 4, 4, 6, 6, 8]
    assert [schedule.size(c) for c in (0, 9, 10, 19, 20, 29, 30, 10**9)] == [2, 2, 4, 4, 6, 6, 8, 8]


def test_nothing_is_divided_by_zero() -> None:
    assert sizes(BatchSchedule(8, RampUp(8, 2, 30)), 3) == [8, 8, 8]
    assert sizes(BatchSchedule(8, RampUp(2, 2, 0)), 3) == [8, 8, 8]
    assert sizes(BatchSchedule(8), 3) == [8, 8, 8]


@given(schedules(), st.integers(0, 200))
def test_by_the_formula(schedule: BatchSchedule, consumed: int) -> None:
    ramp, full = schedule.ramp_up, schedule.global_batch_size
    assert ramp is not None
    assert schedule.problems() == []
    expected = full
    if full > ramp.start and consumed < ramp.samples:
        expected = ramp.start + int(consumed / (ramp.samples / ((full - ramp.start) / ramp.increment))) * ramp.increment
    assert schedule.size(consumed) == expected
    assert all(a <= b <= full for a, b in pairwise(sizes(schedule, 40)))


@given(schedules(), st.integers(0, 60), st.integers(0, 60))
def test_samples_and_batches_are_counted(schedule: BatchSchedule, first: int, more: int) -> None:
    whole = sizes(schedule, first + more)
    consumed = schedule.consumed_after(first)
    assert consumed == sum(whole[:first])
    assert schedule.consumed_after(more, consumed) == sum(whole)
    assert schedule.batches_until(sum(whole), consumed) == more
    assert schedule.batches_until(sum(whole) - 1, consumed) == max(more - 1, 0)


@pytest.mark.parametrize(
    ("ramp", "words"),
    [
        ((0, 2, 9), "must be at least 1"),
        ((2, 0, 9), "must be at least 1"),
        ((2, 2, -1), "at least 0"),
        ((2, 4, 9), "increments of 4 must lead from 2 to 8"),
        ((9, 1, 9), "increments of 1 must lead from 9 to 8"),
    ],
)
def test_numbers_that_lead_nowhere_are_told(ramp: tuple[int, int, int], words: str) -> None:
    (told,) = BatchSchedule(8, RampUp(*ramp)).problems()
    assert words in told
    assert told.startswith(f"--rampup-batch-size {' '.join(map(str, ramp))}: ")


def test_a_start_that_does_not_fill_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="--rampup-batch-size 2 2 9: .* --micro-batch-size 2 times 2"):
        GlobalBatchSampler(100, 0, 2, 8, 0, 2, RampUp(2, 2, 9))


@given(schedules(unit=4), st.integers(0, 30), st.sampled_from([(1, 1), (4, 1), (2, 2), (1, 4)]), st.integers(0, 200))
def test_the_order_is_one_whatever_the_layout_and_wherever_it_is_resumed(
    schedule: BatchSchedule, stop: int, layout: tuple[int, int], total: int
) -> None:
    micro, ranks = layout
    whole, ramp = schedule.global_batch_size, schedule.ramp_up
    consumed = schedule.consumed_after(stop)
    samplers = [GlobalBatchSampler(total, consumed, micro, whole, rank, ranks, ramp) for rank in range(ranks)]
    assert {len(sampler) for sampler in samplers} == {len(list(samplers[0]))}
    streams = [iter(sampler) for sampler in samplers]
    left = range(consumed, total)
    while len(left) >= schedule.size(left.start):
        size = schedule.size(left.start)
        batch: list[int] = []
        for _ in range(size // (micro * ranks)):
            for stream in streams:
                batch += next(stream)
        assert batch == list(left[:size])
        left = left[size:]
    assert [next(stream, None) for stream in streams] == [None] * ranks
