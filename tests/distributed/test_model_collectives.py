"""How many collectives the GPT and its blocks need, forwards and backwards: those of DESIGN's table and no other."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron import mpu
from megatron.model import TransformerConfig, build_gpt
from megatron.model.embedding import Embedding
from megatron.model.layer import transformer_layer
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks

VOCAB, S, B, H = 61, 12, 2, 24
LOSS = 2  # small ones: the maximum of a number per token, the sum of two


def config(**changes: Any) -> TransformerConfig:
    sizes = {"num_layers": 1, "hidden_size": H, "num_attention_heads": 4, "max_position_embeddings": 16}
    return TransformerConfig(**(sizes | changes))


def both_ways(output: Tensor, forward: CollectiveCounter) -> tuple[Counter[str], Counter[str]]:
    with CollectiveCounter() as backward:
        output.square().sum().backward()
    return forward.counts, backward.counts


def count_model(rank: int, size: int, changes: dict[str, Any], labelled: bool) -> tuple[Counter[str], Counter[str]]:
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_manual_seed(1)
    model = build_gpt(config(**changes), VOCAB, 1, dtype=torch.float32, device="cpu")
    tokens = torch.arange(B * S).view(B, S)
    with CollectiveCounter() as forward:
        output = model(tokens, labels=tokens if labelled else None)
    return both_ways(output, forward)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_two_each_way_a_layer_and_one_for_each_end(
    ranks: Ranks, layers: int, dropout: float, norm_position: str
) -> None:
    changes = {
        "num_layers": layers,
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "norm_position": norm_position,
    }
    for forward, backward in ranks(2, count_model, changes, True):
        assert forward == {"all_reduce": 2 * layers + 1 + LOSS}
        assert backward == {"all_reduce": 2 * layers + 1}


def test_chunks_of_the_loss_add_none(ranks: Ranks) -> None:
    for forward, backward in ranks(2, count_model, {"cross_entropy_chunk_size": 10}, True):
        assert forward == {"all_reduce": 2 + 1 + LOSS}
        assert backward == {"all_reduce": 2 + 1}


def test_logits_are_not_gathered(ranks: Ranks) -> None:
    for forward, backward in ranks(2, count_model, {}, False):
        assert forward == {"all_reduce": 2 + 1}
        assert backward == {"all_reduce": 2 + 1}


def test_none_on_one_rank(ranks: Ranks) -> None:
    assert ranks(1, count_model, {"num_layers": 3}, True) == [(Counter(), Counter())]


def count_block(rank: int, size: int, norm_position: str) -> tuple[Counter[str], Counter[str], int]:
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_manual_seed(1)
    layer = transformer_layer(config(norm_position=norm_position), causal=True, dtype=torch.float32)
    hidden = torch.ones(S, B, H, requires_grad=True)
    with CollectiveCounter() as forward:
        output = layer(hidden)
    return *both_ways(output, forward), forward.bytes["all_reduce"]


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_a_layer(ranks: Ranks, norm_position: str) -> None:
    for forward, backward, size in ranks(2, count_block, norm_position):
        assert forward == backward == {"all_reduce": 2}
        assert size == 2 * S * B * H * 4


def count_embedding(rank: int, size: int) -> tuple[Counter[str], Counter[str]]:
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_manual_seed(1)
    embedding = Embedding(config(), VOCAB, dtype=torch.float32)
    with CollectiveCounter() as forward:
        output = embedding(torch.zeros(B, S, dtype=torch.long))
    return both_ways(output, forward)


def test_the_embedding(ranks: Ranks) -> None:
    assert ranks(2, count_embedding) == [({"all_reduce": 1}, {})] * 2
