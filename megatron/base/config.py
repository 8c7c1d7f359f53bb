"""The base of every config: a frozen dataclass whose fields are flags and which checks itself."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from megatron.base.complaints import raise_joined


@dataclasses.dataclass(frozen=True)
class Config:
    """A frozen dataclass that raises `ConfigError` with everything in `problems()` when it is made."""

    # Fields of the class it derives from that are no flags of it: whoever makes it otherwise may give them a value.
    no_flags: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        raise_joined(self.problems())

    def problems(self) -> list[str]:
        """One sentence for each thing that is wrong: the flag, its value, what is accepted."""
        return []

    def input_problems(self) -> list[str]:
        """One sentence for each file that it names and that is not as it should be; asked when a run is to start."""
        return []


@dataclasses.dataclass(frozen=True)
class FlagInfo:
    """What a command line needs to know about a field beyond its name, type and default."""

    doc: str
    choices: tuple[Any, ...] | None = None
    aliases: tuple[str, ...] = ()


def flag(
    default: Any,
    doc: str,
    *,
    choices: Sequence[Any] | None = None,
    aliases: Sequence[str] = (),
) -> Any:
    """A config field that becomes the flag `--its-name`.

    Args:
        default: the value where nothing is given. `dataclasses.MISSING` makes the field obligatory.
        doc: one line, reused as `--help`.
        choices: the values accepted; checked by `choice_problems`.
        aliases: older names of the flag, without the dashes in front.
    """
    info = FlagInfo(doc, tuple(choices) if choices is not None else None, tuple(aliases))
    return dataclasses.field(default=default, metadata={"flag": info})


def flag_fields(config_class: type[Config]) -> list[dataclasses.Field[Any]]:
    """The fields of a config class that a command line gives: those made by `flag` that are not `no_flags`."""
    fields = dataclasses.fields(config_class)
    return [field for field in fields if flag_info(field) is not None and field.name not in config_class.no_flags]


def flag_info(field: dataclasses.Field[Any]) -> FlagInfo | None:
    """The `FlagInfo` of a field made by `flag`, None for any other field."""
    return field.metadata.get("flag")


def flag_name(field_name: str) -> str:
    """`micro_batch_size` -> `--micro-batch-size`; `from_`, as a word of Python has to be called, -> `--from`."""
    return "--" + field_name.rstrip("_").replace("_", "-")


def choice_problems(config: Config) -> list[str]:
    """A sentence for each field of `config` whose value is not one of its choices."""
    problems = []
    for field in dataclasses.fields(config):
        info, value = flag_info(field), getattr(config, field.name)
        if info is not None and info.choices is not None and value not in info.choices:
            named = ", ".join(str(choice) for choice in info.choices if choice is not None)
            or_nothing = ", or leave it out" if None in info.choices else ""
            problems.append(f"{flag_name(field.name)} {value}: accepted are {named}{or_nothing}")
    return problems


def minimum_problems(config: Config, minimum: float, *names: str) -> list[str]:
    """A sentence for each named field that is a number below `minimum` or not finite; fields that are None pass."""
    problems = []
    for name in names:
        value = getattr(config, name)
        if value is not None and not minimum <= value < math.inf:
            finite = "finite and " if value == math.inf else ""
            problems.append(f"{flag_name(name)} {value}: it must be {finite}at least {minimum:g}")
    return problems


def range_problems(config: Config, low: float, high: float, *names: str) -> list[str]:
    """A sentence for each named field outside `low <= value < high`; fields that are None pass."""
    problems = []
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value < high:
            problems.append(f"{flag_name(name)} {value}: it must be at least {low:.12g} and below {high:.12g}")
    return problems
