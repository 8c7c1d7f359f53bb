"""The GPT against Hugging Face's GPT-2 with the same random weights: logits and every gradient."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from megatron.model import TransformerConfig, build_gpt, gather_logits
from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks
from tests.harness.whole_tensors import load_whole, whole_gradients

VOCAB = 97
TOL = 1e-5


def config(activation: str) -> TransformerConfig:
    return TransformerConfig(
        num_layers=3,
        hidden_size=48,
        num_attention_heads=4,
        max_position_embeddings=32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        activation=activation,
    )


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (3, 25), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def ours(rank: int, size: int, activation: str, weights: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    mpu.initialize_model_parallel(size)
    model = build_gpt(config(activation), VOCAB, 1, dtype=torch.float32, device="cpu")
    load_whole(model, {name: torch.from_numpy(weight) for name, weight in weights.items()})
    tokens, labels = batch()
    logits = gather_logits(model(tokens), VOCAB)
    loss = model(tokens, labels=labels).mean()
    loss.backward()
    gradients = {name: gradient.numpy() for name, gradient in whole_gradients(model).items()}
    return logits.detach().numpy(), loss.item(), gradients


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf"])
def test_logits_and_gradients(ranks: Ranks, activation: str) -> None:
    from tests.harness.hf_gpt2 import as_ours, random_gpt2  # here, so that the ranks do not load transformers

    chosen = config(activation)
    theirs = random_gpt2(chosen, VOCAB, seed=3)
    tokens, labels = batch()
    logits = theirs(tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    parameters = dict(theirs.named_parameters())
    assert len(as_ours(chosen, parameters)) == len(parameters)
    weights = as_ours(chosen, {name: p.detach() for name, p in parameters.items()})
    gradients = as_ours(chosen, {name: p.grad for name, p in parameters.items() if p.grad is not None})
    floor = max(gradient.abs().max().item() for gradient in gradients.values())
    for size in (1, 2):
        arrays = {name: weight.numpy() for name, weight in weights.items()}
        for our_logits, our_loss, our_gradients in ranks(size, ours, activation, arrays):
            assert_close(our_logits, logits, TOL)
            assert_close(our_loss, loss, TOL)
            assert_close(our_gradients, gradients, TOL, floor)
