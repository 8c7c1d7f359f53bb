"""TransformerConfig: what it derives, what it refuses, what of it goes into a checkpoint."""

import dataclasses
from typing import Any

import pytest

from megatron.base.complaints import ConfigError
from megatron.model.config import TransformerConfig

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def make(**changes: Any) -> TransformerConfig:
    return TransformerConfig(**(SIZES | changes))


def test_sizes_follow_from_the_hidden_size() -> None:
    config = make()
    assert (config.head_size, config.projection_size, config.ffn_size) == (6, 24, 96)


def test_sizes_that_are_given_win() -> None:
    config = make(kv_channels=5, ffn_hidden_size=7)
    assert (config.head_size, config.projection_size, config.ffn_size) == (5, 20, 7)


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("num_layers", 0, "--num-layers 0"),
        ("hidden_size", 0, "--hidden-size 0"),
        ("hidden_size", 25, "--hidden-size 25"),
        ("num_attention_heads", 0, "--num-attention-heads 0"),
        ("max_position_embeddings", 0, "--max-position-embeddings 0"),
        ("ffn_hidden_size", 0, "--ffn-hidden-size 0"),
        ("kv_channels", 0, "--kv-channels 0"),
        ("make_vocab_size_divisible_by", 0, "--make-vocab-size-divisible-by 0"),
        ("padded_vocab_size", 0, "--padded-vocab-size 0"),
        ("cross_entropy_chunk_size", 0, "--cross-entropy-chunk-size 0"),
        ("layernorm_epsilon", -1e-5, "--layernorm-epsilon -1e-05"),
        ("init_method_std", float("nan"), "--init-method-std nan"),
        ("attention_dropout", 1.0, "--attention-dropout 1.0"),
        ("hidden_dropout", -0.1, "--hidden-dropout -0.1"),
        ("norm_position", "middle", "--norm-position middle"),
        ("activation", "relu", "--activation relu"),
        ("attention_backend", "flash", "--attention-backend flash"),
    ],
)
def test_a_bad_value_is_one_complaint_that_names_its_flag(name: str, value: Any, flag: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make(**{name: value})
    assert len(raised.value.problems) == 1
    assert raised.value.problems[0].startswith(flag)


def test_all_complaints_come_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        make(num_layers=-1, activation="relu", hidden_dropout=2.0)
    assert len(raised.value.problems) == 3


def test_head_size_given_frees_the_hidden_size() -> None:
    assert make(hidden_size=25, kv_channels=8).projection_size == 32


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(1, []), (2, []), (3, ["--num-attention-heads 4"]), (8, ["--num-attention-heads 4", "--ffn-hidden-size 100"])],
)
def test_what_cannot_be_split_is_named(ranks: int, flags: list[str]) -> None:
    problems = make(ffn_hidden_size=96 if ranks == 3 else 100).tensor_problems(ranks)
    assert len(problems) == len(flags)
    for problem, flag in zip(problems, flags, strict=True):
        assert problem.startswith(flag)
        assert f"--tensor-model-parallel-size {ranks}" in problem


def test_what_was_not_given_is_traced_to_what_was() -> None:
    _, derived = make().tensor_problems(5)
    assert derived.startswith("--ffn-hidden-size 96 (4 times --hidden-size 24): it must be a multiple")
    _, given = make(ffn_hidden_size=96).tensor_problems(5)
    assert given.startswith("--ffn-hidden-size 96: it must be a multiple")


def test_the_residual_of_a_norm_needs_norms_before_the_blocks() -> None:
    with pytest.raises(ValueError, match="--apply-residual-connection-post-layernorm: it needs --norm-position pre"):
        make(apply_residual_connection_post_layernorm=True, norm_position="post")


def test_signature_spells_out_defaults() -> None:
    assert make().signature() == make(ffn_hidden_size=96, kv_channels=6).signature()


CHANGED: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "ffn_hidden_size": 8,
    "kv_channels": 4,
    "layernorm_epsilon": 1e-6,
    "norm_position": "post",
    "apply_residual_connection_post_layernorm": True,
    "activation": "gelu_erf",
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 512,
}
UNCHANGED: dict[str, Any] = {
    "make_vocab_size_divisible_by": 64,
    "attention_backend": "unfused",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.01,
    "cross_entropy_chunk_size": 16,
}


def test_every_field_either_changes_the_signature_or_is_known_not_to() -> None:
    assert CHANGED.keys() | UNCHANGED.keys() == {field.name for field in dataclasses.fields(TransformerConfig)}
    before = make().signature()
    for name, value in CHANGED.items():
        assert make(**{name: value}).signature() != before, name
    for name, value in UNCHANGED.items():
        assert make(**{name: value}).signature() == before, name
