"""Checkpoints of other versions: what they do not say is taken as the default, or told in a sentence."""

import dataclasses
import json
from typing import Any

import pytest

from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from megatron.training.stored import (
    changes,
    check_complete,
    format_differences,
    model_differences,
    stored_precision,
    stored_section,
)
from tests.harness.runs import flags

CONFIG = parse_composed(RunConfig, flags("data"), world_size=1, check_inputs=False)
STORED = json.loads(json.dumps(dataclasses.asdict(CONFIG)))


def without(section: str, *names: str) -> dict[str, Any]:
    """The stored config without these fields of a section, or without the section where none are named."""
    rest = {name: value for name, value in STORED[section].items() if name not in names}
    return {name: value for name, value in STORED.items() if name != section} | ({section: rest} if names else {})


def test_the_same_config_has_changed_nothing() -> None:
    assert changes(STORED, CONFIG) == []
    assert format_differences(STORED, CONFIG, "there") == []


@pytest.mark.parametrize(
    ("section", "names"),
    [(name, ()) for name in ("precision", "optimizer", "pipeline", "logging")] + [("schedule", ("lr_decay_samples",))],
)
def test_what_is_not_stored_was_the_default(section: str, names: tuple[str, ...]) -> None:
    assert changes(without(section, *names), CONFIG) == []
    assert format_differences(without(section, *names), CONFIG, "there") == []


def test_what_is_not_stored_and_has_no_default_is_told() -> None:
    told = changes(without("schedule"), CONFIG)
    assert len(told) == 1
    assert "--lr is 0.001 and was None" in told[0]
    assert [sentence.split(":")[0] for sentence in changes({}, CONFIG)] == [
        "the learning-rate schedule is not the checkpoint's",
        "the order of the samples is not the checkpoint's",
    ]
    assert stored_precision({}).format_flag == "--params-dtype float32"
    assert stored_section({"data": {"split": "1,0,0"}}, "data")["split"] == "1,0,0"


def test_a_choice_that_an_older_model_does_not_name_is_the_default() -> None:
    now = {"model": "gpt", **CONFIG.model.signature()}
    before = {name: value for name, value in now.items() if name != "untie_embeddings_and_output_weights"}
    assert model_differences(before, now, "there") == []
    untied = now | {"untie_embeddings_and_output_weights": True}
    assert model_differences(before, untied, "there") == [
        "--untie-embeddings-and-output-weights True: the model of the checkpoint in there has False"
    ]


@pytest.mark.parametrize(
    ("part", "name", "words"),
    [("run", None, "it lacks run"), ("run", "consumed_samples", "run.consumed_samples"), ("config", None, "config")],
)
def test_what_cannot_be_gone_on_from_is_refused(part: str, name: str | None, words: str) -> None:
    progress = dict.fromkeys(("iteration", "consumed_samples", "scheduled_samples", "skipped_iterations"), 0)
    stored: dict[str, Any] = {"run": progress, "model": {}, "optimizer": {"step_count": 0}, "config": {}}
    check_complete(stored, "there")
    del (stored if name is None else stored[part])[part if name is None else name]
    with pytest.raises(ValueError, match=f"--load there: its checkpoint is not one to go on from, .*{words}"):
        check_complete(stored, "there")
