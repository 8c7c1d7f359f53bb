"""The formula for the operations that are executed, against a count of the products that a GPT really does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron import mpu
from megatron.base.formulas import (
    bert_head_flops,
    bert_parameters,
    hardware_flops,
    layer_forward_flops,
    model_flops,
    padded_vocab_size,
)
from megatron.model import BertModel, RecomputeConfig, TransformerConfig, build_bert, build_gpt
from megatron.tasks import finetune
from megatron.tasks.config import FinetuneConfig
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from megatron.training.flops import flops_per_sample
from tests.harness.finetuning import task_flags
from tests.harness.race_files import write_race, write_vocabulary
from tests.harness.runs import flags

B, S, LAYERS, HIDDEN, HEADS, INNER, HEAD_SIZE, VOCAB, DIVISIBLE_BY = 2, 16, 3, 32, 4, 48, 12, 50, 8


def counted(recompute: RecomputeConfig, chunk_size: int | None = None) -> int:
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
        cross_entropy_chunk_size=chunk_size,
    )
    mpu.model_parallel_manual_seed(1)
    model = build_gpt(config, VOCAB, 1, dtype=torch.float32, device="cpu", recompute=recompute)
    tokens = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(2))
    # The counter does not know the form that adds to what is there.
    in_place = {torch.ops.aten.addmm_: lambda total, a, b, **_: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
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
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_the_formula_is_what_is_executed(recompute: RecomputeConfig, layers: int, chunk_size: int | None) -> None:
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
        recomputed_logits=chunk_size is not None,
    )
    assert counted(recompute, chunk_size) == expected


@pytest.mark.parametrize("binary_head", [True, False])
def test_the_heads_of_a_bert(binary_head: bool) -> None:
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "max_position_embeddings": S}
    config = TransformerConfig(**sizes, attention_backend="unfused", make_vocab_size_divisible_by=VOCAB)
    mpu.model_parallel_manual_seed(1)
    model = build_bert(config, VOCAB, 1, dtype=torch.float32, device="cpu", binary_head=binary_head)
    tokens = torch.zeros(B, S, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        lm, binary = model(tokens, labels=tokens)
        (lm.sum() + (binary.sum() if binary_head else 0)).backward()
    heads = 3 * B * bert_head_flops(S, HIDDEN, binary_head=binary_head)
    assert counter.get_total_flops() == model_flops(B, S, LAYERS, HIDDEN, VOCAB) + heads


@pytest.mark.parametrize("post_norm", [True, False])
@pytest.mark.parametrize("binary_head", [True, False])
def test_parameters_of_a_bert(post_norm: bool, binary_head: bool) -> None:
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "max_position_embeddings": S}
    config = TransformerConfig(**sizes, norm_position="post" if post_norm else "pre", ffn_hidden_size=INNER)
    model = BertModel(config, VOCAB, binary_head=binary_head, device="meta")
    counted = sum(torch.Size(s.global_shape).numel() for s in mpu.parameter_shardings(model).values())
    assert counted == bert_parameters(LAYERS, HIDDEN, VOCAB, S, INNER, binary_head=binary_head)


@pytest.mark.parametrize(("chunk_size", "again"), [(None, False), (31, True), (32, False)])
def test_a_run_counts_the_logits_that_its_loss_computes_again(chunk_size: int | None, again: bool) -> None:
    words = flags("data", micro_batch_size=2, seq_length=16, cross_entropy_chunk_size=chunk_size)
    config = parse_composed(RunConfig, words, world_size=1, check_inputs=False)
    model, executed = flops_per_sample(config, 100)
    assert executed - model == (2 * 16 * config.model.hidden_size * 100 if again else 0)
    assert (counted(RecomputeConfig(), chunk_size) > counted(RecomputeConfig())) == again


@pytest.mark.parametrize("padded", [None, 4096])
def test_fine_tuning_makes_no_logits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, padded: int | None) -> None:
    """Each of a question's four sequences costs what its layers do, however many rows the vocabulary has."""
    write_vocabulary(tmp_path)
    for part in ("train", "dev"):
        write_race(tmp_path / part, {"middle": 4})
    told: dict[str, Any] = {}
    monkeypatch.setattr(finetune, "pretrain", lambda config, **arguments: told.update(arguments))
    words = task_flags("RACE", tmp_path, padded_vocab_size=padded, cross_entropy_chunk_size=8)
    finetune.finetune(parse_composed(FinetuneConfig, words, world_size=1))
    expected = 4 * 3 * 2 * layer_forward_flops(16, 32)
    assert told["flops_per_sample"] == told["hardware_flops_per_sample"] == expected
