"""The optimizer over tensor and data ranks, plain and sharded, against one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from megatron.optimizer import Optimizer, OptimizerConfig
from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks

WIDTH, HIDDEN, WORDS = 8, 12, 21
TIED = "words.weight"
CONSTANTS: dict[str, Any] = {"weight_decay": 0.1, "clip_grad": 0.5, "ddp_bucket_size": 300}
PLAIN: dict[str, Any] = {}
OVERLAPPED = {"overlap_grad_reduce": True}
SHARDED = {"use_distributed_optimizer": True}
ALL = {**OVERLAPPED, **SHARDED, "overlap_param_gather": True}


class Block(nn.Module):
    """Two parallel matrices with a replicated norm in front."""

    def __init__(self, group: mpu.GroupInfo | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = mpu.ColumnParallelLinear(WIDTH, HIDDEN, gather_output=False, group=group, dtype=dtype)
        self.down = mpu.RowParallelLinear(HIDDEN, WIDTH, input_is_parallel=True, group=group, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.up(self.norm(x))
        return x + self.down(torch.tanh(hidden))[0]


class Net(nn.Module):
    """Split, replicated and tied parameters, a padded vocabulary, and a matrix that is never used."""

    def __init__(self, group: mpu.GroupInfo | None = None, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.words = mpu.VocabParallelEmbedding(24, WIDTH, real_num_embeddings=WORDS, group=group, dtype=dtype)
        self.unused = nn.Parameter(torch.ones(3, 5, dtype=dtype))
        self.blocks = nn.Sequential(*(Block(group, dtype) for _ in range(3)))
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.words(ids)))
        group = self.words.group
        logits = mpu.parallel_linear(hidden, self.words.weight, group=group)
        return mpu.gather_from_tensor_model_parallel_region(logits, group)[..., :WORDS]


def start(group: mpu.GroupInfo | None = None, dtype: torch.dtype = torch.float64) -> Net:
    """The same model on every rank and in one process."""
    mpu.get_rng_tracker().reset()
    mpu.model_parallel_manual_seed(5)
    return Net(group, dtype)


def make_optimizer(model: nn.Module, *args: Any, **choices: Any) -> Optimizer:
    """Over the current groups."""
    return Optimizer(
        model,
        mpu.parameter_shardings(model),
        OptimizerConfig(**{**CONSTANTS, **choices}),
        *args,
        data_group=mpu.get_data_parallel_group(),
        tensor_group=mpu.get_tensor_model_parallel_group(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        everyone=dist.group.WORLD,
        own_buckets=[TIED],
    )


def iterate(model: nn.Module, optimizer: Optimizer, steps: range, data: tuple[int, int] = (0, 1)) -> list[float]:
    """Gradient norms of some iterations of 4 samples, which data rank `data[0]` of `data[1]` takes its share of."""
    norms = []
    for step in steps:
        ids = torch.randint(WORDS, (4, 5), generator=torch.Generator().manual_seed(step))
        mine = ids.chunk(data[1])[data[0]].split(1)
        optimizer.zero_grad()
        for number, part in enumerate(mine):
            if number == len(mine) - 1:
                optimizer.last_micro_batch()
            (torch.sin(model(part)).sum() * optimizer.loss_scale).backward()
        optimizer.reduce_gradients(4.0)
        norms.append(optimizer.step(0.05).grad_norm)
    optimizer.wait_for_parameters()
    return norms


def data_place() -> tuple[int, int]:
    return mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()


def equals_serial(rank: int, world_size: int, tensor: int, kind: str) -> None:
    mpu.initialize_model_parallel(tensor)
    twin = start(mpu.SERIAL_GROUP)
    serial = Optimizer(twin, mpu.parameter_shardings(twin), OptimizerConfig(**CONSTANTS, optimizer=kind))
    norms = iterate(twin, serial, range(4))
    assert min(norms) > 0.5  # so that clipping is part of it
    weights = dict(twin.named_parameters())
    for choices in (PLAIN, OVERLAPPED, SHARDED, ALL):
        model = start()
        shardings = mpu.parameter_shardings(model)
        optimizer = make_optimizer(model, optimizer=kind, **choices)
        assert_close(iterate(model, optimizer, range(4), data_place()), norms, 1e-12)
        state = serial.state_tensors()
        for name, parameter in model.named_parameters():
            for piece in shardings[name].pieces(tuple(parameter.shape)):
                assert_close(parameter[piece.local], weights[name][piece.region], 1e-12)
        for name, (tensor_, place) in optimizer.state_tensors().items():
            for piece in place.pieces(tuple(tensor_.shape)):
                expected = state[name][0][piece.region]
                assert_close(tensor_[piece.local].view(piece.shape), expected, 1e-12, floor=1e-6)


@pytest.mark.parametrize(
    ("world", "tensor", "kind"), [(2, 1, "adam"), (2, 2, "sgd"), (4, 1, "adam"), (4, 2, "adam"), (4, 4, "adam")]
)
def test_equals_one_process(ranks: Ranks, world: int, tensor: int, kind: str) -> None:
    ranks(world, equals_serial, tensor, kind)


def one_bad_rank(rank: int, world_size: int, choices: dict[str, Any], bad_rank: int) -> str:
    mpu.initialize_model_parallel(2)
    model = start()
    optimizer = make_optimizer(model, **choices)
    iterate(model, optimizer, range(1), data_place())
    before = [t.detach().clone() for t in [*model.parameters(), *(t for t, _ in optimizer.state_tensors().values())]]
    optimizer.zero_grad()
    if rank == bad_rank:
        optimizer.gradients()["blocks.1.up.weight"].fill_(float("inf"))
    optimizer.reduce_gradients(1.0)
    with pytest.raises(FloatingPointError) as caught:
        optimizer.step(0.1)
    after = [*model.parameters(), *(t for t, _ in optimizer.state_tensors().values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert optimizer.step_count == 1
    return str(caught.value)


@pytest.mark.parametrize("choices", [PLAIN, ALL], ids=["plain", "sharded"])
def test_a_bad_gradient_on_one_rank_stops_all(ranks: Ranks, choices: dict[str, Any]) -> None:
    messages = ranks(4, one_bad_rank, choices, 3)
    here = ["blocks.1.up.weight" in message for message in messages]
    # It is of tensor rank 1, and there is on both data ranks, or on the one that holds that range.
    assert not here[0] and not here[2] and any(here)
    assert all("all gradients of this rank are finite" in m for m, bad in zip(messages, here, strict=True) if not bad)


class Replica(nn.Module):
    """Replicated parameters that work on another part of the samples on each tensor rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = nn.Linear(6, 30).double(), nn.Linear(30, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def mark_partial(layer: nn.Linear) -> None:
    layer.sharding = {
        name: mpu.Sharding(name, tuple(p.shape), None, 0, partial_gradient=True) for name, p in layer.named_parameters()
    }


def train_replica(model: Replica, optimizer: Optimizer, part: slice) -> list[float]:
    norms = []
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(x[part]).square().sum().backward()
        optimizer.reduce_gradients(8.0)
        norms.append(optimizer.step(0.05).grad_norm)
    return norms


def partial_gradients(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(2)
    twin = Replica()
    serial = Optimizer(twin, mpu.parameter_shardings(twin), OptimizerConfig(**CONSTANTS))
    norms = train_replica(twin, serial, slice(None))
    for choices in (PLAIN, SHARDED):
        model = Replica()
        mark_partial(model.first)
        mark_partial(model.last)
        optimizer = make_optimizer(model, **choices)
        assert_close(train_replica(model, optimizer, slice(2 * rank, 2 * rank + 2)), norms, 1e-12)
        assert_close(list(model.parameters()), list(twin.parameters()), 1e-12)


def test_partial_gradients_are_summed_over_the_tensor_ranks(ranks: Ranks) -> None:
    ranks(4, partial_gradients)
