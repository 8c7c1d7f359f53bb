"""Recomputed or not, the model computes the same to the last bit, dropout included, and draws as many numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron import mpu
from megatron.model import RecomputeConfig, TransformerConfig, build_gpt
from tests.harness.ranks import Ranks

VOCAB, S, B = 61, 12, 3
FULL = {"recompute_granularity": "full"}
# Three layers: chunks of two leave one over.
CASES: dict[str, dict[str, Any]] = {
    "each layer": FULL,
    "chunks of two": FULL | {"recompute_num_layers": 2},
    "all in one": FULL | {"recompute_num_layers": 3},
    "the first two": FULL | {"recompute_method": "block", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective"},
}
SHARED = {"shared out": FULL | {"recompute_num_layers": 2, "distribute_saved_activations": True}}


def run(recompute: dict[str, Any], changes: dict[str, Any], shards: bool, documents: bool) -> dict[str, Tensor]:
    """Losses, every gradient, and what the streams of random numbers have come to."""
    mpu.model_parallel_manual_seed(1234)
    sizes = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "max_position_embeddings": 16}
    config = TransformerConfig(**(sizes | {"attention_dropout": 0.1, "hidden_dropout": 0.1} | changes))
    again = RecomputeConfig(**recompute)
    model = build_gpt(config, VOCAB, 1, dtype=torch.float32, device="cpu", sequence_parallel=shards, recompute=again)
    ids = torch.randint(VOCAB, (2, B, S), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([[12, 0, 0], [4, 8, 0], [3, 1, 8]])
    padded = torch.nn.functional.pad(lengths, (0, S - 3)) if documents else None
    losses = model(ids[0], labels=ids[1], document_lengths=padded)
    losses.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    return {"losses": losses.detach()} | gradients | mpu.rng_state()


def check(rank: int, size: int, shards: bool, changes: dict[str, Any], documents: bool) -> None:
    mpu.initialize_model_parallel(size)
    plain = run({}, changes, shards, documents)
    cases = CASES if size == 1 or shards else CASES | SHARED
    for case, recompute in cases.items():
        for name, value in run(recompute, changes, shards, documents).items():
            assert torch.equal(value, plain[name]), f"{case}: {name}"


@pytest.mark.parametrize(("size", "shards"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize(
    ("changes", "documents"), [({}, False), ({"norm_position": "post", "attention_backend": "unfused"}, True)]
)
def test_bit_equal(ranks: Ranks, size: int, shards: bool, changes: dict[str, Any], documents: bool) -> None:
    ranks(size, check, shards, changes, documents)


def check_evaluation(rank: int, size: int) -> None:
    """Without gradients nothing is recomputed, and nothing is different."""
    mpu.initialize_model_parallel(size)
    ids = torch.arange(B * S).view(B, S)
    results = []
    for recompute in ({}, FULL):
        config = TransformerConfig(num_layers=2, hidden_size=24, num_attention_heads=4, max_position_embeddings=16)
        again = RecomputeConfig(**recompute)
        model = build_gpt(config, VOCAB, 1, dtype=torch.float32, device="cpu", recompute=again).eval()
        with torch.no_grad():
            results.append(model(ids, labels=ids))
    assert torch.equal(*results)


def test_evaluation(ranks: Ranks) -> None:
    ranks(2, check_evaluation)


def check_misfits(rank: int, size: int) -> None:
    mpu.initialize_model_parallel(size)
    config = TransformerConfig(num_layers=2, hidden_size=24, num_attention_heads=4, max_position_embeddings=16)
    for given, message in (
        ({"recompute_num_layers": 3}, "--recompute-num-layers 3: it must be at most 2, no stage has more layers"),
        ({"distribute_saved_activations": True}, "--distribute-saved-activations: with --sequence-parallel"),
    ):
        again = RecomputeConfig(**(FULL | given))
        with pytest.raises(ValueError, match=message):
            build_gpt(config, VOCAB, 1, dtype=torch.float32, device="meta", sequence_parallel=True, recompute=again)


def test_what_does_not_fit_the_model_is_refused(ranks: Ranks) -> None:
    ranks(2, check_misfits)
