"""A run made small keeps the pattern of what a layout can break: degrees, split, heads, micro-batches."""

import dataclasses

import pytest

from megatron.parity.shrink import Degrees, degrees_of, differences, fitted, flat, in_float64, one_process, shrunk
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig

RUN = [
    *("--num-layers", "8", "--hidden-size", "512", "--num-attention-heads", "8"),
    *("--seq-length", "256", "--max-position-embeddings", "256"),
    *("--micro-batch-size", "2", "--global-batch-size", "16", "--train-iters", "100", "--lr", "1e-4"),
    *("--vocab-file", "none", "--merge-file", "none"),
]


def asked_for(words: str, world: int) -> RunConfig:
    return parse_composed(RunConfig, [*RUN, *words.split()], world_size=world, check_inputs=False)


def small_of(asked: RunConfig, world: int, most: int = 8) -> tuple[RunConfig, Degrees]:
    degrees = fitted(degrees_of(asked, world), most)
    return shrunk(asked, world, degrees, 3), degrees


@pytest.mark.parametrize(
    ("asked", "most", "expected"),
    [
        (Degrees(1, 1, 1), 8, Degrees(1, 1, 1)),
        (Degrees(2, 2, 2, 2), 8, Degrees(2, 2, 2, 2)),
        (Degrees(8, 16, 8, 3), 8, Degrees(2, 2, 2, 2)),
        (Degrees(8, 64, 1), 8, Degrees(2, 4, 1)),
        (Degrees(1, 8, 64), 4, Degrees(1, 2, 2)),
        (Degrees(3, 1, 5), 6, Degrees(3, 1, 2)),
        (Degrees(8, 8, 8, 4), 4, Degrees(2, 2, 1, 2)),
        (Degrees(8, 8, 1, 4), 2, Degrees(1, 2, 1, 2)),
    ],
)
def test_degrees_that_do_not_fit_are_reduced(asked: Degrees, most: int, expected: Degrees) -> None:
    assert fitted(asked, most) == expected


@pytest.mark.parametrize(
    ("words", "world", "counts"),
    [
        ("", 1, [2]),
        ("--pipeline-model-parallel-size 8", 8, [1] * 8),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2, [1] * 4),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", 8, [2] * 4),
        ("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 2", 3, [1, 2, 2]),
        ("--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 5", 2, [2, 3]),
        (
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2 "
            "--decoder-last-pipeline-num-layers 6 --num-layers-per-virtual-pipeline-stage 1",
            2,
            [1, 2, 1, 2],
        ),
        ("--pipeline-model-parallel-size 3 --account-for-loss-in-pipeline-split", 3, [2, 2, 1]),
    ],
)
def test_a_shrunk_run_keeps_the_pattern_of_the_split(words: str, world: int, counts: list[int]) -> None:
    asked = asked_for(f"{words} --global-batch-size 48", world)
    small, degrees = small_of(asked, world)
    assert [len(stage.layers) for stage in small.layer_split(100).stages()] == counts
    assert degrees_of(small, degrees.ranks) == degrees
    assert one_process(small).model.num_layers == small.model.num_layers


def test_choices_are_kept_and_sizes_keep_their_pattern() -> None:
    words = (
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 "
        "--sequence-parallel --norm-position post --untie-embeddings-and-output-weights --fp16 --optimizer sgd "
        "--use-distributed-optimizer --overlap-grad-reduce --recompute-granularity full --kv-channels 128 "
        "--ffn-hidden-size 1000 --rampup-batch-size 16 16 320 --global-batch-size 64 --weight-decay 0.2 "
        "--reset-attention-mask --max-position-embeddings 300 --cross-entropy-chunk-size 64"
    )
    asked = asked_for(words, 32)
    small, degrees = small_of(asked, 32)
    assert degrees == Degrees(2, 2, 2, 2)
    model, batches = small.model, small.batch_sizes(degrees.ranks)
    assert (model.num_layers, model.num_attention_heads, model.hidden_size) == (4, 4, 32)
    assert model.projection_size > model.hidden_size
    assert model.ffn_size != 4 * model.hidden_size
    assert model.max_position_embeddings > small.data.seq_length
    assert (batches.micro_batch_size, batches.num_micro_batches) == (2, 4)
    assert [small.batch_schedule(8).size(consumed) for consumed in (0, 8, 16)] == [8, 8, 16]
    told = {name for name, _, _ in differences(asked, small)}
    assert "--hidden-size" in told and "--norm-position" not in told
    kept = {
        "model": ("norm_position", "untie_embeddings_and_output_weights", "activation", "attention_backend"),
        "optimizer": ("optimizer", "weight_decay", "use_distributed_optimizer", "overlap_grad_reduce", "clip_grad"),
        "precision": ("fp16", "bf16", "params_dtype", "hysteresis"),
        "data": ("reset_attention_mask", "eod_mask_loss"),
        "recompute": ("recompute_granularity",),
        "distributed": ("sequence_parallel",),
    }
    for section, names in kept.items():
        for name in names:
            assert getattr(getattr(small, section), name) == getattr(getattr(asked, section), name), name
    assert small.recompute.recompute_granularity == "full" and small.checkpoint.save is None


def test_one_tensor_rank_distributes_no_saved_activations() -> None:
    words = "--tensor-model-parallel-size 2 --recompute-granularity full --distribute-saved-activations"
    asked = asked_for(f"{words} --pipeline-model-parallel-size 4", 8)
    for most, kept in ((8, True), (2, False)):
        small, degrees = small_of(asked, 8, most)
        assert (degrees.tensor > 1, small.recompute.distribute_saved_activations) == (kept, kept)


def test_one_process_has_nothing_of_a_layout_and_the_same_mathematics() -> None:
    asked = asked_for("--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity selective --bf16", 4)
    small, degrees = small_of(asked, 4)
    alone = one_process(small)
    assert degrees_of(alone, 1) == Degrees(1, 1, 1)
    assert (alone.recompute.granularity, alone.distributed.sequence_parallel) == (None, False)
    assert alone.training == small.training
    assert dataclasses.replace(alone.model, make_vocab_size_divisible_by=8) == small.model
    assert flat(in_float64(small, degrees.ranks))["params_dtype"] == "float64"
    assert not in_float64(small, degrees.ranks).precision.is_mixed
