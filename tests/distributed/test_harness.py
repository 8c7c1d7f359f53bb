"""The harness itself: ranks that work, raise, hang and die, and the counter of collectives."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import RankError, Ranks, RankTimeout


def rank_and_sum(rank: int, world_size: int, offset: int) -> tuple[int, int, float, int]:
    total = torch.tensor(float(rank + offset))
    dist.all_reduce(total)
    return rank, world_size, total.item(), os.getpid()


def raise_on(rank: int, world_size: int, guilty: int) -> None:
    if rank == guilty:
        raise ZeroDivisionError(f"the cause on rank {rank}")
    dist.all_reduce(torch.ones(1))


def raise_later_on_others(rank: int, world_size: int, guilty: int, raised: str) -> None:
    if rank != guilty:
        while not Path(raised).exists():
            time.sleep(0.01)
        time.sleep(0.5)  # the guilty rank notes the moment in this time; whoever comes later counts as later anyway
    else:
        Path(raised).touch()
    raise KeyError(f"raised by {rank}")


def hang_on(rank: int, world_size: int, guilty: int) -> None:
    while rank == guilty:
        time.sleep(0.05)


def die_on(rank: int, world_size: int, guilty: int) -> None:
    if rank == guilty:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def die_with_a_child_left(rank: int, world_size: int, note: str) -> None:
    """As a rank does whose data loader has workers: they keep its connections open. `note` is there while it lives."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os.unlink(note)
        os._exit(0)
    Path(note).write_text(str(child))
    os._exit(7)


def return_what_cannot_be_pickled(rank: int, world_size: int) -> object:
    return lambda: rank


def leave_state_behind(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(17 + rank)
    dist.new_group([0])


def state(rank: int, world_size: int) -> tuple[torch.dtype, int, int, int, str]:
    threads, omp = torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]
    return torch.get_default_dtype(), torch.initial_seed(), dist.get_world_size(), threads, omp


def finish_early(rank: int, world_size: int) -> float:
    """Rank 0 has nothing more to do while the others still talk to each other, and to what it sent them."""
    value = torch.full((1000,), float(rank))
    dist.broadcast(value, 0)
    if rank != 0:
        time.sleep(0.1)
        group_value = value + 1
        (dist.send if rank == 1 else dist.recv)(group_value, 3 - rank)
    return value.sum().item()


def speak(rank: int, world_size: int) -> None:
    # Line and end in one write: where Python's output has no buffer (PYTHONUNBUFFERED) print writes the end by itself.
    print(f"hello from rank {rank}\n", end="")


def test_results_come_in_order_and_workers_are_reused(ranks: Ranks) -> None:
    first = ranks(2, rank_and_sum, 10)
    again = ranks(3, rank_and_sum, 0)
    assert [entry[:3] for entry in first] == [(0, 2, 21.0), (1, 2, 21.0)]
    assert [entry[:3] for entry in again] == [(0, 3, 3.0), (1, 3, 3.0), (2, 3, 3.0)]
    assert [entry[3] for entry in first] == [entry[3] for entry in again[:2]]


def test_one_rank_is_a_group_of_one(ranks: Ranks) -> None:
    assert ranks(1, rank_and_sum, 5)[0][:3] == (0, 1, 5.0)


def test_the_first_failing_rank_is_named_with_its_traceback(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(3, raise_on, 1)
    assert caught.value.rank == 1
    assert "ZeroDivisionError: the cause on rank 1" in str(caught.value)
    assert "in raise_on" in str(caught.value)


def test_the_earliest_of_several_errors_is_the_one_told(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="raised by 1"):
        ranks(2, raise_later_on_others, 1, str(tmp_path / "raised"))


def test_a_hanging_rank_is_named_and_shown(ranks: Ranks) -> None:
    ranks(2, rank_and_sum, 0)  # both are there, and have this module: rank 0 has little to do in its three seconds
    with pytest.raises(RankTimeout) as caught:
        ranks(2, hang_on, 1, timeout=3.0)
    assert caught.value.ranks == [1]
    assert "hang_on" in str(caught.value)


def test_a_dead_rank_is_the_cause_and_not_its_peers(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 1 died: its process ended with exit code 7") as caught:
        ranks(3, die_on, 1)
    assert caught.value.rank == 1


def test_a_dead_rank_is_noticed_while_its_children_live(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="exit code 7"):
        ranks(1, die_with_a_child_left, str(tmp_path / "child"))
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_the_pool_works_after_failures_with_new_processes(ranks: Ranks) -> None:
    before = [entry[3] for entry in ranks(2, rank_and_sum, 0)]
    with pytest.raises(RankError):
        ranks(2, raise_on, 0)
    after = [entry[3] for entry in ranks(2, rank_and_sum, 0)]
    assert not set(before) & set(after)


def test_a_result_that_cannot_be_pickled_is_that_ranks_failure(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 0 failed"):
        ranks(1, return_what_cannot_be_pickled)


def test_a_call_does_not_see_what_the_last_one_left(ranks: Ranks) -> None:
    ranks(2, leave_state_behind)
    assert ranks(2, state) == [(torch.float32, 0, 2, 1, "1")] * 2


def test_a_rank_that_is_done_does_not_disturb_the_others(ranks: Ranks) -> None:
    assert ranks(3, finish_early) == [0.0, 0.0, 0.0]


def test_output_of_ranks_passes_through(repository: Path) -> None:
    program = "from tests.distributed.test_harness import Ranks, speak\nwith Ranks() as ranks: ranks(2, speak)"
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["hello from rank 0", "hello from rank 1"]


def test_functions_that_workers_cannot_find_are_refused(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="top level"):
        ranks(2, lambda rank, world_size: None)
    with pytest.raises(ValueError, match="1 to 8"):
        ranks(9, state)


class AllReduceBothWays(torch.autograd.Function):
    """Sums over the ranks forwards and backwards."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, async_op=True).wait()
        return gradient


def count_each_kind(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int], list[int]]:
    x, whole = torch.ones(6), torch.ones(12)  # 24 and 48 bytes
    with CollectiveCounter() as counter:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.all_gather([torch.empty(6) for _ in range(world_size)], x)
        dist.reduce_scatter(torch.empty(6), [torch.ones(6) for _ in range(world_size)])
        dist.broadcast(whole, 0)
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        dist.barrier()
        torch.ones(3).add_(1)
    sizes = [call.group_size for call in counter.calls]
    return dict(counter.counts), dict(counter.bytes), sizes


def count_gather_and_scatter_of_tensors(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with CollectiveCounter() as counter:
        gather(torch.empty(12), torch.ones(6))
        scatter(torch.empty(6), torch.ones(12))
    return dict(counter.counts), dict(counter.bytes)


def count_backward(rank: int, world_size: int) -> tuple[int, int]:
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with CollectiveCounter() as forward:
        loss = AllReduceBothWays.apply(x).sum()
    with CollectiveCounter() as backward:
        loss.backward()
    return forward.bytes["all_reduce"], backward.bytes["all_reduce"]


def count_one_group_only(rank: int, world_size: int) -> tuple[int, int, int]:
    pair, everyone = dist.new_group([0, 1]), dist.group.WORLD
    with CollectiveCounter() as all_calls, CollectiveCounter(pair) as pair_calls, CollectiveCounter(everyone) as rest:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
        if rank < 2:
            dist.all_reduce(torch.ones(1), group=pair)
    return all_calls.counts["all_reduce"], pair_calls.counts["all_reduce"], rest.counts["all_reduce"]


def count_functional(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    import torch.distributed._functional_collectives as functional

    with CollectiveCounter(dist.group.WORLD) as counter:
        functional.all_reduce(torch.ones(6), "sum", dist.group.WORLD).wait()
        functional.all_gather_tensor(torch.ones(6), 0, dist.group.WORLD).wait()
    return dict(counter.counts), dict(counter.bytes)


def test_counter_sees_each_kind_and_its_bytes(ranks: Ranks) -> None:
    kinds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "barrier": 1}
    moved = {"all_reduce": 48, "all_gather": 48, "reduce_scatter": 48, "broadcast": 48, "barrier": 0}
    for rank, (counts, nbytes, sizes) in enumerate(ranks(2, count_each_kind)):
        point_to_point = "send" if rank == 0 else "recv"
        assert counts == kinds | {point_to_point: 1}
        assert nbytes == moved | {point_to_point: 24}
        assert sizes == [2] * 7


def test_counter_sees_gathers_and_scatters_of_one_tensor(ranks: Ranks) -> None:
    expected = ({"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 48, "reduce_scatter": 48})
    assert ranks(2, count_gather_and_scatter_of_tensors) == [expected] * 2


def test_counter_tells_forward_from_backward(ranks: Ranks) -> None:
    assert ranks(2, count_backward) == [(32, 32)] * 2


def test_counter_can_watch_one_group(ranks: Ranks) -> None:
    assert ranks(3, count_one_group_only) == [(3, 1, 2), (3, 1, 2), (2, 0, 2)]


def test_counter_sees_functional_collectives(ranks: Ranks) -> None:
    expected = ({"all_reduce": 1, "all_gather": 1}, {"all_reduce": 24, "all_gather": 48})
    assert ranks(2, count_functional) == [expected] * 2
