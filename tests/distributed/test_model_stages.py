"""Stages on tensor ranks, with and without sequence parallelism: the whole model, with as many collectives."""

from typing import Any

import pytest

from megatron import mpu
from megatron.model import TransformerConfig
from tests.harness.closeness import assert_close
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks
from tests.harness.stages import B, S, build, deal, ids, run

UNTIED = {"untie_embeddings_and_output_weights": True}
FULL = {"recompute_granularity": "full"}
SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 24, "num_attention_heads": 4, "max_position_embeddings": 16}


def check(
    rank: int, size: int, changes: dict[str, Any], shards: bool, recompute: dict[str, Any], pipeline: int
) -> None:
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_manual_seed(1)
    given: dict[str, Any] = {"sequence_parallel": shards, "recompute": recompute}
    config = TransformerConfig(**(SIZES | {"attention_dropout": 0.1, "hidden_dropout": 0.1} | changes))
    models = [build(config, **given)], deal(config, [1, 2, 1], pipeline, **given)
    results, counts = [], []
    for parts in models:
        with CollectiveCounter() as counter:
            results.append(run(parts))
        counts.append(counter.counts)
    whole, split = results
    assert counts[1] == counts[0] and sum(counts[0].values()) > 0
    assert split.losses.equal(whole.losses)
    assert split.boundaries == [(S // size if shards else S, B, 24)] * 2
    assert models[1][0].boundary_shape(B, S) == split.boundaries[0]
    floor = max(gradient.abs().max().item() for gradient in whole.gradients.values())
    assert_close(split.gradients, whole.gradients, 1e-12, floor)


@pytest.mark.parametrize(
    ("changes", "shards", "recompute", "pipeline"),
    [
        ({}, False, {}, 3),
        ({}, True, {}, 3),
        (UNTIED | {"norm_position": "post"}, True, FULL | {"recompute_num_layers": 2}, 2),
        ({}, False, FULL | {"distribute_saved_activations": True}, 2),
    ],
)
def test_equal_to_the_whole_model(
    ranks: Ranks, changes: dict[str, Any], shards: bool, recompute: dict[str, Any], pipeline: int
) -> None:
    ranks(2, check, changes, shards, recompute, pipeline)


def check_lengths(rank: int, size: int) -> None:
    mpu.initialize_model_parallel(size)
    config = TransformerConfig(**SIZES)
    assert build(config, sequence_parallel=True).boundary_shape(5, 4) == (2, 5, 24)
    first, last = deal(config, [1, 3], 2, sequence_parallel=True)
    for model in (first, last):
        with pytest.raises(ValueError, match="--seq-length 11: with --sequence-parallel it must be a multiple"):
            model(ids(0)[:, :11])


def test_a_length_that_does_not_divide_is_refused_by_every_stage(ranks: Ranks) -> None:
    ranks(2, check_lengths)
