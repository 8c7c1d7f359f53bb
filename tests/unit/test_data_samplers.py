"""The sampler: one global order whatever the layout, and a resume after any number of samples."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.samplers import GlobalBatchSampler


def global_batches(samplers: list[GlobalBatchSampler]) -> list[list[int]]:
    """The samples of each global batch, in the order of micro-batches and ranks."""
    first = samplers[0]
    per_step = first.global_batch_size // (first.micro_batch_size * first.data_size)
    steps: list[list[int]] = []
    for number, micro_batches in enumerate(zip(*samplers, strict=True)):
        if number % per_step == 0:
            steps.append([])
        for micro_batch in micro_batches:
            assert len(micro_batch) == first.micro_batch_size
            steps[-1] += micro_batch
    return steps


def all_ranks(total: int, consumed: int, micro: int, whole: int, ranks: int) -> list[GlobalBatchSampler]:
    return [GlobalBatchSampler(total, consumed, micro, whole, data_rank=rank, data_size=ranks) for rank in range(ranks)]


def chunks(numbers: Iterable[int], size: int) -> list[list[int]]:
    numbers = list(numbers)
    return [numbers[i : i + size] for i in range(0, len(numbers) - size + 1, size)]


@given(
    st.integers(0, 200),
    st.integers(0, 220),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_the_order_depends_on_neither_ranks_nor_micro_batch(
    total: int, consumed: int, micro: int, ranks: int, accumulation: int
) -> None:
    whole = micro * ranks * accumulation
    samplers = all_ranks(total, consumed, micro, whole, ranks)
    assert global_batches(samplers) == chunks(range(consumed, total), whole)
    assert {len(sampler) for sampler in samplers} == {len(list(samplers[0]))}


@given(st.integers(0, 12), st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 2), (4, 2)]), st.integers(0, 7))
def test_a_run_that_is_resumed_elsewhere_goes_on_in_the_same_order(
    stop: int, layout: tuple[int, int], start: int
) -> None:
    uninterrupted = global_batches(all_ranks(103, start, 8, 8, 1))
    micro, ranks = layout
    resumed = global_batches(all_ranks(103, start + 8 * stop, micro, 8, ranks))
    assert uninterrupted[stop:] == resumed


def test_ranks_take_neighbouring_micro_batches() -> None:
    assert [list(sampler) for sampler in all_ranks(9, 0, 2, 8, 2)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize(("micro", "whole", "ranks"), [(2, 6, 2), (0, 4, 1), (2, 0, 1), (4, 2, 1)])
def test_sizes_that_do_not_divide_are_refused(micro: int, whole: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"--global-batch-size {whole}: .* --micro-batch-size {micro} times {ranks}"):
        GlobalBatchSampler(100, 0, micro, whole, data_size=ranks)
