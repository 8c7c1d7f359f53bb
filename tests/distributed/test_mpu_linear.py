"""The function under the parallel layers on several ranks: what runs beside what, what is kept, `main_grad`, frozen."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron import mpu
from tests.harness.closeness import assert_close
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks

TOKENS, INPUT, OUTPUT = 8, 6, 10
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter",
    "_allgather_base_": "all_gather",
}


class Recorder(TorchDispatchMode):
    """The products (by the shape of their result) and the beginnings of collectives, in order."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in ("mm", "addmm", "addmm_", "bmm"):
            self.events.append(tuple(result.shape))
        elif name in COLLECTIVES:
            self.events.append(COLLECTIVES[name])
        return result


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """What `Recorder` sees, and "wait" where something that was begun is waited for."""
    events: list[Any] = []
    wait = mpu.Pending.wait

    def watched(self: mpu.Pending) -> Tensor:
        if self._work is not None:
            events.append("wait")
        return wait(self)

    mpu.Pending.wait = watched  # type: ignore[method-assign]
    try:
        with Recorder(events):
            yield events
    finally:
        mpu.Pending.wait = wait  # type: ignore[method-assign]


def give_main_grad(weight: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.zeros(weight.shape, dtype=dtype)
    weight.main_grad = total  # type: ignore[attr-defined]
    return total


def order(rank: int, world_size: int) -> None:
    """The input's gradient is summed while the weight's is computed, gathered while the input's is."""
    mpu.initialize_model_parallel(world_size)
    product, weights = (TOKENS, INPUT), (OUTPUT, INPUT)
    for main in (None, torch.float32, torch.float64):
        weight = torch.randn(OUTPUT, INPUT, requires_grad=True)
        if main is not None:
            give_main_grad(weight, main)
        x = torch.randn(TOKENS, INPUT, requires_grad=True)
        output = mpu.parallel_linear(x, weight)
        with recorded() as events:
            output.sum().backward()
        assert events == [product, "all_reduce", weights, "wait"], events

        shard = torch.randn(TOKENS // world_size, INPUT, requires_grad=True)
        output = mpu.parallel_linear(shard, weight, sequence_parallel=True)
        with recorded() as events:
            output.sum().backward()
        assert events == ["all_gather", product, "wait", "reduce_scatter", weights, "wait"], events

        target, half = torch.zeros(TOKENS, dtype=torch.int64), TOKENS // 2
        loss = mpu.vocab_parallel_linear_cross_entropy(x, weight, target, chunk_size=half)
        with recorded() as events:
            loss.sum().backward()
        chunk = [(half, OUTPUT), (half, INPUT)]  # logits again, gradient of the hidden states
        assert events == [*chunk, weights, *chunk, "all_reduce", weights, "wait"], events


def test_collectives_run_beside_products(ranks: Ranks) -> None:
    ranks(2, order)


def kept(rank: int, world_size: int) -> None:
    """With sequence parallelism only the shard is kept; what is frozen costs neither memory nor collectives."""
    mpu.initialize_model_parallel(world_size)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    cases = itertools.product((True, False), (True, False), (True, False))
    for sequence, wants_input, wants_weight in cases:
        saved.clear()
        x = torch.randn(2, 3, INPUT, requires_grad=wants_input)
        weight = torch.randn(OUTPUT, INPUT, requires_grad=wants_weight)
        total = give_main_grad(weight, torch.float32)
        bias = torch.randn(OUTPUT, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            output = mpu.parallel_linear(x, weight, bias, sequence_parallel=sequence)
        assert {t.data_ptr() for t in saved} == {weight.data_ptr(), *([x.data_ptr()] if wants_weight else [])}
        with CollectiveCounter() as counter:
            output.sum().backward()
        expected = {"all_gather": int(wants_weight), "reduce_scatter": int(wants_input)}
        if not sequence:
            expected = {"all_reduce": int(wants_input)}
        assert counter.counts == {kind: n for kind, n in expected.items() if n}
        assert (x.grad is not None) is wants_input
        assert bool(total.any()) is wants_weight
        assert torch.equal(bias.grad, output.new_full((OUTPUT,), output[..., 0].numel()))  # type: ignore[arg-type]


def test_what_is_kept_and_what_is_frozen(ranks: Ranks) -> None:
    ranks(2, kept)


class Tied(nn.Module):
    """Embedding, a column and a row, and the embedding again as output layer. Ids and labels [s, b] -> losses."""

    def __init__(self, sequence_parallel: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        where: dict[str, Any] = {"sequence_parallel": sequence_parallel, "dtype": dtype}
        self.embedding = mpu.VocabParallelEmbedding(16, 8, **where)
        self.up = mpu.ColumnParallelLinear(8, 12, gather_output=False, **where)
        self.down = mpu.RowParallelLinear(12, 8, input_is_parallel=True, **where)

    def forward(self, ids: Tensor, labels: Tensor, chunk_size: int | None) -> Tensor:
        hidden = self.embedding(ids)
        hidden = hidden + mpu.checkpoint(lambda x: self.down(F.gelu(self.up(x)[0]))[0], hidden)
        return mpu.vocab_parallel_linear_cross_entropy(
            hidden.flatten(0, 1),
            self.embedding.weight,
            labels.flatten(),
            chunk_size=chunk_size,
            sequence_parallel=self.sequence_parallel,
        )


def serial_losses(weights: dict[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
    words = weights["embedding.weight"]
    hidden = F.embedding(ids, words)
    inner = F.gelu(F.linear(hidden, weights["up.weight"], weights["up.bias"]))
    hidden = hidden + F.linear(inner, weights["down.weight"], weights["down.bias"])
    return F.cross_entropy(F.linear(hidden, words).flatten(0, 1), labels.flatten(), reduction="none")


def accumulate(rank: int, world_size: int) -> None:
    """Two micro-batches into `main_grad`, as an optimizer gathers them, against PyTorch alone on whole matrices."""
    for size, sequence, chunk_size in itertools.product((1, 2, 4), (False, True), (None, 5)):
        mpu.initialize_model_parallel(size)
        mpu.model_parallel_manual_seed(5)
        torch.manual_seed(7)
        dtype = torch.float64
        model, fired = Tied(sequence, dtype), list[Tensor]()
        shardings = mpu.parameter_shardings(model)
        twin = {name: torch.randn(s.global_shape, dtype=dtype).requires_grad_() for name, s in shardings.items()}

        def hook(parameter: Tensor, fired: list[Tensor] = fired) -> None:
            fired.append(parameter)
            if parameter.grad is not None:
                parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
                parameter.grad = None

        for name, parameter in model.named_parameters():
            (piece,) = shardings[name].pieces(tuple(parameter.shape))
            with torch.no_grad():
                parameter.copy_(twin[name][piece.region])
            give_main_grad(parameter, dtype)
            parameter.register_post_accumulate_grad_hook(hook)
        for _ in range(2):
            ids, labels = torch.randint(16, (2, 4, 3))
            fired.clear()
            model(ids, labels, chunk_size).sum().backward()
            serial_losses(twin, ids, labels).sum().backward()
            assert len(fired) == len({id(p) for p in fired}) == len(shardings)
        for name, parameter in model.named_parameters():
            sharding, whole = shardings[name], twin[name].grad
            assert whole is not None
            total: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            assert sharding.partial_gradient is (sequence and name == "down.bias")
            if sharding.partial_gradient:
                mpu.all_reduce(total)
            (piece,) = sharding.pieces(tuple(parameter.shape))
            assert_close(total, whole[piece.region], 1e-12, whole.abs().max().item())
        mpu.destroy_model_parallel()


def test_main_grad_over_two_micro_batches(ranks: Ranks) -> None:
    ranks(4, accumulate)
