"""Checkpoints of other versions: what they do not say is taken as the default, or told in a sentence."""

import dataclasses
import json
from typing import Any

import pytest

from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from megatron.training.stored import (
    format_differences,
    incomplete,
    model_differences,
    schedule_differences,
    stored_precision,
    stored_schedule,
    stored_section,
)
from tests.harness.runs import flags

CONFIG = parse_composed(RunConfig, flags("data"), world_size=1, check_inputs=False)
STORED = json.loads(json.dumps(dataclasses.asdict(CONFIG)))


def without(section: str, *names: str) -> dict[str, Any]:
    """The stored config without these fields of a section, or without the section where none are named."""
    rest = {name: value for name, value in STORED[section].items() if name not in names}
    return {name: value for name, value in STORED.items() if name != section} | ({section: rest} if names else {})


NOW = CONFIG.schedule.resolve(8, CONFIG.training.train_iters)


def test_the_same_config_has_changed_nothing() -> None:
    assert format_differences(STORED, CONFIG, "there") == []
    assert stored_schedule({"config": STORED}) == NOW
    assert schedule_differences(NOW, NOW, CONFIG.schedule, "there") == []


@pytest.mark.parametrize("section", ["precision", "optimizer", "pipeline", "logging"])
def test_what_is_not_stored_was_the_default(section: str) -> None:
    assert format_differences(without(section), CONFIG, "there") == []
    assert stored_precision({}).format_flag == "--params-dtype float32"
    assert stored_section({"data": {"split": "1,0,0"}}, "data")["split"] == "1,0,0"


def test_a_schedule_is_stored_or_follows_from_the_flags() -> None:
    other = dataclasses.replace(NOW, peak=0.5)
    assert stored_schedule({"config": STORED, "schedule": dataclasses.asdict(other)}) == other
    assert stored_schedule({"config": without("schedule", "lr_decay_samples")}) == NOW
    for unknown in (without("schedule"), without("training"), without("training", "global_batch_size"), {}):
        assert stored_schedule({"config": unknown}) is None


def test_a_schedule_that_is_not_told() -> None:
    """It is not compared, and cannot be gone on with."""
    assert schedule_differences(None, NOW, CONFIG.schedule, "there") == []
    config = dataclasses.replace(CONFIG.schedule, use_checkpoint_lr_scheduler=True)
    (told,) = schedule_differences(None, NOW, config, "there")
    assert told == "--use-checkpoint-lr-scheduler: the checkpoint in there does not tell its schedule"


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
    assert incomplete(stored, "there") == []
    del (stored if name is None else stored[part])[part if name is None else name]
    (told,) = incomplete(stored, "there")
    assert told.startswith("--load there: its checkpoint is not one to go on from, ") and words in told
    assert incomplete(stored, "there", ["model"]) == []
