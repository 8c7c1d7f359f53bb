"""Recomputation across tensor ranks: gradients bit-equal with dropout from both streams, collectives repeated.

With `distribute` each rank keeps its share of the arguments, in the bytes that it should.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron import mpu
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks


class Block(nn.Module):
    """A parallel MLP: dropout of each rank's own stream inside, of the replicated one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = mpu.ColumnParallelLinear(8, 16, gather_output=False)
        self.second = mpu.RowParallelLinear(16, 8, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.first(x)[0])
        with mpu.get_rng_tracker().fork():
            inner = F.dropout(inner, 0.3)
        return x + F.dropout(self.second(inner)[0], 0.3)


def run(
    recompute: bool, distribute: bool = False, main_grad: bool = False
) -> tuple[list[Tensor], dict[str, int], dict[str, Tensor]]:
    mpu.model_parallel_manual_seed(41)
    blocks = [Block(), Block()]
    for block in blocks if main_grad else ():
        for weight in (block.first.weight, block.second.weight):
            weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    x = torch.randn(6, 8, requires_grad=True)
    y = x
    with CollectiveCounter() as counter:
        for block in blocks:
            y = mpu.checkpoint(block, y, distribute=distribute) if recompute else block(y)
        F.dropout(y.square(), 0.3).sum().backward()
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    assert x.grad is not None
    grads = [p.grad if p.grad is not None else p.main_grad for p in parameters]  # type: ignore[attr-defined]
    results = [y.detach(), x.grad, *grads]
    return results, dict(counter.counts), mpu.rng_state()


def both(rank: int, world_size: int) -> list[Tensor]:
    mpu.initialize_model_parallel(world_size)
    plain, collectives, streams = run(recompute=False)
    again, repeated, streams_again = run(recompute=True)
    assert len(plain) == 2 + 8
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    assert all(torch.equal(streams_again[name], streams[name]) for name in streams)
    if world_size > 1:
        assert collectives == {"all_reduce": 4}  # two blocks, one forward and one backward each
        assert repeated == {"all_reduce": 6}  # and the forward ones again
    shared, gathered, streams_again = run(recompute=True, distribute=True, main_grad=True)
    assert all(torch.equal(a, b) for a, b in zip(shared, plain, strict=True))
    assert all(torch.equal(streams_again[name], streams[name]) for name in streams)
    assert gathered == (repeated | {"all_gather": 2} if world_size > 1 else repeated)  # the argument of each block
    return [plain[0], plain[1]]


def test_recomputed_gradients_are_bit_equal(ranks: Ranks) -> None:
    ranks(1, both)
    for first, *others in (ranks(2, both), ranks(4, both)):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), "replicated tensors came apart"


class Made(TorchDispatchMode):
    """Remembers the storages that operations make, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def alive(self) -> list[int]:
        """Bytes of those that are still there, the largest first."""
        return sorted((size for storage, size in self.storages.values() if not storage.expired()), reverse=True)


class Twice(nn.Module):
    """Elementwise, no parameters: what is alive after its forward is what was kept for its backward."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.tanh().square() * ids


def bytes_kept(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(world_size)
    ids = torch.arange(10)
    for distribute, elements in ((False, 10 * 10), (True, 100 // world_size)):
        leaf = torch.ones(10, 10, dtype=torch.float64, requires_grad=True)
        with Made() as made:
            y = leaf * 3
            for strided in (False, True):
                z = y.t() if strided else y
                y = mpu.checkpoint(Twice(), z, ids, distribute=distribute)
                del z
            loss = y.sum()
            del y
        # the two arguments, and the loss; of the ids nothing, and of the layer before the output nothing
        assert [size for size in made.alive if size > 8] == [8 * elements] * 2, made.alive
        loss.backward()
        twin = torch.ones(10, 10, dtype=torch.float64, requires_grad=True)
        (((twin * 3).tanh().square() * ids).t().tanh().square() * ids).sum().backward()
        assert torch.equal(leaf.grad, twin.grad)  # type: ignore[arg-type]


def kinds_of_arguments(rank: int, world_size: int) -> None:
    """What is no floating-point tensor is kept as it is, also where it differs between the ranks; shares are padded."""
    mpu.initialize_model_parallel(world_size)
    ids, empty = torch.arange(4) + 4 * rank, torch.ones(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = torch.arange(5).to(dtype).requires_grad_()  # shares of 2, 2 and 1

        def function(x: Tensor, ids: Tensor, scale: float, nothing: None, empty: Tensor) -> Tensor:
            return (x[:4].exp() * ids * scale).sum() + empty.sum()

        mpu.checkpoint(function, x, ids, 2.0, None, empty, distribute=True).backward()
        twin = x.detach().clone().requires_grad_()
        function(twin, ids, 2.0, None, empty).backward()
        assert x.grad is not None
        assert torch.equal(x.grad, twin.grad)  # type: ignore[arg-type]


def test_distributed_arguments(ranks: Ranks) -> None:
    ranks(2, bytes_kept)
    ranks(4, bytes_kept)
    ranks(3, kinds_of_arguments)
