"""Local ranks of `megatron.parity`: results in order, several jobs at once, failures told and no process left."""

import multiprocessing
import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron.parity.ranks import Job, RanksFailed, run_jobs


def summed(value: int) -> tuple[int, int]:
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def failing(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("this is wrong")
        if how == "dies":
            os._exit(7)
        time.sleep(60)
    dist.barrier()


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())  # the ranks of other tests, which are kept
    yield
    assert not set(multiprocessing.active_children()) - before


def test_jobs_run_at_the_same_time_on_ranks_of_their_own() -> None:
    assert run_jobs([Job(1, summed, (5,)), Job(3, summed, (10,))], 60) == [[(0, 5)], [(0, 33), (1, 33), (2, 33)]]


@pytest.mark.parametrize(
    ("how", "timeout", "said"),
    [
        ("raises", 60.0, "(?s)rank 1 failed: Traceback.*ValueError: this is wrong"),
        ("dies", 60.0, "rank 1 failed: its process ended with exit code 7"),
        ("sleeps", 3.0, "ranks 0, 1 did not finish within 3 s"),
    ],
)
def test_the_rank_that_failed_first_is_named(how: str, timeout: float, said: str) -> None:
    with pytest.raises(RanksFailed, match=said):
        run_jobs([Job(2, failing, (how,))], timeout)


def test_the_job_that_failed_is_told() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_jobs([Job(1, summed, (1,)), Job(2, failing, ("raises",))], 60)
    assert caught.value.job == 1
