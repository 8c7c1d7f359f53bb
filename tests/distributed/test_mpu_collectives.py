"""Collectives that are begun and waited for: the same results as those that are done at once, in place too."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron import mpu
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
N = 3


def of_rank(rank: int, dtype: torch.dtype, rows: int) -> Tensor:
    return (torch.arange(rows * 2).view(rows, 2) % 7 + rank).to(dtype)  # small whole numbers: sums are exact


def started(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(world_size)
    mine = slice(rank * N, rank * N + N)
    for dtype, strided in itertools.product(DTYPES, (False, True)):
        each = [of_rank(r, dtype, N * world_size) for r in range(world_size)]
        total = sum(each[1:], each[0])
        given = each[rank].t().contiguous().t() if strided else each[rank].clone()
        assert given.is_contiguous() is not strided
        with CollectiveCounter() as counter:
            scattered = mpu.start_reduce_scatter_first_dim(given)
            gathered = mpu.start_all_gather_first_dim(given[mine])
            assert torch.equal(scattered.wait(), total[mine])
            assert torch.equal(gathered.wait(), torch.cat([x[r * N : r * N + N] for r, x in enumerate(each)]))
            assert torch.equal(given, each[rank])
            reduced = mpu.start_all_reduce(given)
            assert reduced.wait() is given
            assert reduced.wait() is given  # nothing happens again
        assert torch.equal(given, total)
        assert counter.counts == ({} if world_size == 1 else {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 1})


def in_place(rank: int, world_size: int) -> None:
    """Into a slice of the input, and out of a slice of the output: flat buffers need no second one."""
    mpu.initialize_model_parallel(world_size)
    forms: list[tuple[Any, Any]] = [
        (mpu.reduce_scatter_first_dim, mpu.all_gather_first_dim),
        (
            lambda x, out: mpu.start_reduce_scatter_first_dim(x, out=out).wait(),
            lambda x, out: mpu.start_all_gather_first_dim(x, out=out).wait(),
        ),
    ]
    for dtype, (scatter, gather) in itertools.product(DTYPES, forms):
        flat = of_rank(rank, dtype, N * world_size)
        total = sum((of_rank(r, dtype, N * world_size) for r in range(1, world_size)), of_rank(0, dtype, flat.size(0)))
        part = flat[rank * N : rank * N + N]
        assert scatter(flat, out=part).data_ptr() == part.data_ptr()
        assert torch.equal(part, total[rank * N : rank * N + N])
        assert gather(part, out=flat) is flat
        assert torch.equal(flat, total)


def test_begun_and_waited_for(ranks: Ranks) -> None:
    for size in (1, 2, 4):
        ranks(size, started)
        ranks(size, in_place)


def refuse(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(world_size)
    with pytest.raises(ValueError, match="first dimension of size 5: it must be divisible by the group's 2 ranks"):
        mpu.start_reduce_scatter_first_dim(torch.ones(5))


def test_unequal_shares_are_refused(ranks: Ranks) -> None:
    ranks(2, refuse)
