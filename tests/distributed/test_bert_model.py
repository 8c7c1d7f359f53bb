"""The BERT against its serial twin at every kind of layout, its collectives, and what padding must not do."""

from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from megatron.model import BertEncoder, BertForClassification, BertForMultipleChoice, BertModel, TransformerConfig
from tests.harness.bert_stages import LENGTHS, VOCAB, B, S, batch, build, gradients, load, run
from tests.harness.closeness import assert_close
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks
from tests.harness.serial_bert import SerialBert
from tests.harness.serial_gpt import random_weights
from tests.harness.stages import in_order
from tests.harness.whole_tensors import whole_parameters

H, LAYERS, LOSS = 24, 3, 2
VARIANTS: dict[str, dict[str, Any]] = {
    "pre": {},
    "residual": {"apply_residual_connection_post_layernorm": True, "attention_backend": "unfused"},
    "post": {"norm_position": "post", "activation": "gelu_erf", "untie_embeddings_and_output_weights": True},
}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}


def config(**changes: Any) -> TransformerConfig:
    quiet = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "make_vocab_size_divisible_by": 8}
    sizes = {"num_layers": LAYERS, "hidden_size": H, "num_attention_heads": 4, "max_position_embeddings": S}
    return TransformerConfig(**(sizes | quiet | changes))


def fill(models: list[BertEncoder]) -> dict[str, Tensor]:
    """Random whole weights, dealt out to the models."""
    named = {name: s.global_shape for model in models for name, s in mpu.parameter_shardings(model).items()}
    weights = random_weights(named, 3, torch.float64)
    load(models, weights)
    return weights


def assert_gradients_close(models: list[BertEncoder], weights: Mapping[str, Tensor]) -> None:
    expected = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    floor = max(gradient.abs().max().item() for gradient in expected.values())
    assert_close(gradients(models), expected, 1e-12, floor)


def check_pretraining(
    rank: int, size: int, changes: dict[str, Any], counts: tuple[int, ...], ranks: int, options: dict[str, Any]
) -> None:
    mpu.initialize_model_parallel(size)
    models = build(config(**changes), counts, ranks, **options)
    twin, given = SerialBert(config(**changes), fill(models)), batch()
    inputs = given["tokens"], given["types"], given["padding_mask"]
    output = run(models, *inputs, given["labels"])
    hidden = twin.encode(given["tokens"], given["types"], given["padding_mask"].bool())
    losses = twin.losses(hidden, given["labels"])
    assert_close(output.lm, losses, 1e-12)
    total, expected = output.lm.square().sum(), losses.square().sum()
    if output.binary is not None:
        binary = twin.linear("binary_head", twin.pooled(hidden))
        assert_close(output.binary, binary, 1e-12)
        total, expected = total + output.binary.sin().sum(), expected + binary.sin().sum()
    total.backward()
    expected.backward()
    assert_gradients_close(models, twin.weights)


@pytest.mark.parametrize(
    ("size", "variant", "counts", "ranks_of_pipeline", "options"),
    [
        (2, "pre", (), 1, {}),
        (2, "pre", (1, 1, 1), 1, {"sequence_parallel": True, "recompute": FULL}),
        (2, "residual", (), 1, {"sequence_parallel": True, "recompute": SELECTIVE}),
        (1, "residual", (2, 1), 2, {"binary_head": False}),
        (2, "post", (1, 0, 2), 3, {"sequence_parallel": True}),
        (4, "post", (2, 1), 2, {"recompute": FULL | {"distribute_saved_activations": True}}),
    ],
)
def test_losses_and_gradients_are_the_twins(
    ranks: Ranks, size: int, variant: str, counts: tuple[int, ...], ranks_of_pipeline: int, options: dict[str, Any]
) -> None:
    ranks(size, check_pretraining, VARIANTS[variant], counts, ranks_of_pipeline, options)


def check_tasks(rank: int, size: int, counts: tuple[int, ...], shards: bool) -> None:
    mpu.initialize_model_parallel(size)
    pipeline, given = len(counts) or 1, batch()
    inputs = [given[name] for name in ("tokens", "types", "padding_mask")]
    options: dict[str, Any] = {"sequence_parallel": shards}
    models = build(config(), counts, pipeline, kind=BertForClassification, classes=5, **options)
    twin = SerialBert(config(), fill(models))
    hidden = twin.encode(given["tokens"], given["types"], given["padding_mask"].bool())
    scores, expected = run(models, *inputs), twin.linear("classification_head", twin.pooled(hidden))
    assert_close(scores, expected, 1e-12)
    F.cross_entropy(scores, given["order"]).backward()
    F.cross_entropy(expected, given["order"]).backward()
    assert_gradients_close(models, twin.weights)

    models = build(config(), counts, pipeline, kind=BertForMultipleChoice, choices=3, **options)
    twin = SerialBert(config(), fill(models))
    hidden = twin.encode(given["tokens"], given["types"], given["padding_mask"].bool())
    folded = [torch.stack([ids, ids.roll(1, 0)]) for ids in inputs]  # [2, choices, s]: the same in another order
    scores = run(models, *folded)
    expected = twin.linear("multichoice_head", twin.pooled(hidden))[:, 0]  # [choices]
    assert_close(scores, torch.stack([expected, expected.roll(1)]), 1e-12)
    length = S // size if shards else S
    assert models[0].boundary_shape(2, S) == (length, 6, H)
    if counts:
        assert in_order(models)[0](*folded).shape == (length, 6, H)


@pytest.mark.parametrize(
    ("size", "counts", "shards"), [(1, (), False), (2, (), False), (1, (2, 1), False), (2, (1, 2), True)]
)
def test_heads_of_tasks(ranks: Ranks, size: int, counts: tuple[int, ...], shards: bool) -> None:
    ranks(size, check_tasks, counts, shards)


def check_dropout(rank: int, size: int, shards: bool) -> tuple[Any, Any]:
    """What stages and recomputation change where values are dropped: nothing. Returns the scores, for all ranks."""
    mpu.initialize_model_parallel(size)
    noisy, found = config(attention_dropout=0.2, hidden_dropout=0.2, norm_position="post"), []
    given = [batch()[name] for name in ("tokens", "types", "padding_mask", "labels")]
    for counts, recompute in ((), {}), ((1, 2), {}), ((), FULL):
        mpu.model_parallel_manual_seed(1234)
        models = build(noisy, counts, len(counts) or 1, sequence_parallel=shards, recompute=recompute)
        fill(models)
        lm, binary = run(models, *given)
        (lm.sum() + binary.sin().sum()).backward()
        found.append((lm.detach(), binary.detach(), gradients(models)))
    (lm, binary, expected), *others = found
    for other in others:
        assert other[0].equal(lm) and other[1].equal(binary)
        floor = max(gradient.abs().max().item() for gradient in expected.values())
        assert_close(other[2], expected, 1e-12, floor)
    dropped = config(norm_position="post")
    models = build(dropped)
    fill(models)
    assert not run(models, *given).lm.allclose(lm)
    return lm.numpy(), binary.numpy()


@pytest.mark.parametrize("shards", [False, True])
def test_dropout_is_the_same_whatever_is_computed_again(ranks: Ranks, shards: bool) -> None:
    first, second = ranks(2, check_dropout, shards)
    assert (first[0] == second[0]).all() and (first[1] == second[1]).all()


def count(rank: int, size: int, shards: bool, changes: dict[str, Any]) -> tuple[Counter[str], Counter[str], int]:
    mpu.initialize_model_parallel(size)
    (model,) = build(config(**changes), dtype=torch.float32, sequence_parallel=shards)
    given = [batch()[name] for name in ("tokens", "types", "padding_mask", "labels")]
    with CollectiveCounter() as forward:
        lm, binary = model(*given)
    with CollectiveCounter() as backward:
        (lm.sum() + binary.sum()).backward()
    gathered = [call.bytes for call in forward.calls if call.kind == "all_gather"]
    return forward.counts, backward.counts, min(gathered, default=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_collectives(ranks: Ranks, variant: str) -> None:
    """Those of a GPT; with sequence parallelism the pooler's small all-gather beside them."""
    for forward, backward, _ in ranks(2, count, False, VARIANTS[variant]):
        assert forward == {"all_reduce": 2 * LAYERS + 1 + LOSS}
        assert backward == {"all_reduce": 2 * LAYERS + 1}
    for forward, backward, smallest in ranks(2, count, True, VARIANTS[variant]):
        assert forward == {"all_gather": 2 * LAYERS + 1 + 1, "reduce_scatter": 2 * LAYERS + 1, "all_reduce": LOSS}
        assert backward == {"all_gather": 4 * LAYERS + 2, "reduce_scatter": 2 * LAYERS + 1}
        assert smallest == 2 * B * H * 4


@pytest.mark.parametrize("changes", [{}, {"attention_backend": "unfused"}, {"norm_position": "post"}])
def test_padding_does_not_reach_real_positions(changes: dict[str, Any]) -> None:
    """Whatever stands in it; and a padded sample is the shorter one."""
    models = build(config(**changes))
    fill(models)
    given = batch()
    real = given["padding_mask"].bool()
    output = run(models, given["tokens"], given["types"], given["padding_mask"])
    noise = torch.randint(VOCAB, (B, S), generator=torch.Generator().manual_seed(9))
    other = run(models, given["tokens"].where(real, noise), given["types"].where(real, 1), given["padding_mask"])
    assert other.lm[real].equal(output.lm[real]) and other.binary.equal(output.binary)
    assert not other.lm[~real].allclose(output.lm[~real])
    for sample, length in enumerate(LENGTHS):
        alone = run(models, given["tokens"][sample : sample + 1, :length], given["types"][sample : sample + 1, :length])
        assert_close(alone.lm[0], output.lm[sample, :length], 1e-12)
        assert_close(alone.binary[0], output.binary[sample], 1e-12)
    unseen = min(set(range(VOCAB)) - set(given["tokens"][real].tolist()))
    run(models, given["tokens"].where(real, unseen), given["types"], given["padding_mask"]).binary.sum().backward()
    gradient = models[0].embedding.word_embeddings.weight.grad
    assert torch.count_nonzero(gradient[unseen]) == 0 < torch.count_nonzero(gradient)


def test_the_kernel_gets_no_square_mask() -> None:
    (model,) = build(config(), kind=BertEncoder)
    given, kernel = batch(), F.scaled_dot_product_attention
    with mock.patch.object(F, "scaled_dot_product_attention", side_effect=kernel) as called:
        encoding = model(given["tokens"], given["types"], given["padding_mask"])
    assert encoding.hidden.shape == (S, B, H) and encoding.pooled.shape == (B, H)
    assert called.call_count == LAYERS
    for call in called.call_args_list:
        assert call.kwargs["attn_mask"].shape == (B, 1, 1, S) and not call.kwargs["is_causal"]
        assert call.kwargs["attn_mask"].untyped_storage().nbytes() == B * S


def test_mistakes_are_told() -> None:
    (model,) = build(config())
    given = batch()
    tokens, types, mask = given["tokens"], given["types"], given["padding_mask"]
    empty = mask.clone()
    empty[1] = 0
    for args, words in (
        ((tokens, types, empty), "each sample must have at least one token that is no padding"),
        ((tokens, types[:, :3], mask), "types of shape"),
        ((tokens, types + 1, mask), "token type 2: the model has types 0 to 1"),
        ((tokens, types, mask, tokens[:, :3]), "labels of shape"),
        ((tokens[0],), r"they must be \[b, s\]"),
    ):
        with pytest.raises(ValueError, match=words):
            model(*args)
    with pytest.raises(ValueError, match="0 classes"):
        BertForClassification(config(), VOCAB, classes=0)
    choices = BertForMultipleChoice(config(), VOCAB, choices=4, device="meta")
    with pytest.raises(ValueError, match=r"all must be \[b, 4, s\]"):
        choices(tokens[None])


def initial(rank: int, size: int, kind: str) -> dict[str, Any]:
    mpu.initialize_model_parallel(size)
    kinds: dict[str, Any] = {
        "bert": (BertModel, {}),
        "choice": (BertForMultipleChoice, {"choices": 4}),
    }
    (model,) = build(config(norm_position="post"), kind=kinds[kind][0], **kinds[kind][1])
    return {name: weight.numpy() for name, weight in whole_parameters(model).items()}


def test_initial_weights_are_equal_at_any_layout_and_of_any_kind(ranks: Ranks) -> None:
    (alone,) = ranks(1, initial, "bert")
    for others in (*ranks(2, initial, "bert"), *ranks(2, initial, "choice")):
        common = alone.keys() & others.keys()
        assert len(others.keys() - common) in (0, 2)  # weight and bias of the head of a task
        assert all((alone[name] == others[name]).all() for name in common)
    assert alone["lm_head.bias"].shape == (VOCAB,) and not alone["lm_head.bias"].any()
    assert abs(alone["lm_head.dense.weight"].std() - 0.02) < 0.003
