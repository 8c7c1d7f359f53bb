"""How many collectives the GPT and its blocks need, forwards and backwards: those of DESIGN's table and no other."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron import mpu
from megatron.model import RecomputeConfig, TransformerConfig, build_gpt
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


def count_model(
    rank: int,
    size: int,
    changes: dict[str, Any],
    labelled: bool,
    shards: bool = False,
    recompute: dict[str, Any] | None = None,
) -> tuple[Counter[str], Counter[str]]:
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_manual_seed(1)
    again = RecomputeConfig(**(recompute or {}))
    model = build_gpt(
        config(**changes), VOCAB, 1, dtype=torch.float32, device="cpu", sequence_parallel=shards, recompute=again
    )
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


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_with_sequence_parallelism(ranks: Ranks, norm_position: str, chunk: int | None) -> None:
    """A layer needs 2 all-gathers and 2 reduce-scatters forwards, 4 and 2 backwards; each end one and one, one and two.

    The embedding: a reduce-scatter and backwards an all-gather. The output projection: an all-gather, backwards
    another of the same and a reduce-scatter.
    """
    changes = {"num_layers": 3, "norm_position": norm_position, "cross_entropy_chunk_size": chunk}
    for forward, backward in ranks(2, count_model, changes, True, True):
        assert forward == {"all_gather": 2 * 3 + 1, "reduce_scatter": 2 * 3 + 1, "all_reduce": LOSS}
        assert backward == {"all_gather": 4 * 3 + 2, "reduce_scatter": 2 * 3 + 1}


FULL = {"recompute_granularity": "full"}


@pytest.mark.parametrize(
    ("recompute", "dropout", "again"),
    [
        (FULL, 0.1, 2 * 3),
        (FULL | {"recompute_num_layers": 2}, 0.1, 2 * 3),
        (FULL | {"recompute_method": "block", "recompute_num_layers": 2}, 0.1, 2 * 2),
        ({"recompute_granularity": "selective"}, 0.1, 0),
        # Without dropout nothing after the last all-reduce of a chunk is kept, and it is not run again.
        (FULL, 0.0, 3),
        (FULL | {"recompute_num_layers": 2}, 0.0, 2 * 3 - 2),
    ],
)
def test_recomputation_repeats_those_of_the_forward_pass(
    ranks: Ranks, recompute: dict[str, Any], dropout: float, again: int
) -> None:
    changes = {"num_layers": 3, "hidden_dropout": dropout}
    for forward, backward in ranks(2, count_model, changes, True, False, recompute):
        assert forward == {"all_reduce": 2 * 3 + 1 + LOSS}
        assert backward == {"all_reduce": 2 * 3 + 1 + again}
    for forward, backward in ranks(2, count_model, changes, True, True, recompute):
        assert forward == {"all_gather": 2 * 3 + 1, "reduce_scatter": 2 * 3 + 1, "all_reduce": LOSS}
        gathered = again if dropout else 2 * 3
        assert backward == {"all_gather": 4 * 3 + 2 + gathered, "reduce_scatter": 2 * 3 + 1 + again}


def test_inputs_that_are_shared_out_are_gathered_once(ranks: Ranks) -> None:
    recompute = FULL | {"recompute_num_layers": 2, "distribute_saved_activations": True}
    for forward, backward in ranks(2, count_model, {"num_layers": 3}, True, False, recompute):
        assert forward == {"all_reduce": 2 * 3 + 1 + LOSS}
        assert backward == {"all_reduce": 2 * 3 + 1 + 2 * 3, "all_gather": 2}


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
