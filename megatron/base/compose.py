"""Several configs made together from one pool of values, so that all their complaints are told at once."""

import dataclasses
from collections.abc import Callable, Mapping
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

    # Flags accepted and ignored, so that old scripts start: name without dashes, and VALUE where one follows -> why.
    ignored_flags: ClassVar[Mapping[str, str]] = {}
    # Flags known from elsewhere, refused with the words that ask for the same here: name without dashes -> words.
    renamed_flags: ClassVar[Mapping[str, str]] = {}
    # Flags that another program has: name without dashes -> the program.
    flags_elsewhere: ClassVar[Mapping[str, str]] = {}
    # Flags that users know from elsewhere and that are refused with a sentence of their own: names without dashes.
    unsupported_flags: ClassVar[frozenset[str]] = frozenset()

    def combination_problems(self, world_size: int) -> list[str]:
        """What is wrong, on `world_size` ranks, between sections that are right by themselves (others are None here).

        Asks each method that `combines` sections which are all right.
        """
        found: list[str] = []
        for check in _checks(type(self)):
            if all(getattr(self, section) is not None for section in check.sections):
                found += check.method(self, world_size)
        return found


CheckMethod = Callable[[Any, int], list[str]]


@dataclasses.dataclass(frozen=True)
class Combination:
    """A check of several sections: a method (config, world size) -> complaints, and the sections that it reads."""

    method: CheckMethod
    sections: tuple[str, ...]


def combines(*sections: str) -> Callable[[CheckMethod], Combination]:
    """Mark a method (self, world_size) -> complaints of a `ComposedConfig` as the check of these sections together."""
    return lambda method: Combination(method, sections)


def _checks(composed: type[ComposedConfig]) -> list[Combination]:
    classes = reversed(composed.__mro__)
    return [check for c in classes for check in vars(c).values() if isinstance(check, Combination)]


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
    fields = [f for f in dataclasses.fields(config_class) if f.init and f.name not in config_class.no_flags]
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
    check_inputs: bool = False,
) -> Composed:
    """Make every section of `composed` from `values` (field name -> value) and check them together.

    `problems` are complaints that the caller has found already. They, each section's own, those of the combination and,
    with `check_inputs`, those of the files that are named are raised as one `ConfigError`.
    """
    found = list(problems or [])
    made: dict[str, Config] = {}
    for name, config_class in section_types(composed).items():
        try:
            made[name] = make_section(config_class, values)
        except ValueError as error:
            found += problems_of(error)
    config = composed(**{name: made.get(name) for name in section_types(composed)})
    found += config.combination_problems(world_size)
    if check_inputs:
        found += [problem for section in made.values() for problem in section.input_problems()]
    raise_joined(found)
    return config
