"""Sharding and overlap change no bit, keep the promised bytes, and use the collectives that the closed form says."""

import contextlib
import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from megatron.base.rectangles import Rectangle, cover_problem
from megatron.mpu.collectives import Pending
from megatron.optimizer import Optimizer, OptimizerConfig, PrecisionConfig, main_gradient
from megatron.optimizer.buckets import Bucket
from tests.distributed.test_optimizer_parallel import (
    ALL,
    OVERLAPPED,
    PLAIN,
    SHARDED,
    TIED,
    data_place,
    iterate,
    make_optimizer,
    start,
)
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks
from tests.harness.storage import StorageMeter


def in_whole(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Weights, and the state of all data ranks put together."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    mine = optimizer.state_tensors()
    if not optimizer.sharded:
        return found | {name: tensor.clone() for name, (tensor, _) in mine.items()}
    gathered: list[Any] = [None] * mpu.get_data_parallel_world_size()
    dist.all_gather_object(gathered, mine, group=mpu.get_data_parallel_group())
    for part in gathered:
        for name, (tensor, place) in part.items():
            shape = place.parameter_shape
            found.setdefault(name, torch.full(shape, math.nan, dtype=tensor.dtype))
            found[name].view(-1)[place.begin : place.end] = tensor
    return found


def bit_equal(
    rank: int, world_size: int, tensor: int, precision: PrecisionConfig, variants: list[dict[str, Any]]
) -> tuple[int, int]:
    """Trains the same model by each variant; returns the number of tensors of the last's state, and of those held."""
    mpu.initialize_model_parallel(tensor)
    results = []
    for choices in variants:
        model = start(dtype=precision.dtype)
        optimizer = make_optimizer(model, precision, clip_grad=0.3, **choices)
        norms = iterate(model, optimizer, range(3), data_place())
        assert min(norms) > 0.3
        results.append((norms, in_whole(optimizer, model)))
    norms, expected = results[0]
    for other_norms, other in results[1:]:
        assert other_norms == norms
        assert other.keys() == expected.keys()
        differing = [name for name in expected if not torch.equal(other[name], expected[name])]
        assert not differing
    state = [tensor for tensor, _ in optimizer.state_tensors().values()]
    return len(state), sum(tensor.numel() > 0 for tensor in state)


@pytest.mark.parametrize(
    ("world", "tensor", "precision"),
    [
        (2, 1, PrecisionConfig()),
        (4, 1, PrecisionConfig()),
        (4, 2, PrecisionConfig()),
        (2, 1, PrecisionConfig(bf16=True)),
        (2, 1, PrecisionConfig(fp16=True, loss_scale=16.0)),
    ],
    ids=["2", "4", "2 of 2 tensor ranks", "bf16", "fp16"],
)
def test_plain_sharded_and_overlapped_are_bit_equal(
    ranks: Ranks, world: int, tensor: int, precision: PrecisionConfig
) -> None:
    variants = [PLAIN, OVERLAPPED, SHARDED, ALL]
    if precision.is_mixed:  # products of float16 are slow on CPUs
        variants = [PLAIN, ALL]
    held = ranks(world, bit_equal, tensor, precision, variants)
    # Small buckets are cut inside of parameters: the data ranks together hold more parts than there are tensors.
    assert sum(parts for _, parts in held) > tensor * held[0][0]


def collectives(rank: int, world_size: int, choices: dict[str, Any]) -> dict[str, Any]:
    mpu.initialize_model_parallel(2)
    data = mpu.get_data_parallel_group()
    model = start(dtype=torch.float32)
    optimizer = make_optimizer(model, **choices)
    iterate(model, optimizer, range(1), data_place())
    optimizer.zero_grad()
    ids = torch.arange(10).view(2, 5)
    with CollectiveCounter(data) as early:
        model(ids).sum().backward()
    optimizer.last_micro_batch()
    with CollectiveCounter(data) as late:
        model(ids).sum().backward()
    with CollectiveCounter() as rest:
        optimizer.reduce_gradients(4.0)
        optimizer.step(0.1)
    return {
        "early": len(early.calls),
        "late": [call.kind for call in late.calls],
        "data": [(c.kind, c.bytes) for c in [*late.calls, *rest.calls] if c.group_size == 2 and c.bytes > 64],
        "norm": [(c.kind, c.bytes, c.group_size) for c in rest.calls if c.bytes <= 64],
    }


# Elements on one tensor rank of two, in the order of backward. Each parameter takes a multiple of 64 of its bucket.
_BLOCK = [8, 48, 6, 48, 8, 8]  # down.bias, down.weight, up.bias, up.weight, norm.bias, norm.weight
_BACKWARD = [8, 8, *_BLOCK * 3]  # norm.bias, norm.weight, the blocks


def bucket_sizes(data: int) -> list[int]:
    """The closed form for buckets that are full with 300 elements: one full, half of the words alone, the rest."""
    full = next(n for n in range(len(_BACKWARD)) if sum(_BACKWARD[:n]) >= 300)
    rest = [*_BACKWARD[full:], 15]  # the unused matrix belongs to the model itself, which puts it first
    padded = [64 * full, -(-12 * 8 // 64) * 64, 64 * len(rest)]
    return [-(-size // (64 * data)) * 64 * data for size in padded]


@pytest.mark.parametrize("choices", [PLAIN, OVERLAPPED, SHARDED, ALL], ids=["plain", "overlap", "sharded", "all"])
def test_number_and_bytes_of_collectives(ranks: Ranks, choices: dict[str, Any]) -> None:
    sizes = [4 * size for size in bucket_sizes(2)]
    assert len(sizes) == 3
    sharded = "use_distributed_optimizer" in choices
    reduction = "reduce_scatter" if sharded else "all_reduce"
    expected = [(reduction, size) for size in sizes]
    if sharded:  # what forward needs first comes first
        expected += [("all_gather", size) for size in reversed(sizes)]
    for found in ranks(4, collectives, choices):
        assert found["early"] == 0  # only the last micro-batch reduces
        assert found["data"] == expected
        assert found["late"] == ([reduction] * 3 if "overlap_grad_reduce" in choices else [])
        assert found["norm"] == [("all_reduce", 8 * 2 * 2, 4 if sharded else 2)]


class Wide(nn.Module):
    """Sizes that need padding: 72 x 67 matrices and their biases, an odd scale."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(67, 72, dtype=dtype) for _ in range(40))
        self.scale = nn.Parameter(torch.ones(3, dtype=dtype))


class Peak(StorageMeter):
    """Also the most bytes that lived after any operator."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self._sum_up())
        return result


def kept_bytes(rank: int, world_size: int, precision: PrecisionConfig) -> tuple[float, float, int]:
    """Bytes a parameter, after some steps and at the peak of the last one, and the number of parameters."""
    mpu.initialize_model_parallel(1)
    with Peak() as meter:
        model = Wide(precision.dtype)
        config = OptimizerConfig(use_distributed_optimizer=True, ddp_bucket_size=20_000)
        optimizer = Optimizer(
            model,
            mpu.parameter_shardings(model),
            config,
            precision,
            data_group=mpu.get_data_parallel_group(),
        )
        for _ in range(2):
            optimizer.zero_grad()
            for parameter in model.parameters():
                main_gradient(parameter).fill_(0.01)
            optimizer.reduce_gradients(1.0)
            meter.peak = 0
            assert not optimizer.step(0.1).skipped
        live = meter.live_bytes()
    parameters = sum(p.numel() for p in model.parameters())
    return live / parameters, meter.peak / parameters, parameters


@pytest.mark.parametrize("data", [1, 2, 4])
def test_bytes_for_each_parameter(ranks: Ranks, data: int) -> None:
    """DESIGN's table: 4 + 16/d with fp16, 6 + 12/d with bf16, here with what padding takes."""
    fp16 = ranks(data, kept_bytes, PrecisionConfig(fp16=True, loss_scale=1.0))
    bf16 = ranks(data, kept_bytes, PrecisionConfig(bf16=True))
    padding = 1.03
    for live, peak, parameters in fp16:
        assert parameters > 190_000
        assert live <= 4 + 16 / data
        assert 4 + 12 / data <= live <= (4 + 12 / data) * padding
        # A float32 copy of the gradients, and what the norm needs, is there for one bucket of ten at a time.
        assert peak <= 4 + 16 / data
    for live, peak, _ in bf16:
        assert 6 + 12 / data <= live <= (6 + 12 / data) * padding
        assert peak <= live + 1


def overflow(rank: int, world_size: int, choices: dict[str, Any]) -> list[tuple[bool, float, int]]:
    mpu.initialize_model_parallel(2)
    model = start(dtype=torch.float16)
    precision = PrecisionConfig(fp16=True, initial_loss_scale=8.0, hysteresis=1)
    optimizer = make_optimizer(model, precision, **choices)
    seen = []
    # Tensor and data rank, and what overflows there; replicated ones count in the norm on the first tensor rank only.
    for bad, name in ((None, ""), ((0, 0), "blocks.1.up.bias"), ((1, 1), "blocks.0.norm.weight")):
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        optimizer.zero_grad()
        for gradient in optimizer.gradients().values():
            gradient.fill_(0.25)
        if bad == (mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_rank()):
            optimizer.gradients()[name][2] = math.inf
        optimizer.last_micro_batch()
        optimizer.reduce_gradients(4.0)
        result = optimizer.step(0.1)
        optimizer.wait_for_parameters()
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert torch.equal(before, after) == result.skipped
        seen.append((result.skipped, optimizer.loss_scale, optimizer.step_count))
    return seen


@pytest.mark.parametrize("choices", [PLAIN, ALL], ids=["plain", "sharded"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Ranks, choices: dict[str, Any]) -> None:
    for seen in ranks(4, overflow, choices):
        assert seen == [(False, 8.0, 1), (True, 4.0, 1), (True, 2.0, 1)]


class _Late(Pending):
    """A gather that begins when it is awaited; until then what other ranks hold is not a number."""

    def __init__(self, bucket: Bucket) -> None:
        own = bucket.weights[bucket.held.slice].clone()
        bucket.weights.fill_(math.nan)
        bucket.weights[bucket.held.slice] = own
        self._bucket: Bucket | None = bucket

    def wait(self) -> Tensor:
        assert self._bucket is not None
        bucket, self._bucket = self._bucket, None
        return _start_gathering(bucket).wait()


_start_gathering = Bucket.start_gathering


@contextlib.contextmanager
def late_gathers() -> Iterator[None]:
    Bucket.start_gathering = lambda bucket: _Late(bucket)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Bucket.start_gathering = _start_gathering  # type: ignore[method-assign]


class Reads(nn.Module):
    """Modules called in an order of their own, one of them tied, one read and called by evaluation only, one direct."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(7, 40)
        self.late, self.soon = nn.Linear(40, 40), nn.Linear(40, 40)
        self.read, self.direct = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.words.weight.mean(0)  # before the module that has it is called
        x = self.late(self.soon(self.words(ids))) + first
        trains = self.training and torch.is_grad_enabled()
        read = nn.functional.linear(x, self.read.weight, self.read.bias) if trains else self.read(x)
        x = torch.tanh(read) + self.direct.forward(x)
        return x @ self.words.weight.t()


def reads_of_gathered_parameters(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(1)
    ids = torch.arange(4) + rank
    results = []
    for choices in (SHARDED, ALL):
        model = Reads()
        config = OptimizerConfig(ddp_bucket_size=1, **choices)
        optimizer = Optimizer(
            model,
            mpu.parameter_shardings(model),
            config,
            data_group=mpu.get_data_parallel_group(),
            own_buckets=["words.weight"],
        )
        values = []
        with late_gathers() if choices is ALL else contextlib.nullcontext():
            for step in range(5):
                optimizer.zero_grad()
                loss = model(ids).square().sum()
                optimizer.last_micro_batch()
                loss.backward()
                optimizer.reduce_gradients(10.0)
                optimizer.step(0.05)
                if step in (0, 2):  # evaluation before the next iteration, of either kind
                    with torch.set_grad_enabled(step == 0):
                        values.append(model.train(step == 2)(ids).sum().item())
                    model.train()
                values.append(loss.item())
            if choices is ALL:
                assert any(not torch.isfinite(p).all() for p in model.parameters())  # the last gathers are still out
            optimizer.wait_for_parameters()
        results.append((values, [p.detach().clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_parameters_are_awaited_before_they_are_read(ranks: Ranks) -> None:
    ranks(2, reads_of_gathered_parameters)


class AnyOrder(nn.Module):
    """Layers of different sizes, used in another order on each rank; the last rank leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(6, n) for n in (2, 13, 40, 101))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        total = x
        for i in order:
            total = total + self.layers[i](torch.tanh(total)).mean(-1, keepdim=True)
        return total.square().sum()


def any_order(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(1)
    order = [[0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1], [1, 3, 0]][rank]
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    results = []
    for choices in (PLAIN, ALL):
        model = AnyOrder()
        config = OptimizerConfig(ddp_bucket_size=8, **choices)
        optimizer = Optimizer(model, mpu.parameter_shardings(model), config, data_group=mpu.get_data_parallel_group())
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.last_micro_batch()
            model(x, order).backward()
            others = torch.ones(1)  # somebody else's collective, on the same group
            dist.all_reduce(others, group=mpu.get_data_parallel_group())
            assert others.item() == world_size
            optimizer.reduce_gradients(2.0)
            optimizer.step(0.05)
        optimizer.wait_for_parameters()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_buckets_go_in_one_order_whatever_the_order_of_backward(ranks: Ranks) -> None:
    ranks(4, any_order)


def dropped(rank: int, world_size: int) -> None:
    """With the optimizer all that it kept for the hooks of the model goes, and what it gathers comes first."""
    mpu.initialize_model_parallel(1)
    results = []
    for late in (False, True):
        model = AnyOrder()
        config = OptimizerConfig(ddp_bucket_size=8, **ALL)
        optimizer = Optimizer(model, mpu.parameter_shardings(model), config, data_group=mpu.get_data_parallel_group())
        for _ in range(2):  # after the second step modules have been called to train, which are trusted to wait
            optimizer.zero_grad()
            model(torch.ones(3, 6), [0, 1, 2, 3]).backward()
            optimizer.reduce_gradients(2.0)
            optimizer.step(0.05)
        if late:
            assert optimizer._gatherer._pending
        else:
            optimizer.wait_for_parameters()
        kept = [weakref.ref(part) for part in (optimizer, optimizer._gatherer, *optimizer._buckets)]
        del optimizer
        gc.collect()
        assert not any(part() for part in kept)
        results.append([p.detach().clone() for p in model.parameters()])
        model(torch.ones(3, 6), [0, 1, 2, 3]).backward()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_optimizer_that_is_dropped_is_freed_while_its_model_lives(ranks: Ranks) -> None:
    ranks(2, dropped)


def placed(rank: int, world_size: int) -> dict[str, tuple[tuple[int, ...], list[tuple[Any, Any]]]]:
    mpu.initialize_model_parallel(2)
    optimizer = make_optimizer(start(dtype=torch.bfloat16), PrecisionConfig(bf16=True), **SHARDED)
    first = mpu.get_tensor_model_parallel_rank() == 0
    return {
        name: (
            place.global_shape,
            [(p.offset, p.shape) for p in place.pieces(tuple(tensor.shape)) if first or place.split_dim is not None],
        )
        for name, (tensor, place) in optimizer.state_tensors().items()
    }


def test_shards_of_all_ranks_cover_the_state_exactly_once(ranks: Ranks) -> None:
    parts = ranks(4, placed)
    names = {name for part in parts for name in part}
    assert {name.split(".")[1] for name in names} == {"exp_avg", "exp_avg_sq", "master_weight"}
    assert f"optimizer.master_weight.{TIED}" in names
    for name in names:
        held = [part[name] for part in parts if name in part]
        (shape,) = {shape for shape, _ in held}
        assert cover_problem(shape, [Rectangle(*piece) for _, pieces in held for piece in pieces]) is None, name


def masters_follow(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(1)
    model = start(dtype=torch.bfloat16)
    optimizer = make_optimizer(model, PrecisionConfig(bf16=True), **SHARDED)
    for name, (tensor, place) in optimizer.state_tensors().items():
        if "master_weight" in name:
            tensor.copy_(torch.arange(place.begin, place.end))
    optimizer.after_load(masters=True)
    for parameter in model.parameters():
        assert torch.equal(parameter.flatten(), torch.arange(parameter.numel()).bfloat16())


def test_after_a_load_all_ranks_have_the_masters_of_all(ranks: Ranks) -> None:
    ranks(2, masters_follow)


def refuses_a_missing_group(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(2)
    model = start()
    with pytest.raises(ValueError, match="2 model ranks x 2 data ranks"):
        Optimizer(
            model,
            mpu.parameter_shardings(model),
            OptimizerConfig(use_distributed_optimizer=True),
            data_group=mpu.get_data_parallel_group(),
            tensor_group=mpu.get_tensor_model_parallel_group(),
            tensor_rank=mpu.get_tensor_model_parallel_rank(),
        )


def test_the_sharded_optimizer_needs_a_group_of_everyone(ranks: Ranks) -> None:
    ranks(4, refuses_a_missing_group)
