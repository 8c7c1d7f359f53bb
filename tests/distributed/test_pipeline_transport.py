"""What the ranks of a pipeline send each other: how much, in which batches, when; and what happens when one fails."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from megatron.pipeline import Action, Exchange, Message, Schedule, build_schedule, input_of, programs
from megatron.pipeline.executor import Boundary, Transport, run_program
from tests.harness.collectives import CollectiveCounter
from tests.harness.launch import REPOSITORY, environment
from tests.harness.pipeline_toy import SHAPE, Toy, check_against_twin, make_transport, residual
from tests.harness.ranks import RankError, Ranks

WHOLE = 3 * 2 * 8 * 8  # bytes of one boundary tensor


def boundaries_sent(schedule: Schedule, rank: int) -> int:
    """Boundary tensors that a rank sends in one iteration: activations to the stage after, gradients to that before."""
    p, v, m = schedule.pipeline_size, schedule.virtual_size, schedule.num_micro_batches
    activations = v - (rank == p - 1)
    gradients = 0 if schedule.forward_only else v - (rank == 0)
    return m * (activations + gradients)


def volume(rank: int, world_size: int, t: int) -> None:
    p = world_size // t
    mpu.initialize_model_parallel(t, p)
    stage = mpu.get_pipeline_model_parallel_rank()
    tensor, pipeline = mpu.get_tensor_model_parallel_group(), mpu.get_pipeline_model_parallel_group()
    for shape, gathered in ((SHAPE, False), (SHAPE, True), ((3, 1, 1), True)):
        transport = make_transport(shape, scatter_gather=tensor if gathered else None)
        block = residual if shape == SHAPE else narrow
        for m, v, forward_only in ((5, 1, False), (4, 2, False), (8, 3, False), (4, 2, True)):
            toy = Toy(
                build_schedule("1f1b", p, m, v, forward_only=forward_only),
                block=lambda stage, block=block: block,
                shape_of=lambda micro_batch, shape=shape: shape,
            )
            with CollectiveCounter(pipeline) as between, CollectiveCounter(tensor) as inside:
                toy.run(transport)
            check_against_twin(toy)
            number = boundaries_sent(toy.schedule, stage)
            received = boundaries_sent(toy.schedule, 1 - stage) if p == 2 else None
            whole = torch.Size(shape).numel() * 8
            parted = gathered and t > 1 and shape == SHAPE  # three values are not divided by two
            assert between.counts["send"] == number
            assert between.bytes["send"] == number * whole // (t if parted else 1)
            assert received is None or between.bytes["recv"] == received * whole // (t if parted else 1)
            assert set(between.counts) == {"send", "recv"}
            assert received is None or inside.counts == ({"all_gather": received} if parted else {})


def narrow(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.tanh(x * linear.weight[0, 0] + linear.bias[0])


def test_bytes_of_an_iteration_with_and_without_scatter_gather(ranks: Ranks) -> None:
    ranks(4, volume, 2)
    ranks(4, volume, 1)


def shape_by_number(micro_batch: int) -> tuple[int, ...]:
    return (1 + micro_batch, 2, 8) if micro_batch % 3 else (5, 8)


def varying(rank: int, world_size: int, t: int) -> None:
    p = world_size // t
    mpu.initialize_model_parallel(t, p)
    transport = make_transport(None, scatter_gather=mpu.get_tensor_model_parallel_group())
    for schedule in (
        build_schedule("1f1b", p, 5),
        build_schedule("gpipe", p, 5),
        build_schedule("1f1b", p, 2 * p, 3),
        build_schedule("1f1b", p, 5, forward_only=True),
        build_schedule("1f1b", p, 2 * p, 2),
    ):
        toy = Toy(schedule, shape_of=shape_by_number)
        with CollectiveCounter(mpu.get_pipeline_model_parallel_group()) as counter:
            toy.run(transport)
        check_against_twin(toy)
        # A shape goes ahead of each activation; none of a gradient.
        stage = mpu.get_pipeline_model_parallel_rank()
        shapes = schedule.num_micro_batches * (schedule.virtual_size - (stage == p - 1))
        assert counter.counts["send"] == boundaries_sent(schedule, stage) + shapes


def test_shapes_that_vary(ranks: Ranks) -> None:
    ranks(4, varying, 1)
    ranks(4, varying, 2)


class Batches:
    """In the place of `batch_isend_irecv`: keeps what it is given, and fills receive buffers to see what comes in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[Any]] = []
        self._start = dist.batch_isend_irecv
        monkeypatch.setattr(dist, "batch_isend_irecv", self)

    def __call__(self, operations: list[Any]) -> Any:
        for operation in operations:
            if operation.op is dist.irecv:
                operation.tensor.fill_(torch.nan)
        self.batches.append(operations)
        return self._start(operations)


def one_batch_each(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(1, world_size)
    for schedule in (build_schedule("1f1b", world_size, 8), build_schedule("1f1b", world_size, 8, 3)):
        toy, transport = Toy(schedule), make_transport()
        with pytest.MonkeyPatch.context() as patch:
            seen = Batches(patch).batches
            toy.run(transport)
        exchanges = [i for i in toy.program if isinstance(i, Exchange)]
        wanted = [[m.destination for m in e.sends] + [m.source for m in e.receives] for e in exchanges]
        assert [[operation.peer for operation in batch] for batch in seen] == wanted


def test_each_exchange_is_one_batch(ranks: Ranks) -> None:
    ranks(2, one_batch_each)
    ranks(4, one_batch_each)


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def begun_early(toy: Toy) -> list[int]:
    """For each action of the program how many messages are being received that a later one needs."""
    found, begun = [], 0
    for instruction in toy.program:
        if isinstance(instruction, Exchange):
            begun += len(instruction.receives)
        else:
            begun -= input_of(toy.p, toy.schedule.virtual_size, toy.rank, instruction) is not None
            found.append(begun)
    return found


def arrives_meanwhile(rank: int, world_size: int) -> None:
    """Slow passes: each ends only when all that is being received then has come in, though nobody has waited for it."""
    mpu.initialize_model_parallel(1, world_size)
    transport = make_transport()
    found: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        batches = Batches(patch).batches

        def slow(linear: nn.Linear, x: Tensor) -> Tensor:
            h = residual(linear, x)
            h.register_hook(lambda gradient: wait_for_arrival())
            wait_for_arrival()
            return h

        def wait_for_arrival() -> None:
            receives = [o.tensor for batch in batches for o in batch if o.op is dist.irecv]
            assert wait_until(lambda: not any(bool(x.isnan().any()) for x in receives))
            found.append(len(receives) - sum(event.kind == "wait" for event in toy.events))

        toy = Toy(build_schedule("1f1b", world_size, 8, 2), block=lambda stage: slow)
        toy.run(transport)
    assert found == begun_early(toy)
    assert max(found) > 0
    check_against_twin(toy)


def goes_on_meanwhile(rank: int, world_size: int, folder: str) -> None:
    """Rank 0 makes the second activation only once rank 1, which is to receive it, is in its first backward pass."""
    mpu.initialize_model_parallel(1, world_size)
    in_backward = Path(folder) / "in_backward"
    calls = iter(range(100))

    def block(linear: nn.Linear, x: Tensor) -> Tensor:
        h = residual(linear, x)
        if rank == 1:
            h.register_hook(lambda gradient: in_backward.touch())
        elif next(calls) == 1:
            assert wait_until(in_backward.exists)
        return h

    schedule = build_schedule("1f1b", 2, 4)
    toy = Toy(schedule, block=lambda stage: block)
    second = Message("activation", 1, 0, 0, 1, 0)
    where = {m: n for n, i in enumerate(programs(schedule)[1]) if isinstance(i, Exchange) for m in i.receives}
    assert where[second] < programs(schedule)[1].index(Action("backward", 0, 0))
    toy.run(make_transport())
    assert toy.done() == toy.program


def test_receives_run_behind_passes(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, arrives_meanwhile)
    ranks(4, arrives_meanwhile)
    ranks(2, goes_on_meanwhile, str(tmp_path))


def wrong_output(rank: int, world_size: int, kind: str) -> None:
    mpu.initialize_model_parallel(1, world_size)
    changes = {"shape": lambda x: x[:1], "dtype": lambda x: x.float()}
    toy = Toy(
        build_schedule("1f1b", world_size, 2),
        block=lambda stage: lambda linear, x: changes[kind](residual(linear, x)),
    )
    toy.run(make_transport())


def test_an_output_that_is_not_as_the_boundary_says_is_refused_where_it_is_made(ranks: Ranks) -> None:
    told = r"activation of micro-batch 0 from .*: it has shape \[1, 2, 8\].*said to have shape \[3, 2, 8\]"
    with pytest.raises(RankError, match=told):
        ranks(2, wrong_output, "shape")
    with pytest.raises(RankError, match=r"it has .* torch\.float32, on cpu; .* torch\.float64, on cpu"):
        ranks(2, wrong_output, "dtype")


def failing_stage(rank: int, rendezvous: str) -> None:
    """Run by a process of its own: rank 1 fails in the middle, with receives under way."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mpu.initialize_model_parallel(1, 2)
    toy = Toy(build_schedule("1f1b", 2, 8))

    def forward(chunk: int, micro_batch: int, received: Tensor | None) -> Tensor:
        if (rank, micro_batch) == (1, 3):
            raise RuntimeError("the fourth micro-batch is cursed")
        return toy.forward(chunk, micro_batch, received)

    transport = Transport(Boundary(SHAPE, torch.float64), mpu.get_pipeline_model_parallel_group())
    run_program(toy.program, forward, pipeline_size=2, rank=rank, transport=transport)


def test_a_stage_that_raises_ends_its_process(tmp_path: Path) -> None:
    program = f"from {__name__} import failing_stage; import sys; failing_stage(int(sys.argv[1]), sys.argv[2])"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(tmp_path / "rendezvous")],
            cwd=REPOSITORY,
            env=environment(GLOO_SOCKET_IFNAME="lo"),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, told = processes[1].communicate(timeout=100)
        assert processes[1].returncode == 1
        assert "RuntimeError: the fourth micro-batch is cursed" in told
        # The other one notices, as its peer is gone.
        _, told = processes[0].communicate(timeout=100)
        assert processes[0].returncode == 1
        assert "RuntimeError" in told
    finally:
        for process in processes:
            process.kill()
            process.wait()
