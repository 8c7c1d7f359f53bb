"""Dropout on tensor ranks: one mask on what is replicated, a mask of its own on each rank's heads."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron import mpu
from megatron.model import TransformerConfig, build_gpt
from megatron.model.attention import SelfAttention
from tests.harness.ranks import Ranks
from tests.harness.whole_tensors import whole_gradients

VOCAB = 61
CONFIG = TransformerConfig(
    num_layers=3,
    hidden_size=24,
    num_attention_heads=4,
    max_position_embeddings=16,
    attention_dropout=0.3,
    hidden_dropout=0.3,
)


def states(rank: int, size: int) -> dict[str, Any]:
    """What every rank must have alike: the hidden states before and after each layer and the replicated gradients."""
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_manual_seed(1234)
    model = build_gpt(CONFIG, VOCAB, 1, dtype=torch.float32, device="cpu")
    found: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            found[name] = output.detach().numpy()

        return hook

    model.embedding.register_forward_hook(keep("embedding"))
    for number, layer in model.transformer.layers.items():
        layer.register_forward_hook(keep(f"layer {number}"))
    tokens = torch.arange(24).view(2, 12)
    losses = model(tokens, labels=tokens)
    losses.sum().backward()
    whole_gradients(model)  # asserts that those of replicated parameters are bit-equal
    for name, sharding in mpu.parameter_shardings(model).items():
        if sharding.split_dim is None:
            gradient = dict(model.named_parameters())[name].grad
            assert gradient is not None
            found[name] = gradient.numpy()
    return found | {"losses": losses.detach().numpy()}


def test_replicated_tensors_are_bit_equal(ranks: Ranks) -> None:
    first, *others = ranks(4, states)
    assert {"embedding", "layer 0", "layer 2", "transformer.layers.1.input_layernorm.weight", "losses"} <= first.keys()
    for other in others:
        for name, value in first.items():
            assert np.array_equal(other[name], value), name
    # And hidden dropout is really on: about 30 % of what the embedding gives is zero.
    assert 0.2 < (first["embedding"] == 0).mean() < 0.4


def masks(rank: int, size: int) -> tuple[Any, Any, bool]:
    """The attention weights after dropout of two calls, and whether the replicated stream was left alone.

    Queries of zeros weigh all positions alike, and the identity as values gives the weights back.
    """
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_manual_seed(1234)
    attention = SelfAttention(CONFIG, causal=False)
    zeros, identity = torch.zeros(2, 4 // size, 6, 6), torch.eye(6).expand(2, 4 // size, 6, 6)
    before = torch.get_rng_state()
    first, second = (attention.attend(zeros, zeros, identity) for _ in range(2))
    return first.detach().numpy(), second.detach().numpy(), torch.equal(torch.get_rng_state(), before)


def test_attention_masks_differ_between_ranks(ranks: Ranks) -> None:
    results = ranks(4, masks)
    for first, second, left_alone in results:
        assert left_alone
        assert set(np.unique(np.round(first * 6 * 0.7, 5))) == {0.0, 1.0}
        assert not np.array_equal(first, second)
    for rank in range(1, 4):
        assert not np.array_equal(results[rank][0], results[0][0])
