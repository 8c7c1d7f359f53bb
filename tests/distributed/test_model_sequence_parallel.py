"""Sequence parallelism in the GPT against the serial twin: losses, logits, every gradient; and its dropout."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.model import GPTModel, RecomputeConfig, TransformerConfig, build_gpt, gather_logits
from tests.harness import serial_gpt
from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks
from tests.harness.whole_tensors import load_whole, whole_gradients

VOCAB, S, B = 61, 12, 3
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
    "post": {"norm_position": "post", "activation": "gelu_erf", "attention_backend": "unfused"},
    "chunks": {"cross_entropy_chunk_size": 7, "kv_channels": 10, "ffn_hidden_size": 20},
    "untied": {"untie_embeddings_and_output_weights": True},
}


def config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(**(SIZES | changes))


def ids(seed: int) -> Tensor:
    return torch.randint(VOCAB, (B, S), generator=torch.Generator().manual_seed(seed))


def sum_partial_gradients(model: nn.Module) -> list[str]:
    """Do what the optimizer does: sum over the tensor ranks what each has a term of. Returns the names."""
    parameters, names = dict(model.named_parameters()), []
    for name, sharding in mpu.parameter_shardings(model).items():
        if sharding.partial_gradient:
            gradient = parameters[name].grad
            assert gradient is not None
            mpu.all_reduce(gradient)
            names.append(name)
    return names


def build(
    size: int, chosen: TransformerConfig, dtype: torch.dtype = torch.float64, **recompute: Any
) -> tuple[GPTModel, dict[str, Tensor]]:
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_manual_seed(1234)
    again = RecomputeConfig(**recompute)
    model = build_gpt(chosen, VOCAB, 1, dtype=dtype, device="cpu", sequence_parallel=True, recompute=again)
    shapes = {name: sharding.global_shape for name, sharding in mpu.parameter_shardings(model).items()}
    weights = serial_gpt.random_weights(shapes, 3, dtype)
    load_whole(model, weights)
    return model, {name: weight.requires_grad_() for name, weight in weights.items()}


def check(rank: int, size: int, case: str, recompute: dict[str, Any]) -> None:
    chosen = config(**CASES[case])
    model, weights = build(size, chosen, **recompute)
    expected = serial_gpt.serial_logits(chosen, weights, ids(0))
    assert_close(gather_logits(model(ids(0)), VOCAB), expected, 1e-9)
    expected = serial_gpt.serial_losses(chosen, weights, ids(0), ids(1))
    counted = torch.arange(S).expand(B, S)
    losses = model(ids(0), counted, labels=ids(1))
    assert_close(losses, expected, 1e-9)
    assert torch.equal(model(ids(0), labels=ids(1)), losses)
    expected.square().sum().backward()
    losses.square().sum().backward()
    sum_partial_gradients(model)
    gradients = {name: weight.grad for name, weight in weights.items()}
    floor = max(gradient.abs().max().item() for gradient in gradients.values() if gradient is not None)
    assert_close(whole_gradients(model), gradients, 1e-9, floor)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_serial_twin(ranks: Ranks, size: int, case: str) -> None:
    ranks(size, check, case, {})


def test_equal_to_the_serial_twin_with_recomputation(ranks: Ranks) -> None:
    ranks(2, check, "pre", {"recompute_granularity": "full", "recompute_num_layers": 2})


def check_logits_gradients(rank: int, size: int) -> None:
    model, weights = build(size, config())
    scale = torch.linspace(-1, 1, B * S * VOCAB, dtype=torch.float64).view(B, S, VOCAB)
    (serial_gpt.serial_logits(config(), weights, ids(0)) * scale).sum().backward()
    (gather_logits(model(ids(0)), VOCAB) * scale).sum().backward()
    sum_partial_gradients(model)
    gradients = {name: weight.grad for name, weight in weights.items()}
    floor = max(gradient.abs().max().item() for gradient in gradients.values() if gradient is not None)
    assert_close(whole_gradients(model), gradients, 1e-9, floor)


def test_gradients_through_gathered_logits(ranks: Ranks) -> None:
    ranks(2, check_logits_gradients)


def partial_names(rank: int, size: int) -> tuple[list[str], list[str]]:
    model, _ = build(size, config(num_layers=1))
    plain = build_gpt(config(num_layers=1), VOCAB, 1, dtype=torch.float64, device="meta")
    shardings = mpu.parameter_shardings(model), mpu.parameter_shardings(plain)
    with_, without = ([name for name, place in found.items() if place.partial_gradient] for found in shardings)
    return with_, without


def test_what_has_a_term_of_its_gradient_on_each_rank(ranks: Ranks) -> None:
    for with_, without in ranks(2, partial_names):
        assert without == []
        assert with_ == [
            "embedding.position_embeddings.weight",
            "transformer.layers.0.input_layernorm.weight",
            "transformer.layers.0.input_layernorm.bias",
            "transformer.layers.0.self_attention.dense.bias",
            "transformer.layers.0.post_attention_layernorm.weight",
            "transformer.layers.0.post_attention_layernorm.bias",
            "transformer.layers.0.mlp.dense_4h_to_h.bias",
            "transformer.final_layernorm.weight",
            "transformer.final_layernorm.bias",
        ]


def hidden_states(rank: int, size: int) -> dict[str, Any]:
    """What each module of the shard's region gives, with dropout, and whether the replicated stream was left alone."""
    model, _ = build(size, config(hidden_dropout=0.3), dtype=torch.float32)
    found: dict[str, Any] = {}
    model.embedding.register_forward_hook(lambda *call: found.update(embedding=call[2].detach().numpy()))
    model.transformer.register_forward_hook(lambda *call: found.update(transformer=call[2].detach().numpy()))
    before = torch.get_rng_state()
    losses = model(ids(0), labels=ids(1))
    return found | {"losses": losses.detach().numpy(), "alone": torch.equal(torch.get_rng_state(), before)}


def test_each_rank_drops_of_its_own_shard(ranks: Ranks) -> None:
    first, second = ranks(2, hidden_states)
    for found in (first, second):
        assert found["embedding"].shape == found["transformer"].shape == (S // 2, B, 24)
        assert 0.2 < (found["embedding"] == 0).mean() < 0.4
        assert found["alone"]
    assert not np.array_equal(first["embedding"] == 0, second["embedding"] == 0)
    assert np.array_equal(first["losses"], second["losses"])


def check_lengths(rank: int, size: int) -> None:
    model, _ = build(size, config())
    with pytest.raises(ValueError, match=r"--seq-length 11: .* multiple of --tensor-model-parallel-size 2"):
        model(ids(0)[:, :11], labels=ids(1)[:, :11])


def test_a_length_that_does_not_divide_is_refused(ranks: Ranks) -> None:
    ranks(2, check_lengths)


def test_one_rank_has_no_shards() -> None:
    """The same numbers from the same streams as without the flag."""
    losses = []
    for shards in (False, True):
        mpu.model_parallel_manual_seed(1)
        model = build_gpt(
            config(hidden_dropout=0.5), VOCAB, 1, dtype=torch.float32, device="cpu", sequence_parallel=shards
        )
        losses.append(model(ids(0), labels=ids(1)))
    assert torch.equal(*losses)
