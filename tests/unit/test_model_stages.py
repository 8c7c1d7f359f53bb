"""A GPT of several stages is the whole model: names, initial weights, losses, gradients, counts; and the 1T layout."""

import functools
import math
from typing import Any

import pytest
import torch

from megatron import mpu
from megatron.base.formulas import gpt_parameters
from megatron.base.stages import StagePart, part_problems
from megatron.model import GPTModel, TransformerConfig
from megatron.pipeline import LayerSplit
from tests.harness.closeness import assert_close
from tests.harness.stages import WORDS, B, Result, S, build, cut, deal, ids, in_order, run

UNTIED = {"untie_embeddings_and_output_weights": True}
# Layers of each stage, and the ranks that they are dealt out to.
SPLITS = [([2, 3], 1), ([2, 3], 2), ([1, 3, 1], 3), ([1, 1, 2, 1], 4), ([1, 1, 2, 1], 2)]
CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": UNTIED,
    "post": {"norm_position": "post"},
    "post, untied": {"norm_position": "post"} | UNTIED,
}
FULL = {"recompute_granularity": "full"}


def config(**changes: Any) -> TransformerConfig:
    sizes = {"num_layers": 5, "hidden_size": 24, "num_attention_heads": 4, "max_position_embeddings": 16}
    noisy = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "make_vocab_size_divisible_by": 16}
    return TransformerConfig(**(sizes | noisy | changes))


@functools.cache
def whole(case: str) -> tuple[GPTModel, Result]:
    """The model of a case in one part, and what it computes."""
    model = build(config(**CASES[case]))
    return model, run([model])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("counts", "ranks"), SPLITS)
def test_stages_are_the_whole_model(case: str, counts: list[int], ranks: int) -> None:
    """Names, initial weights and losses to the last bit, dropout included.

    The gradient of a tied embedding is the sum over both of its ends.
    """
    model, expected = whole(case)
    parts = deal(config(**CASES[case]), counts, ranks)
    weights, shardings = dict(model.named_parameters()), mpu.parameter_shardings(model)
    for part in parts:
        assert all(torch.equal(parameter, weights[name]) for name, parameter in part.named_parameters())
        assert mpu.parameter_shardings(part).items() <= shardings.items()
    held = [name for part in parts for name in part.state_dict() if name not in part.duplicate_parameters()]
    assert sorted(held) == sorted(weights)
    found = run(parts)
    assert torch.equal(found.losses, expected.losses)
    assert found.boundaries == [(S, B, 24)] * (len(counts) - 1)
    floor = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    assert_close(found.gradients, expected.gradients, 1e-12, floor)


@pytest.mark.parametrize(
    "recompute",
    [
        FULL | {"recompute_num_layers": 3},  # more than some stages have
        FULL | {"recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective"},
    ],
)
@pytest.mark.parametrize(("counts", "ranks"), [([1, 3, 1], 3), ([1, 1, 2, 1], 2)])
def test_each_stage_recomputes_for_itself(recompute: dict[str, Any], counts: list[int], ranks: int) -> None:
    _, expected = whole("tied")
    found = run(deal(config(), counts, ranks, recompute=recompute))
    assert torch.equal(found.losses, expected.losses)
    for name, gradient in expected.gradients.items():
        assert name == WORDS or torch.equal(found.gradients[name], gradient), name
    assert_close(found.gradients[WORDS], expected.gradients[WORDS], 1e-12)


def test_what_is_tied_and_what_is_a_copy() -> None:
    models = whole("tied")[0], *deal(config(), [1, 3, 1], 3)
    assert [model.tied_parameters() for model in models] == [[WORDS], [WORDS], [], [WORDS]]
    assert [model.duplicate_parameters() for model in models] == [[], [], [], [WORDS]]
    assert [name for name, _ in models[-1].named_parameters() if name.startswith("embedding")] == [WORDS]
    for model in (whole("untied")[0], *deal(config(**UNTIED), [1, 3, 1], 3)):
        assert model.tied_parameters() == model.duplicate_parameters() == []


def test_each_parameter_belongs_to_a_chunk() -> None:
    first, last = deal(config(), [1, 1, 2, 1], 2)
    assert [(chunk.first, chunk.last) for chunk in in_order([first, last])] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]
    for model, layers in ((first, {"0": 0, "2": 1, "3": 1}), (last, {"1": 0, "4": 1})):
        places = model.parameter_chunks()
        assert list(places) == [name for name, _ in model.named_parameters()]
        for name, chunk in places.items():
            of_layer = name.split(".")[2] if ".layers." in name else None
            assert chunk == (layers[of_layer] if of_layer else int(model is last)), name
    assert set(whole("tied")[0].parameter_chunks().values()) == {0}


def test_logits_and_evaluation() -> None:
    model, *models = build(config()).eval(), *deal(config(), [2, 3], 2)
    first, last = (part.eval().chunks[0] for part in models)
    with torch.no_grad():
        assert torch.equal(last(ids(0), hidden=first(ids(0))), model(ids(0)))


def test_hidden_states_of_another_shape_are_refused() -> None:
    _, last = in_order(deal(config(), [2, 3], 2))
    with pytest.raises(ValueError, match=r"hidden of shape None: a stage that is not the first needs \(12, 3, 24\)"):
        last(ids(0))
    with pytest.raises(ValueError, match=r"hidden of shape \(11, 3, 24\)"):
        last(ids(0), hidden=torch.zeros(11, 3, 24))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "at least one"),
        (cut([2, 4]), "from 0 to 4"),
        (cut([2, 3])[::-1], "in the order of the model"),
        ([cut([2, 3])[0]] * 2, "each may stand there once"),
        ([StagePart(range(2), True, True), StagePart(range(2, 5), True, True)], "only the last the head"),
    ],
)
def test_stages_that_are_none_of_this_model_are_refused(parts: list[StagePart], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(config(), parts)
    assert part_problems(cut([2, 3]), 5) == []


@pytest.mark.parametrize("changes", [{}, UNTIED])
def test_the_layout_of_a_trillion_parameters(changes: dict[str, Any]) -> None:
    """128 layers, h 25,600, 8 tensor and 64 pipeline ranks with 2 chunks each; without memory.

    (arXiv:2104.04473, table 1.) The parameters of all ranks together are those of the formula.
    """
    sizes = {"num_layers": 128, "hidden_size": 25_600, "num_attention_heads": 160, "max_position_embeddings": 2048}
    chosen = TransformerConfig(**(sizes | changes))
    stages = LayerSplit(128, 64, num_layers_per_virtual_pipeline_stage=1).stages()
    total = 0
    for rank in range(64):
        mine = [stage for stage in stages if stage.rank == rank]
        group = mpu.GroupInfo(None, 7, 8)
        model = GPTModel(chosen, 51_200, group=group, dtype=torch.float16, device="meta", stages=mine)
        assert 1.9e9 < sum(parameter.numel() for parameter in model.parameters()) < 2.2e9
        wholes = {name: math.prod(sharding.global_shape) for name, sharding in mpu.parameter_shardings(model).items()}
        total += sum(size for name, size in wholes.items() if name not in model.duplicate_parameters())
    assert total == gpt_parameters(128, 25_600, 51_200, 2048, untied=bool(changes))
