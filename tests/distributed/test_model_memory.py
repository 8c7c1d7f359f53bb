"""Bytes that the layers really keep for the backward pass, in bfloat16, against `activation_bytes`."""

from typing import Any

import pytest
import torch

from megatron import mpu
from megatron.base.activations import activation_bytes
from megatron.model import RecomputeConfig, TransformerConfig
from megatron.model.transformer import Transformer
from tests.harness.ranks import Ranks
from tests.harness.storage import StorageMeter

S, B, H, N, L = 128, 2, 128, 4, 4
UNFUSED = {"attention_backend": "unfused"}
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full"}


def transformer(changes: dict[str, Any], recompute: dict[str, Any], sequence_parallel: bool) -> Transformer:
    """The layers alone, without the norm after them."""
    sizes = {"num_layers": L, "hidden_size": H, "num_attention_heads": N, "max_position_embeddings": S}
    config = TransformerConfig(**(sizes | {"attention_dropout": 0.0, "hidden_dropout": 0.1} | changes))
    layers = Transformer(
        config,
        causal=True,
        recompute=RecomputeConfig(**recompute),
        dtype=torch.bfloat16,
        sequence_parallel=sequence_parallel,
    )
    layers.final_layernorm = None
    return layers


def kept(
    rank: int, size: int, changes: dict[str, Any], recompute: dict[str, Any], shards: bool, backward: bool = False
) -> int:
    """Bytes at the end of the forward pass, or at the worst moment of the backward pass.

    Taken off are the states of the streams that each layer's recomputation starts from: they are as large whatever the
    model is. (Those of the default generators are made by no operator, and so are not counted.)
    """
    if size > 1:
        mpu.initialize_model_parallel(size)
    mpu.model_parallel_manual_seed(1)
    layers = transformer(changes, recompute, shards)
    leaf = torch.randn(S // size if shards else S, B, H, requires_grad=True)
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    streams = mpu.get_rng_tracker().get_states().values()
    states = L * sum(state.numel() for state in streams) if recompute else 0
    with StorageMeter() as meter:
        output = layers(leaf.bfloat16())
        if backward:
            output.sum().backward()  # the gradient of a sum takes no room
            return meter.most_kept - states
        graph = output.grad_fn
        del output
        assert graph is not None
        return meter.live_bytes() - states


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize(
    ("changes", "recompute", "expected"),
    [
        ({}, {}, {"fused_attention": True, "attention_dropout": False}),
        (UNFUSED, {}, {"attention_dropout": False}),
        (UNFUSED | {"attention_dropout": 0.1}, {}, {}),
        (UNFUSED | {"attention_dropout": 0.1}, SELECTIVE, {"recompute": "selective"}),
        ({"hidden_dropout": 0.0}, {}, {"fused_attention": True, "hidden_dropout": False}),
        ({}, FULL, {"recompute": "full"}),
    ],
)
def test_one_rank(
    norm_position: str, changes: dict[str, Any], recompute: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = kept(0, 1, {"norm_position": norm_position} | changes, recompute, False)
    assert found == pytest.approx(L * activation_bytes(S, B, H, N, **expected), rel=0.05)


@pytest.mark.parametrize(
    ("changes", "recompute", "shards", "expected"),
    [
        ({}, {}, False, {"fused_attention": True}),
        ({}, {}, True, {"fused_attention": True}),
        (UNFUSED | {"attention_dropout": 0.1}, {}, True, {}),
        (UNFUSED | {"attention_dropout": 0.1}, SELECTIVE, True, {"recompute": "selective"}),
        ({}, FULL | {"distribute_saved_activations": True}, False, {"recompute": "full", "distribute_saved": True}),
    ],
)
def test_two_tensor_ranks(
    ranks: Ranks, changes: dict[str, Any], recompute: dict[str, Any], shards: bool, expected: dict[str, Any]
) -> None:
    one = activation_bytes(S, B, H, N, t=2, sequence_parallel=shards, **expected)
    for found in ranks(2, kept, changes, recompute, shards):
        assert found == pytest.approx(L * one, rel=0.05)


def test_the_peak_of_full_recomputation_is_the_inputs_and_one_layer() -> None:
    inputs = L * activation_bytes(S, B, H, N, recompute="full")
    one = activation_bytes(S, B, H, N, fused_attention=True)
    assert kept(0, 1, {}, FULL, False, backward=True) == pytest.approx(inputs + one, rel=0.05)
