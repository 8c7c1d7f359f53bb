"""The function under the parallel layers, in one process: gradients in `main_grad`, hooks, what is kept, autocast."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from tests.harness.closeness import assert_close

# Dtype of the parameters and of `main_grad`, and the tolerance against sums in float64.
DTYPES = [
    (torch.float64, torch.float64, 1e-12),
    (torch.float32, torch.float32, 1e-6),
    (torch.float32, torch.float64, 1e-6),
    (torch.bfloat16, torch.float32, 2e-2),
    (torch.bfloat16, torch.bfloat16, 3e-2),
    (torch.float16, torch.float16, 4e-3),
    (torch.float16, torch.float32, 4e-3),
]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape) / 2).to(dtype).requires_grad_()


def give_main_grad(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    total = torch.zeros(weight.shape, dtype=dtype or weight.dtype)
    weight.main_grad = total  # type: ignore[attr-defined]
    return total


@pytest.mark.parametrize(("dtype", "main_dtype", "tol"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(6,), (5, 6), (3, 2, 6)], ids=str)
def test_main_grad_is_the_sum_over_micro_batches(
    shape: tuple[int, ...], dtype: torch.dtype, main_dtype: torch.dtype, tol: float
) -> None:
    torch.manual_seed(1)
    weight, bias = leaf(4, 6, dtype=dtype), leaf(4, dtype=dtype)
    total = give_main_grad(weight, main_dtype)
    w, b = (x.detach().double().requires_grad_() for x in (weight, bias))
    for _ in range(2):
        x = leaf(*shape, dtype=dtype)
        y = x.detach().double().requires_grad_()
        use = torch.randn(*shape[:-1], 4).to(dtype)
        output = mpu.parallel_linear(x, weight, bias)
        (output * use).sum().backward()
        expected = F.linear(y, w, b)
        (expected * use.double()).sum().backward()
        assert_close([output, x.grad], [expected, y.grad], tol)
    assert weight.grad is None
    assert_close([total, bias.grad], [w.grad, b.grad], tol)


@pytest.mark.parametrize("make", [mpu.ColumnParallelLinear, mpu.RowParallelLinear])
def test_without_main_grad_the_products_are_the_same(make: Any) -> None:
    """A wider `main_grad` holds exactly the sum of what autograd would have been given."""
    layer = make(6, 4)
    x = torch.randn(2, 5, 6)
    each = []
    for micro_batch in x:
        layer(micro_batch)[0].square().sum().backward()
        each.append(layer.weight.grad)
        layer.weight.grad = None
    total = give_main_grad(layer.weight, torch.float64)
    for micro_batch in x:
        layer(micro_batch)[0].square().sum().backward()
    assert torch.equal(total, each[0].double() + each[1].double())


@pytest.mark.parametrize("main_dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_tied_weights_and_hooks(chunk_size: int | None, main_dtype: torch.dtype) -> None:
    """An embedding that is the output layer too, as an optimizer sees it: each hook runs once a backward pass."""
    torch.manual_seed(2)
    dtype = torch.float64
    model = nn.ModuleDict(
        {
            "embedding": mpu.VocabParallelEmbedding(12, 6, dtype=dtype),
            "up": mpu.ColumnParallelLinear(6, 8, gather_output=False, dtype=dtype),
            "down": mpu.RowParallelLinear(8, 6, input_is_parallel=True, dtype=dtype),
        }
    )
    ids, labels = torch.randint(12, (2, 2, 8))

    def loss(i: int) -> Tensor:
        hidden = model["embedding"](ids[i])
        hidden = hidden + model["down"](F.gelu(model["up"](hidden)[0]))[0]
        weight = model.get_parameter("embedding.weight")
        return mpu.vocab_parallel_linear_cross_entropy(hidden, weight, labels[i], chunk_size=chunk_size).sum()

    (loss(0) + loss(1)).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    fired: list[tuple[str, bool]] = []

    def watch(name: str, parameter: Tensor) -> None:
        def hook(p: Tensor) -> None:
            fired.append((name, p.grad is not None))
            if p.grad is not None:
                p.main_grad.add_(p.grad)  # type: ignore[attr-defined]
                p.grad = None

        parameter.grad = None
        give_main_grad(parameter, main_dtype)
        parameter.register_post_accumulate_grad_hook(hook)

    for name, parameter in model.named_parameters():
        watch(name, parameter)
    through_autograd = {"embedding.weight": True, "up.weight": False, "up.bias": True}
    through_autograd |= {"down.weight": False, "down.bias": True}
    for i in range(2):
        fired.clear()
        loss(i).backward()
        assert sorted(fired) == sorted(through_autograd.items())
    found = {name: parameter.main_grad for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
    assert_close(found, expected, 1e-12 if main_dtype == torch.float64 else 2e-6)


def test_a_16_bit_sum_over_chunks_is_rounded_once() -> None:
    torch.manual_seed(3)
    hidden, weight, target = (
        leaf(64, 4, dtype=torch.bfloat16),
        leaf(8, 4, dtype=torch.bfloat16),
        torch.randint(8, (64,)),
    )
    mpu.vocab_parallel_linear_cross_entropy(hidden, weight, target, chunk_size=1).sum().backward()
    total = give_main_grad(weight)
    mpu.vocab_parallel_linear_cross_entropy(hidden, weight, target, chunk_size=1).sum().backward()
    assert torch.equal(total, weight.grad)  # type: ignore[arg-type]


def kept(function: Any) -> list[Tensor]:
    """The tensors that `function()` saves for its backward pass, weights included."""
    found: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        found.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function()
    return found


def test_a_strided_input_is_kept_as_it_is_given() -> None:
    fused = torch.randn(2, 5, 3, 4, requires_grad=True)  # [b, s, 3, d]
    view, weight = fused[:, :, 1].transpose(0, 1), leaf(6, 4)  # [s, b, d]
    input_, matrix = kept(lambda: mpu.parallel_linear(view, weight))
    assert not input_.is_contiguous()
    assert input_.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    assert matrix is weight


def test_what_needs_no_gradient_is_not_kept() -> None:
    x, weight = leaf(3, 4), leaf(6, 4)
    bias = leaf(6).detach()
    saved = kept(lambda: mpu.parallel_linear(x, weight.detach(), bias))
    assert [tuple(t.shape) for t in saved] == [(6, 4)]
    frozen = weight.detach()
    total = give_main_grad(frozen)
    mpu.parallel_linear(x, frozen, bias).sum().backward()
    assert x.grad is not None
    assert not total.any()
    given = leaf(3, 4).detach()
    mpu.parallel_linear(given, weight, bias).sum().backward()
    assert torch.equal(weight.grad, given.sum(0).expand(6, 4))  # type: ignore[arg-type]


def test_only_a_leaf_has_a_main_grad() -> None:
    x, weight = leaf(3, 4), leaf(6, 4)
    scaled = weight * 2
    give_main_grad(scaled)
    mpu.parallel_linear(x, scaled).sum().backward()
    assert not scaled.main_grad.any()  # type: ignore[attr-defined]
    assert_close(weight.grad, 2 * x.sum(0).expand(6, 4), 1e-6)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_autocast_with_main_grad(chunk_size: int | None) -> None:
    torch.manual_seed(4)
    x, up, out = leaf(6, 4), leaf(4, 4), leaf(8, 4)
    bias, target = leaf(4), torch.randint(8, (6,))
    totals = [give_main_grad(up), give_main_grad(out)]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = mpu.parallel_linear(x, up, bias)
        loss = mpu.vocab_parallel_linear_cross_entropy(hidden, out, target, chunk_size=chunk_size)
        assert up.main_grad is totals[0]  # type: ignore[attr-defined]
        assert hidden.dtype == torch.bfloat16
        wide = mpu.parallel_linear(x.double(), up.double())
    assert wide.dtype == torch.float64  # which autocast leaves alone
    loss.sum().backward()
    twins = [t.detach().requires_grad_() for t in (x, up, out, bias)]
    a, b, c, d = twins
    F.cross_entropy(F.linear(a, b, d) @ c.T, target, reduction="sum").backward()
    assert up.grad is None
    assert out.grad is None
    assert_close([x.grad, *totals, bias.grad], [t.grad for t in twins], 3e-2)


def test_on_meta_and_without_gradients() -> None:
    layer = mpu.ColumnParallelLinear(4, 6, device="meta")
    assert layer(torch.empty(2, 4, device="meta"))[0].shape == (2, 6)
    with torch.no_grad():
        assert not mpu.parallel_linear(leaf(2, 4), leaf(6, 4)).requires_grad
    with pytest.raises(RuntimeError, match="dtype"):
        mpu.parallel_linear(leaf(2, 4), leaf(6, 4, dtype=torch.float64))


def test_a_second_derivative_is_refused() -> None:
    x, weight = leaf(2, 4), leaf(6, 4)
    (grad,) = torch.autograd.grad(mpu.parallel_linear(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="gather_output True: with sequence_parallel it must be False"):
        mpu.ColumnParallelLinear(4, 6, sequence_parallel=True)
    with pytest.raises(ValueError, match="reduce_gradient False: with sequence_parallel"):
        mpu.parallel_linear(leaf(2, 4), leaf(6, 4), sequence_parallel=True, reduce_gradient=False)
