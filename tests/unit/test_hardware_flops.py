"""The formula for the operations that are executed, against a count of the products that a GPT really does."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron import mpu
from megatron.base.formulas import hardware_flops, padded_vocab_size
from megatron.model import RecomputeConfig, TransformerConfig, build_gpt

B, S, LAYERS, HIDDEN, HEADS, INNER, HEAD_SIZE, VOCAB, DIVISIBLE_BY = 2, 16, 3, 32, 4, 48, 12, 50, 8


def counted(recompute: RecomputeConfig) -> int:
    """Operations of all products of matrices in one forward and backward pass."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_position_embeddings=S,
        ffn_hidden_size=INNER,
        kv_channels=HEAD_SIZE,
        make_vocab_size_divisible_by=DIVISIBLE_BY,
        attention_backend="unfused",
    )
    mpu.model_parallel_manual_seed(1)
    model = build_gpt(config, VOCAB, 1, dtype=torch.float32, device="cpu", recompute=recompute)
    tokens = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(2))
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("recompute", "layers"),
    [
        (RecomputeConfig(), 0),
        (RecomputeConfig(recompute_granularity="full"), LAYERS),
        (RecomputeConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=2), 2),
        (RecomputeConfig(recompute_granularity="selective"), LAYERS),
    ],
    ids=["none", "full", "block", "selective"],
)
def test_the_formula_is_what_is_executed(recompute: RecomputeConfig, layers: int) -> None:
    expected = hardware_flops(
        B,
        S,
        LAYERS,
        HIDDEN,
        padded_vocab_size(VOCAB, DIVISIBLE_BY, 1),
        INNER,
        HEADS * HEAD_SIZE,
        recompute_granularity=recompute.granularity,
        recomputed_layers=layers,
    )
    assert counted(recompute) == expected
