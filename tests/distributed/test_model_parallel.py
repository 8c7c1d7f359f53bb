"""The GPT and its blocks split over 2 and 4 tensor ranks against the serial twin: outputs and every gradient."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.model import GPTModel, TransformerConfig, build_gpt, gather_logits
from megatron.model.attention import SelfAttention
from megatron.model.layer import transformer_layer
from megatron.model.mlp import MLP
from tests.harness import serial_gpt
from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks
from tests.harness.serial_gpt import random_weights
from tests.harness.whole_tensors import load_whole, whole_gradients, whole_parameters

# 61 ids padded to 64 on one and two ranks and to 128 on four, of which the last two have padding only.
VOCAB = 61
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "make_vocab_size_divisible_by": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm_position": "post", "activation": "gelu_erf"},
    "sizes": {"kv_channels": 10, "ffn_hidden_size": 20},
    "chunks": {"cross_entropy_chunk_size": 7},
    "untied": {"untie_embeddings_and_output_weights": True},
}
DTYPES = {"float32": (torch.float32, 1e-5), "float64": (torch.float64, 1e-12)}


def config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(**(SIZES | changes))


def ids(seed: int) -> Tensor:
    return torch.randint(VOCAB, (3, 11), generator=torch.Generator().manual_seed(seed))


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def fill(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random whole weights, dealt out to `module` and returned as leaves."""
    shapes = {name: sharding.global_shape for name, sharding in mpu.parameter_shardings(module).items()}
    weights = random_weights(shapes, 3, dtype)
    load_whole(module, weights)
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def assert_gradients_close(module: nn.Module, weights: Mapping[str, Tensor], tol: float) -> None:
    gradients = {name: weight.grad for name, weight in weights.items()}
    floor = max(gradient.abs().max().item() for gradient in gradients.values() if gradient is not None)
    assert_close(whole_gradients(module), gradients, tol, floor)


def check_model(rank: int, size: int, case: str, dtype_name: str) -> None:
    mpu.initialize_model_parallel(size)
    (dtype, tol), chosen = DTYPES[dtype_name], config(**CASES[case])
    model = build_gpt(chosen, VOCAB, 1, dtype=dtype, device="cpu")
    weights = fill(model, dtype)
    expected = serial_gpt.serial_logits(chosen, weights, ids(0))
    assert_close(gather_logits(model(ids(0)), VOCAB), expected, tol)
    expected = serial_gpt.serial_losses(chosen, weights, ids(0), ids(1))
    losses = model(ids(0), labels=ids(1))
    assert_close(losses, expected, tol)
    expected.square().sum().backward()
    losses.square().sum().backward()
    assert_gradients_close(model, weights, tol)


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_model(ranks: Ranks, size: int, case: str, dtype_name: str) -> None:
    ranks(size, check_model, case, dtype_name)


def check_logits_gradients(rank: int, size: int) -> None:
    mpu.initialize_model_parallel(size)
    model = build_gpt(config(), VOCAB, 1, dtype=torch.float64, device="cpu")
    weights = fill(model, torch.float64)
    scale = drawn(3, 11, VOCAB, seed=5, dtype=torch.float64)
    (serial_gpt.serial_logits(config(), weights, ids(0)) * scale).sum().backward()
    (gather_logits(model(ids(0)), VOCAB) * scale).sum().backward()
    assert_gradients_close(model, weights, 1e-12)


def test_gradients_through_gathered_logits(ranks: Ranks) -> None:
    ranks(4, check_logits_gradients)


def serial_block(
    kind: str, chosen: TransformerConfig, weights: Mapping[str, Tensor], x: Tensor, causal: bool
) -> Tensor:
    if kind == "attention":
        return serial_gpt.attention(chosen, weights, "", x, causal)
    if kind == "mlp":
        return serial_gpt.mlp(chosen, weights, "", x)
    return serial_gpt.serial_layer(chosen, weights, "", x, causal)


def make_block(kind: str, chosen: TransformerConfig, causal: bool, dtype: torch.dtype) -> nn.Module:
    if kind == "attention":
        return SelfAttention(chosen, causal=causal, dtype=dtype, device="cpu")
    if kind == "mlp":
        return MLP(chosen, dtype=dtype, device="cpu")
    return transformer_layer(chosen, causal=causal, dtype=dtype, device="cpu")


def check_block(rank: int, size: int, kind: str, norm_position: str, causal: bool) -> None:
    mpu.initialize_model_parallel(size)
    chosen = config(norm_position=norm_position)
    for dtype, tol in DTYPES.values():
        block = make_block(kind, chosen, causal, dtype)
        weights = fill(block, dtype)
        x = drawn(11, 3, 24, seed=1, dtype=dtype).requires_grad_()  # [s, b, h]
        twin_x = x.detach().transpose(0, 1).clone().requires_grad_()  # [b, s, h]
        scale = drawn(11, 3, 24, seed=2, dtype=dtype)
        result = block(x)
        output = result if isinstance(result, Tensor) else sum(result)
        expected = serial_block(kind, chosen, weights, twin_x, causal).transpose(0, 1)
        assert_close(output, expected, tol)
        (output * scale).sum().backward()
        (expected * scale).sum().backward()
        assert x.grad is not None and twin_x.grad is not None
        assert_close(x.grad, twin_x.grad.transpose(0, 1), tol)
        assert_gradients_close(block, weights, tol)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "norm_position", "causal"),
    [
        ("attention", "pre", True),
        ("attention", "pre", False),
        ("mlp", "pre", True),
        ("layer", "pre", True),
        ("layer", "post", False),
    ],
)
def test_block(ranks: Ranks, size: int, kind: str, norm_position: str, causal: bool) -> None:
    ranks(size, check_block, kind, norm_position, causal)


def initial_weights(rank: int, size: int, dtype: torch.dtype) -> dict[str, Any]:
    mpu.initialize_model_parallel(size)
    big = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, max_position_embeddings=40, ffn_hidden_size=1500
    )
    model = build_gpt(big, 2500, 11, dtype=dtype, device="cpu")
    return {name: weight.to(torch.float64).numpy() for name, weight in whole_parameters(model).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_weights_are_bit_equal_at_any_size(ranks: Ranks, dtype: torch.dtype) -> None:
    alone = ranks(1, initial_weights, dtype)[0]
    for size in (2, 4):
        for split in ranks(size, initial_weights, dtype):
            assert split.keys() == alone.keys()
            for name, weight in alone.items():
                assert (split[name] == weight).all(), f"{name} at {size} ranks"


def check_given_group(rank: int, size: int) -> None:
    """Two models side by side on two halves of the world, by `group=` alone."""
    halves = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    model = build_gpt(config(), VOCAB, 1, dtype=torch.float64, device="cpu", group=halves[rank // 2])
    alone = build_gpt(config(), VOCAB, 1, dtype=torch.float64, device="cpu", group=mpu.initialize.SERIAL_GROUP)
    tokens, labels = ids(rank // 2), ids(5 + rank // 2)
    assert model.embedding.word_embeddings.weight.shape[0] == 32
    assert_close(model(tokens, labels=labels), alone(tokens, labels=labels), 1e-12)
    assert_close(gather_logits(model(tokens), VOCAB, halves[rank // 2]), gather_logits(alone(tokens), VOCAB), 1e-12)


def test_a_group_can_be_given(ranks: Ranks) -> None:
    ranks(4, check_given_group)


def check_sizes_that_do_not_divide(rank: int, size: int) -> str:
    mpu.initialize_model_parallel(size)
    with pytest.raises(ValueError, match="--num-attention-heads 6") as raised:
        GPTModel(config(num_attention_heads=6, ffn_hidden_size=98), VOCAB, device="meta")
    return str(raised.value)


def test_sizes_that_do_not_divide(ranks: Ranks) -> None:
    message = ranks(4, check_sizes_that_do_not_divide)[0]
    assert "--ffn-hidden-size 98" in message and "--tensor-model-parallel-size 4" in message
