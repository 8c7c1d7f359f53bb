"""Every mapping against its serial twin on 1, 2 and 4 tensor ranks: outputs, gradients, number and kind of collectives.

The twin computes what all ranks compute together on whole tensors, and autograd differentiates that.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron import mpu
from tests.harness.closeness import assert_close
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks

SIZES = (1, 2, 4)
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-12}
SHAPE = (12, 3, 24)
Mapping = Callable[..., Tensor]


def part(x: Tensor, dim: int, stride: int = 1) -> Tensor:
    """This rank's chunks of `x`: of `stride * t` it takes every t-th."""
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    return torch.cat(x.chunk(stride * size, dim)[rank::size], dim)


def copies() -> int:
    return mpu.get_tensor_model_parallel_world_size()


@dataclass
class Case:
    """One mapping: how a rank's input, output and use of it come out of whole tensors."""

    name: str
    mapping: Mapping
    # Of the whole input [t, ...] (a slice for each rank where they differ) -> this rank's input.
    mine: Callable[[Tensor], Tensor]
    # Of the whole input -> the whole of what the mapping makes, and this rank's view of that.
    together: Callable[[Tensor], Tensor]
    view: Callable[[Tensor], Tensor]
    # Whether every rank goes on by itself, so that the losses of all ranks add up, or all compute the same one.
    adds_up: bool
    forward: str | None
    backward: str | None


def first_of(x: Tensor) -> Tensor:
    return x[0]


def summed(x: Tensor) -> Tensor:
    return x.sum(0)


def own(x: Tensor) -> Tensor:
    return x[mpu.get_tensor_model_parallel_rank()]


def whole(x: Tensor) -> Tensor:
    return x


def cases() -> list[Case]:
    found = [
        Case("copy", mpu.copy_to_tensor_model_parallel_region, first_of, first_of, whole, True, None, "all_reduce"),
        Case("reduce", mpu.reduce_from_tensor_model_parallel_region, own, summed, whole, False, "all_reduce", None),
        Case(
            "scatter sequence",
            mpu.scatter_to_sequence_parallel_region,
            first_of,
            first_of,
            lambda x: part(x, 0),
            False,
            None,
            "all_gather",
        ),
        Case(
            "gather sequence",
            mpu.gather_from_sequence_parallel_region,
            lambda x: part(x[0], 0),
            first_of,
            whole,
            True,
            "all_gather",
            "reduce_scatter",
        ),
        Case(
            "gather sequence, the same on all ranks",
            lambda x: mpu.gather_from_sequence_parallel_region(x, False),
            lambda x: part(x[0], 0),
            first_of,
            whole,
            False,
            "all_gather",
            None,
        ),
        Case(
            "reduce-scatter sequence",
            mpu.reduce_scatter_to_sequence_parallel_region,
            own,
            summed,
            lambda x: part(x, 0),
            False,
            "reduce_scatter",
            "all_gather",
        ),
    ]
    for stride in (1, 3):

        def cut(x: Tensor, stride: int = stride) -> Tensor:
            return part(x, -1, stride)

        def scatter(x: Tensor, stride: int = stride) -> Tensor:
            return mpu.scatter_to_tensor_model_parallel_region(x, stride=stride)

        def gather(x: Tensor, stride: int = stride) -> Tensor:
            return mpu.gather_from_tensor_model_parallel_region(x, stride=stride)

        def cut_first(x: Tensor, stride: int = stride) -> Tensor:
            return part(x[0], -1, stride)

        found += [
            Case(f"scatter, stride {stride}", scatter, first_of, first_of, cut, False, None, "all_gather"),
            Case(f"gather, stride {stride}", gather, cut_first, first_of, whole, False, "all_gather", None),
        ]
    return found


def counted(kind: str | None, times: int = 1) -> Counter[str]:
    return Counter({kind: times} if kind is not None and copies() > 1 else {})


def check(case: Case, dtype: torch.dtype, contiguous: bool, times: int) -> None:
    """`times` uses of one input; each rank's loss is a weighted sum of squares."""
    torch.manual_seed(5)
    size, rank = copies(), mpu.get_tensor_model_parallel_rank()
    inputs = torch.randn(size, *SHAPE, dtype=dtype)
    serial = inputs.clone().requires_grad_()
    result = case.together(serial)
    weights = torch.randn(size, *result.shape, dtype=dtype)  # rank r weighs with weights[r]
    uses = range(size) if case.adds_up else range(1)
    torch.stack([times * (result.square() * weights[r]).sum() for r in uses]).sum().backward()
    assert serial.grad is not None

    x = case.mine(inputs).clone()
    if not contiguous:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert x.is_contiguous() is False
    before = x.clone()
    x.requires_grad_()
    with CollectiveCounter() as forward:
        y = [case.mapping(x) for _ in range(times)]
    expected = case.view(result)
    weight = case.view(weights[rank if case.adds_up else 0])
    if not contiguous:
        weight = weight.transpose(0, 1).contiguous().transpose(0, 1)
    with CollectiveCounter() as backward:
        torch.stack([(one.square() * weight).sum() for one in y]).sum().backward()
    tol = TOLERANCES[dtype]
    assert forward.counts == counted(case.forward, times), f"{case.name}, forward: {forward.counts}"
    assert backward.counts == counted(case.backward, times), f"{case.name}, backward: {backward.counts}"
    assert_close(y, [expected] * times, tol)
    # A rank that shares its input with the others gets the whole gradient, one with an input of its own that one's.
    assert_close(x.grad, case.mine(serial.grad), tol)
    assert torch.equal(x, before), f"{case.name} changed its input"


def run_all(rank: int, world_size: int) -> None:
    for size in SIZES:
        mpu.initialize_model_parallel(size)
        for case in cases():
            for dtype in TOLERANCES:
                for contiguous in (True, False):
                    for times in (1, 2):
                        check(case, dtype, contiguous, times)
        mpu.destroy_model_parallel()


def test_mappings_equal_their_serial_twins(ranks: Ranks) -> None:
    ranks(4, run_all)


def leave_others_alone(rank: int, world_size: int) -> None:
    """A gradient that another tensor shares is not reduced in place."""
    mpu.initialize_model_parallel(2)
    x, z = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    (mpu.copy_to_tensor_model_parallel_region(x) + z).sum().backward()
    assert x.grad is not None
    assert z.grad is not None
    assert x.grad.tolist() == [2.0] * 3
    assert z.grad.tolist() == [1.0] * 3


def half_precision(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(2)
    for dtype in (torch.bfloat16, torch.float16):
        for case in cases():
            x = case.mine(torch.ones(2, *SHAPE, dtype=dtype)).requires_grad_()
            y = case.mapping(x)
            y.sum().backward()
            assert x.grad is not None
            assert y.dtype == x.grad.dtype == dtype
            assert set(y.flatten().tolist()) <= {1.0, 2.0}
            assert set(x.grad.flatten().tolist()) <= {1.0, 2.0}


def given_a_group(rank: int, world_size: int) -> None:
    """`group=` goes before the current group."""
    mpu.initialize_model_parallel(2)
    data = mpu.get_data_parallel_group()  # ranks 0 and 2, 1 and 3
    x = torch.tensor([float(rank)])
    assert mpu.reduce_from_tensor_model_parallel_region(x, data).item() == 2 * (rank % 2) + 2
    assert mpu.gather_from_sequence_parallel_region(x, group=data).tolist() == [rank % 2, rank % 2 + 2]
    assert mpu.reduce_from_tensor_model_parallel_region(x, mpu.SERIAL_GROUP) is x
    assert mpu.all_reduce(torch.ones(4, 4).t()[1:], data).eq(2).all()


def flat_chunks(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(4)
    x = torch.arange(24).view(4, 6)
    mine = mpu.split_tensor_into_1d_equal_chunks(x)
    assert mine.tolist() == list(range(6 * rank, 6 * rank + 6))
    assert torch.equal(mpu.gather_split_1d_tensor(mine).view(4, 6), x)


@pytest.mark.parametrize("function", [half_precision, given_a_group, flat_chunks], ids=lambda f: f.__name__)
def test_on_four_ranks(ranks: Ranks, function: Callable[[int, int], None]) -> None:
    ranks(4, function)


def test_a_shared_gradient_is_left_alone(ranks: Ranks) -> None:
    ranks(2, leave_others_alone)
