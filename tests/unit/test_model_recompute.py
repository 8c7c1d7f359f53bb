"""RecomputeConfig: what it refuses, and which layers it forgets."""

from typing import Any

import pytest

from megatron.base.complaints import ConfigError
from megatron.model import RecomputeConfig

FULL = {"recompute_granularity": "full"}


def test_nothing_is_recomputed_by_default() -> None:
    assert RecomputeConfig().groups(["0", "1"]) == [(["0", "1"], False)]
    assert RecomputeConfig(recompute_granularity="selective").groups(["0", "1"]) == [(["0", "1"], False)]


@pytest.mark.parametrize(
    ("given", "chunks"),
    [
        ({}, [("0", True), ("1", True), ("2", True), ("3", True), ("4", True)]),
        ({"recompute_num_layers": 2}, [("01", True), ("23", True), ("4", True)]),
        ({"recompute_num_layers": 5, "recompute_method": "uniform"}, [("01234", True)]),
        ({"recompute_method": "block"}, [("0", True), ("1234", False)]),
        ({"recompute_num_layers": 2, "recompute_method": "block"}, [("0", True), ("1", True), ("234", False)]),
    ],
)
@pytest.mark.parametrize("name", [FULL, {"checkpoint_activations": True}])
def test_groups_of_full_recomputation(given: dict[str, Any], chunks: list[tuple[str, bool]], name: Any) -> None:
    assert RecomputeConfig(**(name | given)).groups("01234") == [(list(names), again) for names, again in chunks]


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"recompute_granularity": "half"}, "--recompute-granularity half"),
        (FULL | {"recompute_method": "random"}, "--recompute-method random"),
        (FULL | {"recompute_num_layers": 0}, "--recompute-num-layers 0"),
        ({"recompute_method": "uniform"}, "--recompute-method uniform: it needs --recompute-granularity full"),
        ({"recompute_num_layers": 2}, "--recompute-num-layers 2: it needs"),
        ({"distribute_saved_activations": True}, "--distribute-saved-activations: it needs"),
        (
            {"recompute_granularity": "selective", "distribute_saved_activations": True},
            "--distribute-saved-activations: it needs",
        ),
        ({"recompute_granularity": "selective", "checkpoint_activations": True}, "--checkpoint-activations: it means"),
    ],
)
def test_a_contradiction_is_one_complaint_that_names_its_flag(given: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RecomputeConfig(**given)
    assert len(raised.value.problems) == 1
    assert raised.value.problems[0].startswith(flag)


@pytest.mark.parametrize(
    ("given", "ranks", "shards", "flag"),
    [
        ({}, 1, False, None),
        ({"recompute_num_layers": 4}, 1, False, None),
        ({"recompute_num_layers": 5}, 1, False, "--recompute-num-layers 5"),
        ({"distribute_saved_activations": True}, 2, False, None),
        ({"distribute_saved_activations": True}, 1, False, "--distribute-saved-activations"),
        ({"distribute_saved_activations": True}, 2, True, "--distribute-saved-activations: with --sequence-parallel"),
    ],
)
def test_what_does_not_fit_a_stage_of_four_layers(
    given: dict[str, Any], ranks: int, shards: bool, flag: str | None
) -> None:
    problems = RecomputeConfig(**(FULL | given)).layout_problems(4, ranks, shards)
    assert [problem[: len(flag or "")] for problem in problems] == ([] if flag is None else [flag])
