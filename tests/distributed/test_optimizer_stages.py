"""The optimizer over pipeline stages, tied ones and several chunks on a rank, against one process."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron import mpu
from megatron.optimizer import Optimizer, OptimizerConfig, PrecisionConfig
from tests.distributed.test_optimizer_parallel import ALL, OVERLAPPED, PLAIN, SHARDED, data_place
from tests.distributed.test_optimizer_sharded import in_whole
from tests.harness.closeness import assert_close
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks
from tests.harness.toy_stages import (
    CONSTANTS,
    TIED,
    Stages,
    my_stages,
    run_backward,
    stage_optimizer,
    train,
    whole_model,
)


def serial(model: Stages, **choices: Any) -> Optimizer:
    return Optimizer(model, mpu.parameter_shardings(model), OptimizerConfig(**{**CONSTANTS, **choices}))


def assert_copies_equal(optimizer: Optimizer, model: Stages) -> None:
    """The tied weights and their state are the same bits on both stages that have them."""
    if not hasattr(model, "words"):
        return
    mine = [model.words.weight.detach()]
    mine += [tensor for name, (tensor, _) in optimizer.state_tensors().items() if name.endswith(TIED)]
    assert len(mine) == 3
    both: list[list[Tensor]] = [[], []]
    dist.all_gather_object(both, mine, group=mpu.get_embedding_group())
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def norm_without_parameters(rank: int, world_size: int) -> None:
    model = torch.nn.Linear(3, 2) if rank == 0 else torch.nn.Identity()
    shardings = mpu.parameter_shardings(model)
    cpu, everyone = torch.device("cpu"), dist.group.WORLD
    optimizer = Optimizer(model, shardings, OptimizerConfig(), model_group=everyone, model_rank=rank, device=cpu)
    for gradient in optimizer.gradients().values():
        gradient.fill_(2.0)
    with torch.device("meta"):  # what is made where nothing says where has no value
        assert optimizer.gradient_norm() == pytest.approx(math.sqrt(8 * 4.0))
        assert math.isnan(optimizer.gradient_norm(loss_is_finite=rank == 0))


def test_the_norm_of_a_stage_without_parameters_is_on_its_device(ranks: Ranks) -> None:
    ranks(2, norm_without_parameters)


def equals_serial(rank: int, world_size: int, tensor: int, pipeline: int, virtual: int | None) -> None:
    mpu.initialize_model_parallel(tensor, pipeline, virtual)
    twin = whole_model()
    reference = serial(twin)
    norms = train(twin, reference, range(3))
    assert min(norms) > 0.5  # so that clipping is part of it
    weights, state = dict(twin.named_parameters()), reference.state_tensors()
    for choices in (PLAIN, OVERLAPPED, SHARDED, ALL):
        model = my_stages()
        shardings = mpu.parameter_shardings(model)
        optimizer = stage_optimizer(model, **choices)
        assert_close(train(model, optimizer, range(3), data_place()), norms, 1e-12)
        for name, parameter in model.named_parameters():
            for piece in shardings[name].pieces(tuple(parameter.shape)):
                assert_close(parameter[piece.local], weights[name][piece.region], 1e-12)
        for name, (part, place) in optimizer.state_tensors().items():
            for piece in place.pieces(tuple(part.shape)):
                assert_close(part[piece.local].view(piece.shape), state[name][0][piece.region], 1e-12, floor=1e-6)
        assert_copies_equal(optimizer, model)


@pytest.mark.parametrize(
    ("world", "tensor", "pipeline", "virtual"),
    [(2, 1, 2, None), (2, 1, 2, 2), (4, 2, 2, 2), (4, 1, 2, 2), (4, 1, 4, None)],
    ids=["p2", "p2 v2", "t2 p2 v2", "p2 v2 d2", "p4"],
)
def test_equals_one_process(ranks: Ranks, world: int, tensor: int, pipeline: int, virtual: int | None) -> None:
    ranks(world, equals_serial, tensor, pipeline, virtual)


def bit_equal(rank: int, world_size: int, precision: PrecisionConfig) -> None:
    mpu.initialize_model_parallel(1, 2, 2)
    results = []
    for choices in (PLAIN, OVERLAPPED, SHARDED, ALL):
        model = my_stages(precision.dtype)
        optimizer = stage_optimizer(model, precision, **choices)
        norms = train(model, optimizer, range(3), data_place())
        results.append((norms, in_whole(optimizer, model)))
    norms, expected = results[0]
    for other_norms, other in results[1:]:
        assert other_norms == norms
        assert other.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(other[name], expected[name])]


@pytest.mark.parametrize("precision", [PrecisionConfig(), PrecisionConfig(bf16=True)], ids=["fp32", "bf16"])
def test_chunks_sharded_and_overlapped_are_bit_equal(ranks: Ranks, precision: PrecisionConfig) -> None:
    ranks(4, bit_equal, precision)


Calls = list[tuple[str, int]]


def calls_of(counter: CollectiveCounter) -> Calls:
    return [(call.kind, call.bytes) for call in counter.calls]


def one_order(rank: int, world_size: int, orders: list[list[int]]) -> list[Calls]:
    """What each chunk's last backward pass and `reduce_gradients` do, with chunks in an order of each data rank."""
    mpu.initialize_model_parallel(1, 2, 2)
    data_rank = mpu.get_data_parallel_rank()
    ids = torch.arange(10).view(2, 5) + data_rank
    found = []
    models = [my_stages(torch.float32), my_stages(torch.float32)]
    for model, choices in zip(models, ({**OVERLAPPED, **SHARDED}, PLAIN), strict=True):
        optimizer = stage_optimizer(model, **choices)
        optimizer.zero_grad()
        run_backward(model, optimizer, ids, [1, 0], last=False)
        for chunk in orders[data_rank]:
            with CollectiveCounter() as counter:
                run_backward(model, optimizer, ids, [chunk], last=True)
            found.append(calls_of(counter))
        with CollectiveCounter() as counter:
            optimizer.reduce_gradients(4.0)
        found.append(calls_of(counter))
        optimizer.step(0.1)
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
    return found


# Elements of the buckets of each stage's chunks, full with 150. Each parameter takes a multiple of 64, a bucket of 128.
# In chunk 1 the first stage has the matrix without use, which waits until the pass ends, the last stage the norm.
_SIZES = {0: {1: [384, 256], 0: [384, 128]}, 1: {1: [512, 128], 0: [384, 128]}}
_WORDS = 256


@pytest.mark.parametrize("orders", [[[1, 0], [1, 0]], [[1, 0], [0, 1]]], ids=["as built", "one rank the other way"])
def test_chunks_begin_their_buckets_in_one_order(ranks: Ranks, orders: list[list[int]]) -> None:
    for rank, found in enumerate(ranks(4, one_order, orders)):
        stage, data = divmod(rank, 2)
        last, first = ([4 * size for size in _SIZES[stage][chunk]] for chunk in (1, 0))
        passes = [last, first] if orders[data] == [1, 0] else [[], last + first]
        assert found[:2] == [[("reduce_scatter", size) for size in sizes] for sizes in passes]
        assert found[2] == [("reduce_scatter", 4 * _WORDS), ("all_reduce", 4 * _WORDS // 2)]
        assert found[3:5] == [[], []]
        tied = [("all_reduce", 4 * _WORDS)] * 2  # over the data group, then over the embedding group
        assert found[5] == [("all_reduce", size) for size in last + first] + tied


def little_to_train(rank: int, world_size: int, trained: list[str]) -> None:
    """One stage has only norms to train, or nothing."""
    mpu.initialize_model_parallel(1, 2)
    twin = freeze(whole_model(), trained)
    norms = train(twin, serial(twin), range(2))
    for choices in (PLAIN, ALL):
        model = freeze(my_stages(), trained)
        optimizer = stage_optimizer(model, **choices)
        assert_close(train(model, optimizer, range(2)), norms, 1e-12)
        assert optimizer.step_count == 2
        weights = dict(twin.named_parameters())
        assert all(torch.allclose(p, weights[name], rtol=1e-12) for name, p in model.named_parameters())


def freeze(model: Stages, trained: list[str]) -> Stages:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    return model


@pytest.mark.parametrize("trained", [["layers.0.norm", "layers.3", "words"], ["layers.2.up", "layers.3"]])
def test_a_stage_may_have_little_to_train(ranks: Ranks, trained: list[str]) -> None:
    ranks(2, little_to_train, trained)


def overflow(rank: int, world_size: int) -> list[tuple[bool, float]]:
    mpu.initialize_model_parallel(1, 2)
    model = my_stages(torch.float16)
    optimizer = stage_optimizer(model, PrecisionConfig(fp16=True, initial_loss_scale=8.0, hysteresis=1))
    seen = []
    for bad, name in ((None, ""), (0, "layers.0.up.bias"), (1, "layers.3.norm.weight"), (1, TIED)):
        optimizer.zero_grad()
        for gradient in optimizer.gradients().values():
            gradient.fill_(0.25)
        if rank == bad:
            optimizer.gradients()[name][2] = math.inf
        optimizer.reduce_gradients(4.0)
        seen.append((optimizer.step(0.1).skipped, optimizer.loss_scale))
    return seen


def test_an_overflow_in_one_stage_skips_the_step_in_all(ranks: Ranks) -> None:
    assert ranks(2, overflow) == [[(False, 8.0), (True, 4.0), (True, 2.0), (True, 1.0)]] * 2
