"""Several configs made together from one pool of values, so that all their complaints are told at once."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from megatron.base.complaints import problems_of, raise_joined
from megatron.base.config import Config, flag_name


@dataclasses.dataclass(frozen=True)
class Invalid:
    """Stands for a value that could not be read, until all complaints are collected."""

    problem: str


@dataclasses.dataclass(frozen=True)
class ComposedConfig:
    """A dataclass whose fields are configs, one section for each room that reads it."""

    # Flags accepted and ignored, so that old scripts start: name without dashes -> why.
    ignored_flags: ClassVar[Mapping[str, str]] = {}

    def combination_problems(self, world_size: int) -> list[str]:
        """What is wrong, on `world_size` ranks, between sections that are right by themselves."""
        return []


Composed = TypeVar("Composed", bound=ComposedConfig)
Made = TypeVar("Made", bound=Config)


def section_types(composed: type[ComposedConfig]) -> dict[str, type[Config]]:
    """The config class of each section of a composed config, by the section's name."""
    return {
        field.name: field.type
        for field in dataclasses.fields(composed)
        if isinstance(field.type, type) and issubclass(field.type, Config)
    }


def make_section(config_class: type[Made], values: Mapping[str, Any]) -> Made:
    """One config from those of `values` (field name -> value) that it owns.

    Raises `ConfigError` with a sentence for each value that is `Invalid` or obligatory and absent, else with what the
    config itself complains of.
    """
    fields = [f for f in dataclasses.fields(config_class) if f.init]
    owned = {f.name: values[f.name] for f in fields if f.name in values}
    missing = [
        f"{flag_name(f.name)} is not given, and there is no default for it"
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and owned.get(f.name) is None
    ]
    raise_joined(missing + [value.problem for value in owned.values() if isinstance(value, Invalid)])
    return config_class(**owned)


def compose(
    composed: type[Composed],
    values: Mapping[str, Any],
    world_size: int,
    problems: list[str] | None = None,
) -> Composed:
    """Make every section of `composed` from `values` (field name -> value) and check them together.

    `problems` are complaints that the caller has found already. All of them, each section's own and those of the
    combination are raised as one `ConfigError`.
    """
    found = list(problems or [])
    made: dict[str, Config] = {}
    for name, config_class in section_types(composed).items():
        try:
            made[name] = make_section(config_class, values)
        except ValueError as error:
            found += problems_of(error)
    if len(made) < len(section_types(composed)):
        raise_joined(found)
    config = composed(**made)
    raise_joined(found + config.combination_problems(world_size))
    return config
