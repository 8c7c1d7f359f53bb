"""The optimizer over tensor and data ranks against one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from megatron.optimizer import Optimizer, OptimizerConfig
from tests.harness.closeness import assert_close
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks

WIDTH, HIDDEN = 8, 12
CONFIG = OptimizerConfig(weight_decay=0.1, clip_grad=0.5)


class Block(nn.Module):
    """Two parallel matrices with a replicated norm in front."""

    def __init__(self, group: mpu.GroupInfo | None = None, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = mpu.ColumnParallelLinear(WIDTH, HIDDEN, gather_output=False, group=group, dtype=dtype)
        self.down = mpu.RowParallelLinear(HIDDEN, WIDTH, input_is_parallel=True, group=group, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.up(self.norm(x))
        return self.down(torch.tanh(hidden))[0]


def start(group: mpu.GroupInfo | None = None, dtype: torch.dtype = torch.float64) -> Block:
    """The same model on every rank and in one process."""
    mpu.get_rng_tracker().reset()
    mpu.model_parallel_manual_seed(5)
    return Block(group, dtype)


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def serial(steps: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Norms, last gradients and weights of one process."""
    model = start(mpu.SERIAL_GROUP)
    optimizer = Optimizer(model, mpu.parameter_shardings(model), CONFIG)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()
        optimizer.reduce_gradients(4.0)
        norms.append(optimizer.step(0.05).grad_norm)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return norms, copy.deepcopy(optimizer.gradients()), weights


def parallel(rank: int, world_size: int, tensor: int, steps: int) -> None:
    mpu.initialize_model_parallel(tensor)
    expected_norms, expected_gradients, expected_weights = serial(steps)
    model = start()
    shardings = mpu.parameter_shardings(model)
    optimizer = Optimizer(
        model,
        shardings,
        CONFIG,
        data_group=mpu.get_data_parallel_group(),
        tensor_group=mpu.get_tensor_model_parallel_group(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
    )
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        mine = batch(step).chunk(mpu.get_data_parallel_world_size())[mpu.get_data_parallel_rank()]
        for part in mine.split(1):
            model(part).square().sum().backward()
        optimizer.reduce_gradients(4.0)
        norms.append(optimizer.step(0.05).grad_norm)
    assert_close(norms, expected_norms, 1e-12)
    for name, parameter in model.named_parameters():
        for piece in shardings[name].pieces(tuple(parameter.shape)):
            assert_close(optimizer.gradients()[name][piece.local], expected_gradients[name][piece.region], 1e-12)
            assert_close(parameter[piece.local], expected_weights[name][piece.region], 1e-12)


@pytest.mark.parametrize(("world", "tensor"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_equals_one_process(ranks: Ranks, world: int, tensor: int) -> None:
    ranks(world, parallel, tensor, 4)


def count(rank: int, world_size: int) -> tuple[list[tuple[str, int, int]], int, int]:
    mpu.initialize_model_parallel(2)
    data, tensor = mpu.get_data_parallel_group(), mpu.get_tensor_model_parallel_group()
    model = start(dtype=torch.float32)
    optimizer = Optimizer(
        model,
        mpu.parameter_shardings(model),
        CONFIG,
        data_group=data,
        tensor_group=tensor,
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
    )
    with CollectiveCounter(data) as in_backward:
        for part in batch(0).float().split(2):
            model(part).sum().backward()
    with CollectiveCounter() as in_step:
        optimizer.reduce_gradients(4.0)
        optimizer.step(0.1)
    calls = [(call.kind, call.bytes, call.group_size) for call in in_step.calls]
    return calls, len(in_backward.calls), sum(p.numel() for p in model.parameters())


def test_one_all_reduce_for_the_bucket_and_a_few_numbers_for_the_norm(ranks: Ranks) -> None:
    for in_step, in_backward, parameters in ranks(4, count):
        # Six parameters, each with up to 64 elements, and a number for each of 2 tensor ranks x 2 data shards.
        assert parameters < 6 * 64
        assert in_step == [("all_reduce", 4 * 6 * 64, 2), ("all_reduce", 8 * 4, 2)]
        assert in_backward == 0


def one_bad_rank(rank: int, world_size: int) -> str:
    mpu.initialize_model_parallel(2)
    model = start()
    optimizer = Optimizer(
        model,
        mpu.parameter_shardings(model),
        CONFIG,
        tensor_group=mpu.get_tensor_model_parallel_group(),
        tensor_rank=rank,
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if rank == 1:
        optimizer.gradients()["up.weight"].fill_(float("inf"))
    with pytest.raises(FloatingPointError) as caught:
        optimizer.step(0.1)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    dist.barrier()
    return str(caught.value)


def test_a_bad_gradient_on_one_tensor_rank_stops_all(ranks: Ranks) -> None:
    first, second = ranks(2, one_bad_rank)
    assert "all gradients of this rank are finite" in first
    assert "up.weight" in second


def data_ranks_stay_equal(rank: int, world_size: int) -> list[float]:
    mpu.initialize_model_parallel(1)
    model = start(dtype=torch.float32)
    optimizer = Optimizer(model, mpu.parameter_shardings(model), CONFIG, data_group=mpu.get_data_parallel_group())
    for step in range(5):
        optimizer.zero_grad()
        model(batch(step * world_size + rank).float()).square().sum().backward()
        optimizer.reduce_gradients(4.0 * world_size)
        optimizer.step(0.05)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def test_replicas_stay_bit_equal_on_different_samples(ranks: Ranks) -> None:
    results = ranks(4, data_ranks_stay_equal)
    assert all(result == results[0] for result in results)
