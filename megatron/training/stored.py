"""What a checkpoint says of the run that saved it, held against the present run: what differs, what is missing."""

import dataclasses
import json
from typing import Any

from megatron.base.compose import make_section, section_types
from megatron.base.config import flag_name
from megatron.optimizer import PrecisionConfig
from megatron.training.config import RunConfig

# What a checkpoint keeps of `RunState`.
PROGRESS = ("iteration", "consumed_samples", "scheduled_samples", "skipped_iterations")

# What the order of the samples depends on beside the seed and the number of samples.
_ORDERING = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "split", "seq_length")


def check_complete(stored: dict[str, Any], directory: str) -> None:
    """Raise ValueError where the checkpoint in `directory` is not one of a training run, by what `stored` lacks."""
    wanted = {"run": PROGRESS, "model": (), "optimizer": ("step_count",), "config": ()}
    missing = [part for part in wanted if part not in stored]
    there = [part for part in wanted if part in stored]
    missing += [f"{part}.{name}" for part in there for name in wanted[part] if name not in stored[part]]
    if missing:
        raise ValueError(f"--load {directory}: its checkpoint is not one to go on from, it lacks {', '.join(missing)}")


def stored_section(stored: dict[str, Any], section: str) -> dict[str, Any]:
    """A section of the config `stored` in a checkpoint; what an older one does not have is as it is by default."""
    fields = dataclasses.fields(section_types(RunConfig)[section])
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return {**json.loads(json.dumps(defaults)), **stored.get(section, {})}


def changes(stored: dict[str, Any], config: RunConfig) -> list[str]:
    """Sentences where flags that shape the learning rate or the order of the samples are not the checkpoint's.

    `stored` is the config in the checkpoint. The order depends on the number of samples that the whole run asks for.
    """
    now = json.loads(json.dumps(dataclasses.asdict(config)))  # as it would be stored: tuples are lists
    run = ("training", ("train_iters", "train_samples", "global_batch_size", "rampup_batch_size"))
    shaping = {
        "learning-rate schedule": [("schedule", tuple(now["schedule"])), run],
        "order of the samples": [("data", _ORDERING), run, ("training", ("seed",))],
    }
    differences = {
        what: [
            f"{flag_name(name)} is {now[section][name]} and was {before.get(name)}"
            for section, names in parts
            for before in [stored_section(stored, section)]
            for name in names
            if now[section][name] != before.get(name)
        ]
        for what, parts in shaping.items()
    }
    return [f"the {what} is not the checkpoint's: {', '.join(found)}" for what, found in differences.items() if found]


def stored_precision(stored: dict[str, Any]) -> PrecisionConfig:
    """The number formats of the run that saved the config `stored` in its checkpoint."""
    return make_section(PrecisionConfig, stored.get("precision", {}))


def format_differences(stored: dict[str, Any], config: RunConfig, directory: str) -> list[str]:
    """A sentence for each choice that makes the optimizer's state another than that of the checkpoint in `directory`.

    `stored` is the config in the checkpoint.
    """
    before, now = stored_precision(stored).format_flag, config.precision.format_flag
    mine, theirs = config.optimizer, stored_section(stored, "optimizer")
    choices = {now: before, f"--optimizer {mine.optimizer}": f"--optimizer {theirs['optimizer']}"}
    without_momentum = [not momentum for momentum in (mine.sgd_momentum, theirs["sgd_momentum"])]
    if mine.optimizer == theirs["optimizer"] == "sgd" and any(without_momentum) and not all(without_momentum):
        choices[f"--sgd-momentum {mine.sgd_momentum}"] = f"--sgd-momentum {theirs['sgd_momentum']}"
    return [
        f"{chosen}: the checkpoint in {directory} is of a run with {was}"
        for chosen, was in choices.items()
        if chosen != was
    ]


def model_differences(stored: dict[str, Any], present: dict[str, Any], directory: str) -> list[str]:
    """A sentence for each choice in which the model of the checkpoint in `directory` differs from the present one.

    A choice that an older checkpoint does not name is as it is by default.
    """
    if bool(stored) != bool(present) or stored.get("model") != present.get("model"):
        kinds = [signature.get("model", "a model of another kind") for signature in (stored, present)]
        return [f"--load {directory}: its checkpoint is of {kinds[0]}, this run trains {kinds[1]}"]
    before = {**{name: stored_section({}, "model").get(name) for name in present}, **stored}
    return [
        f"{flag_name(name)} {present.get(name)}: the model of the checkpoint in {directory} has {before[name]}"
        for name in sorted(before)
        if before[name] != present.get(name)
    ]
