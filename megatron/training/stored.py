"""What a checkpoint says of the run that saved it, held against the present run: what differs, what is missing."""

import dataclasses
import json
from collections.abc import Collection
from typing import Any

from megatron.base.complaints import ConfigError
from megatron.base.compose import make_section, section_types
from megatron.base.config import flag_name
from megatron.optimizer import PrecisionConfig, Schedule, ScheduleConfig
from megatron.training.config import RunConfig

# What a checkpoint keeps of `RunState`.
PROGRESS = ("iteration", "consumed_samples", "scheduled_samples", "skipped_iterations")

# What a run that goes on wants of a checkpoint's plain values.
_PARTS: dict[str, tuple[str, ...]] = {"run": PROGRESS, "model": (), "config": (), "optimizer": ("step_count",)}


def incomplete(stored: dict[str, Any], directory: str, wanted: Collection[str] = tuple(_PARTS)) -> list[str]:
    """A sentence where the checkpoint in `directory` is not one of a training run: what of `wanted` it lacks."""
    missing = [part for part in wanted if part not in stored]
    there = [part for part in wanted if part in stored]
    missing += [f"{part}.{name}" for part in there for name in _PARTS[part] if name not in stored[part]]
    if not missing:
        return []
    return [f"--load {directory}: its checkpoint is not one to go on from, it lacks {', '.join(missing)}"]


def stored_section(stored: dict[str, Any], section: str) -> dict[str, Any]:
    """A section of the config `stored` in a checkpoint; what an older one does not have is as it is by default."""
    fields = dataclasses.fields(section_types(RunConfig)[section])
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return {**json.loads(json.dumps(defaults)), **stored.get(section, {})}


def stored_schedule(stored: dict[str, Any]) -> Schedule | None:
    """The learning-rate schedule by which a run went on that was saved; None where its checkpoint does not tell it."""
    if "schedule" in stored:
        return Schedule(**stored["schedule"])
    sections = stored.get("config", {})
    flags, training = sections.get("schedule", {}), sections.get("training", {})
    batch, lengths = training.get("global_batch_size"), [training.get(f"train_{unit}") for unit in ("iters", "samples")]
    if batch is None or lengths == [None, None]:
        return None
    try:
        return make_section(ScheduleConfig, flags).resolve(batch, *lengths)
    except ConfigError:  # one of a program that knows other ones
        return None


def schedule_differences(before: Schedule | None, now: Schedule, config: ScheduleConfig, directory: str) -> list[str]:
    """A sentence where the checkpoint in `directory` went by another schedule, and no flag says which one counts."""
    if before is None and config.use_checkpoint_lr_scheduler:
        return [f"--use-checkpoint-lr-scheduler: the checkpoint in {directory} does not tell its schedule"]
    differences = [] if before is None else now.differences(before)
    if not differences or config.override_lr_scheduler or config.use_checkpoint_lr_scheduler:
        return []
    return [
        f"the learning-rate schedule is not that of the checkpoint in {directory}: {', '.join(differences)}; "
        "--override-lr-scheduler goes on by the flags, --use-checkpoint-lr-scheduler by the checkpoint"
    ]


def stored_precision(stored: dict[str, Any]) -> PrecisionConfig:
    """The number formats of the run that saved the config `stored` in its checkpoint."""
    return make_section(PrecisionConfig, stored.get("precision", {}))


def format_differences(stored: dict[str, Any], config: RunConfig, directory: str) -> list[str]:
    """A sentence for each choice that makes the optimizer's state another than that of the checkpoint in `directory`.

    `stored` is the config in the checkpoint. Master weights and moments are float32 with 16-bit and float32 weights.
    """
    before, now = stored_precision(stored), config.precision
    mine, theirs = config.optimizer, stored_section(stored, "optimizer")
    choices = {f"--optimizer {mine.optimizer}": f"--optimizer {theirs['optimizer']}"}
    if before.main_dtype != now.main_dtype:
        choices[now.format_flag] = before.format_flag
    without_momentum = [not momentum for momentum in (mine.sgd_momentum, theirs["sgd_momentum"])]
    if mine.optimizer == theirs["optimizer"] == "sgd" and any(without_momentum) and not all(without_momentum):
        choices[f"--sgd-momentum {mine.sgd_momentum}"] = f"--sgd-momentum {theirs['sgd_momentum']}"
    return [
        f"{chosen}: the checkpoint in {directory} is of a run with {was}; --no-load-optim goes on with a new optimizer"
        for chosen, was in choices.items()
        if chosen != was
    ]


def keeps_moments(stored: dict[str, Any]) -> bool:
    """Whether the optimizer of the run that saved the config `stored` has moments; plain SGD has none."""
    section = stored_section(stored, "optimizer")
    return section["optimizer"] != "sgd" or bool(section["sgd_momentum"])


# What of a model's description is no flag, in words.
_IN_WORDS = {
    "vocab_size": "a tokenizer of {} tokens",
    "token_types": "{} token types",
    "pooler": "pooler {}",
    "classes": "{} classes",
    "choices": "{} options of a question",
}


def _in_words(name: str, value: Any) -> str:
    return _IN_WORDS.get(name, f"{flag_name(name)} {{}}").format(value)


def model_differences(stored: dict[str, Any], present: dict[str, Any], directory: str) -> list[str]:
    """A sentence for each choice in which the model of the checkpoint in `directory` differs from the present one.

    A choice that an older checkpoint does not name is as it is by default.
    """
    if bool(stored) != bool(present) or stored.get("model") != present.get("model"):
        kinds = [signature.get("model", "a model of another kind") for signature in (stored, present)]
        return [f"--load {directory}: its checkpoint is of {kinds[0]}, this run trains {kinds[1]}"]
    before = {**{name: stored_section({}, "model").get(name) for name in present}, **stored}
    return [
        f"{_in_words(name, present.get(name))}: the model of the checkpoint in {directory} has {before[name]}"
        for name in sorted(before)
        if before[name] != present.get(name)
    ]
