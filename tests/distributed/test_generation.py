"""Generation on tensor ranks and stages: the tokens of a serial twin that reads the whole text again for each."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron import mpu
from megatron.model import TransformerConfig, build_gpt
from megatron.pipeline import PipelineConfig
from megatron.tasks.control import Control
from megatron.tasks.generation import Chosen, Continuations, Prompt, continue_prompts
from megatron.tasks.next_token import SplitGPT
from megatron.tasks.sampling import SamplingConfig, choose
from tests.harness.ranks import Ranks
from tests.harness.serial_gpt import serial_logits

VOCABULARY, CONTEXT = 53, 20
SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "make_vocab_size_divisible_by": 8,
    "init_method_std": 0.3,
}
# What of the vocabulary is no token has weights too, which must never be chosen.
PADDED = {"padded_vocab_size": 70}
UNTIED = {"untie_embeddings_and_output_weights": True, "attention_backend": "unfused"}
SAMPLING = SamplingConfig(temperature=1.5), SamplingConfig(greedy=True), SamplingConfig(top_k=5, top_p=0.9)


def prompts() -> list[Prompt]:
    """Of several lengths, up to the context, with ends of each kind."""
    generator = torch.Generator().manual_seed(3)
    lengths, wanted = (1, 7, 3, 20, 12, 2, 5), (9, 4, 40, 5, 30, 12, 8)
    ids = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    made = [
        Prompt(row, length, SAMPLING[n % 3], stop_ids={7, 8, 9}, seed=(5, n))
        for n, (row, length) in enumerate(zip(ids, wanted, strict=True))
    ]
    return [*made, dataclasses.replace(made[0], seed=(5, "another"))]


def build(config: TransformerConfig, dtype: torch.dtype, pipeline: int = 1, stage: int = 0) -> Any:
    stages = PipelineConfig(pipeline_model_parallel_size=pipeline).split(config.num_layers).stages()
    return build_gpt(config, VOCABULARY, 11, dtype=dtype, device="cpu", stages=[stages[stage]]).eval()


def twin(config: TransformerConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of the whole model."""
    model = build(config, dtype)
    return {name: p.detach() for name, p in model.named_parameters()}


def next_logits(config: TransformerConfig, weights: dict[str, Tensor], ids: Sequence[int]) -> Tensor:
    return serial_logits(config, weights, torch.tensor([list(ids)]))[0, -1, :VOCABULARY]


def expected(config: TransformerConfig, dtype: torch.dtype) -> list[list[int]]:
    """What each prompt becomes, one by one, by the serial twin."""
    weights, found = twin(config, dtype), []
    for prompt in prompts():
        generator = torch.Generator().manual_seed(mpu.derive_seed(*prompt.seed))
        ids = list(prompt.ids)
        while len(ids) - len(prompt.ids) < prompt.length and len(ids) <= CONTEXT:
            ids.append(choose(next_logits(config, weights, ids), prompt.sampling, generator))
            if ids[-1] in prompt.stop_ids:
                break
        found.append(ids[len(prompt.ids) :])
    return found


def generated(
    rank: int, size: int, changes: dict[str, Any], dtype: torch.dtype, pipeline: int, ways: Sequence[tuple[int, bool]]
) -> list[list[list[int]]]:
    """The ids added to each prompt, for each way (rows, recompute)."""
    mpu.initialize_model_parallel(size // pipeline, pipeline)
    stage = mpu.get_pipeline_model_parallel_rank()
    model = SplitGPT(build(TransformerConfig(**SIZES | changes), dtype, pipeline, stage), torch.device("cpu"))
    found = []
    for rows, recompute in ways:
        texts = Continuations(model, rows, recompute=recompute)
        added: list[list[int]] = [[] for _ in prompts()]
        for one in continue_prompts(texts, prompts()):
            added[one.number].append(one.token)
        found.append(added)
    return found


@pytest.mark.parametrize(
    ("size", "pipeline", "changes", "ways"),
    [
        (1, 1, PADDED, [(1, False), (3, False), (8, False), (3, True)]),
        (2, 1, PADDED, [(3, False), (8, True)]),
        (3, 3, UNTIED, [(3, False)]),
        (6, 3, PADDED, [(3, False)]),
        (2, 1, {"norm_position": "post"} | UNTIED, [(8, False)]),
    ],
)
def test_in_float64_the_tokens_are_those_of_the_twin(
    ranks: Ranks, size: int, pipeline: int, changes: dict[str, Any], ways: list[tuple[int, bool]]
) -> None:
    wanted = expected(TransformerConfig(**SIZES | changes), torch.float64)
    assert len({id for row in wanted for id in row}) > 15  # it does say something
    assert {len(row) for row in wanted} != {len(row.ids) for row in prompts()}
    for found in ranks(size, generated, changes, torch.float64, pipeline, ways):
        assert found == [wanted] * len(ways)


@pytest.mark.parametrize(("size", "pipeline"), [(2, 1), (3, 3)])
def test_in_float32_greedy_tokens_differ_only_where_two_are_as_likely(ranks: Ranks, size: int, pipeline: int) -> None:
    config, greedy = TransformerConfig(**SIZES | PADDED), [n for n in range(8) if prompts()[n].sampling.greedy]
    weights = twin(config, torch.float64)
    for (found,) in ranks(size, generated, PADDED, torch.float32, pipeline, [(3, False)]):
        for number in greedy:
            ids = list(prompts()[number].ids)
            for token in found[number]:
                logits = next_logits(config, weights, ids)
                assert logits.max() - logits[token] < 1e-4
                ids.append(token)


def after_a_failure(rank: int, size: int) -> tuple[list[Chosen], list[list[Chosen]]]:
    """What is chosen for a long prompt, which is read at a position of no numbers, and then for short ones."""
    mpu.initialize_model_parallel(size)
    whole = build(TransformerConfig(**SIZES), torch.float64)
    with torch.no_grad():
        next(p for name, p in whole.named_parameters() if "position" in name)[12] = torch.nan
    texts = Continuations(SplitGPT(whole, torch.device("cpu")), 2)
    failed = texts.step({1: Prompt([1] * 16, 3), 2: Prompt([2] * 14, 3)})
    greedy = SamplingConfig(greedy=True)
    return failed, [
        texts.step({3: Prompt([5, 6], 4, greedy), 4: Prompt([7] * 8, 4, greedy)} if at == 0 else {}) for at in range(4)
    ]


def test_what_gave_no_numbers_is_not_seen_by_what_comes_after_it(ranks: Ranks) -> None:
    config = TransformerConfig(**SIZES)
    weights = twin(config, torch.float64)
    wanted = {3: [5, 6], 4: [7] * 8}
    for ids in wanted.values():
        for _ in range(4):
            ids.append(int(next_logits(config, weights, ids).argmax()))
    for failed, chosen in ranks(2, after_a_failure):
        assert [(one.number, one.finish) for one in failed] == [(1, "failure"), (2, "failure")]
        for number, ids in wanted.items():
            assert [one.token for step in chosen for one in step if one.number == number] == ids[-4:]


def told(rank: int, size: int) -> list[Any]:
    control = Control()
    said = [{"text": "é\n", "numbers": [1, 2]}, None, "x" * 100_000]
    return [control.share(value if control.first else None) for value in said]


def test_all_ranks_hear_what_the_first_one_hears(ranks: Ranks) -> None:
    wanted = [{"text": "é\n", "numbers": [1, 2]}, None, "x" * 100_000]
    assert ranks(3, told) == [wanted] * 3
    assert ranks(1, told) == [wanted]
