"""Recomputation across tensor ranks: gradients bit-equal with dropout from both streams, collectives repeated."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def run(recompute: bool) -> tuple[list[Tensor], dict[str, int], dict[str, Tensor]]:
    mpu.model_parallel_manual_seed(41)
    blocks = [Block(), Block()]
    x = torch.randn(6, 8, requires_grad=True)
    y = x
    with CollectiveCounter() as counter:
        for block in blocks:
            y = mpu.checkpoint(block, y) if recompute else block(y)
        F.dropout(y.square(), 0.3).sum().backward()
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    assert x.grad is not None
    results = [y.detach(), x.grad, *(p.grad for p in parameters if p.grad is not None)]
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
    return [plain[0], plain[1]]


def test_recomputed_gradients_are_bit_equal(ranks: Ranks) -> None:
    ranks(1, both)
    first, second = ranks(2, both)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "replicated tensors came apart"
