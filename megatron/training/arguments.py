"""The command line: flags made from the fields of configs, a YAML file of the same names, all complaints at once."""

import argparse
import dataclasses
import difflib
import re
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from megatron.base.complaints import ConfigError
from megatron.base.compose import (
    Composed,
    ComposedConfig,
    Invalid,
    Made,
    compose,
    make_section,
    section_types,
)
from megatron.base.config import Config, FlagInfo, flag_fields, flag_info, flag_name
from megatron.base.console import say
from megatron.training.config_file import flags_from_yaml
from megatron.training.launcher import launched_ranks, speaks_for_node

# Before the name of an ignored flag among what was given, so that it is not taken for a field of that name.
_IGNORED = "ignored: "


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that knows no abbreviations and raises `ConfigError` where the usual one exits."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


def _plain_type(annotation: Any) -> tuple[type, bool]:
    """The type of one value, and whether there are several: `tuple[str, ...]` -> str, True."""
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not types.NoneType)
    if typing.get_origin(annotation) in (list, tuple):
        return typing.get_args(annotation)[0], True
    return annotation, False


# PyTorch and NumPy count in whole numbers below this.
_WORD = 2**63


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads one value of flag `name`, or gives `Invalid` where it cannot."""

    name: str
    kind: type
    info: FlagInfo

    def __call__(self, text: str) -> Any:
        try:
            value = self.kind(text)
        except ValueError:
            return Invalid(f"{self.name} {text}: it must be {self.accepted}")
        if isinstance(value, int) and not -_WORD <= value < _WORD:
            return Invalid(f"{self.name} {text}: it must be a whole number of 64 bits")
        return value

    @property
    def accepted(self) -> str:
        """What a value must be, in words; empty where it may be any text."""
        return _choices_text(self.info) or {int: "a whole number", float: "a number"}.get(self.kind, "")


def add_config_flags(parser: argparse.ArgumentParser, config_class: type[Config]) -> None:
    """Add a flag for each field of `config_class` that was made by `base.config.flag`, in a group of its own.

    Fields that are bool become `--name` and `--no-name`; fields that are lists or tuples take several values.
    Nothing is filled in for a flag that is not given: the config's own defaults stand.
    """
    title = re.split(r"[.;]", config_class.__doc__ or config_class.__name__)[0]
    group = parser.add_argument_group(title)
    for field in flag_fields(config_class):
        info = flag_info(field)
        assert info is not None
        names = [flag_name(field.name), *("--" + alias for alias in info.aliases)]
        accepted = f"; {_choices_text(info)}" if info.choices else ""
        help_text = (info.doc.rstrip(".") + accepted + _default_text(field)).replace("%", "%%")
        kind, several = _plain_type(field.type)
        shared: dict[str, Any] = {
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "help": help_text,
        }
        if kind is bool:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **shared)
        else:
            group.add_argument(
                *names,
                type=_Reader(names[0], kind, info),
                nargs="+" if several else None,
                **shared,
            )


def _choices_text(info: FlagInfo) -> str:
    named = [str(choice) for choice in info.choices or () if choice is not None]
    return f"one of {', '.join(named)}" if named else ""


def _default_text(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is dataclasses.MISSING:
        return " (obligatory)"
    if default is None or default == ():
        return ""
    return f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"


def config_from_namespace(config_class: type[Made], namespace: argparse.Namespace) -> Made:
    """The config whose flags `add_config_flags` added, from what was parsed; `ConfigError` has all complaints."""
    return make_section(config_class, _field_values(namespace))


def _field_values(namespace: argparse.Namespace) -> dict[str, Any]:
    """What was given, several values as a tuple, or as the first `Invalid` among them."""
    values = dict(vars(namespace))
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = next((v for v in value if isinstance(v, Invalid)), tuple(value))
    return values


def nearest_flag(name: str, known: Sequence[str]) -> str | None:
    """The flag that `name` was probably meant for: the shortest that it begins, else one spelt almost alike."""
    begun = sorted((option for option in known if option.startswith(name) and len(name) > 4), key=len)
    alike = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return next(iter([*begun, *alike]), None)


def unknown_flag_problems(
    extras: Iterable[str], parser: argparse.ArgumentParser, composed: type[ComposedConfig]
) -> list[str]:
    """A sentence for each argument that no flag took, with what `composed` knows of it or the nearest flag."""
    known = [option for action in parser._actions for option in action.option_strings if option != "--help"]
    problems: list[str] = []
    for extra in extras:
        if extra.startswith("-") or not problems:  # else it is the value of an unknown flag, told already
            problems.append(_unknown_text(extra.split("=")[0], known, composed))
    return problems


def _unknown_text(name: str, known: Sequence[str], composed: type[ComposedConfig]) -> str:
    if not name.startswith("-"):
        return f"{name!r} belongs to no flag; --help lists all flags"
    plain = name.lstrip("-").replace("_", "-")
    if plain in composed.renamed_flags:
        return f"{name} is not known; {composed.renamed_flags[plain]} asks for the same here"
    if plain in composed.flags_elsewhere:
        return f"{name} is a flag of {composed.flags_elsewhere[plain]}, not of this program"
    if plain in composed.unsupported_flags:
        return f"{name} is a flag of Megatron-LM for something that is not supported here"
    near = nearest_flag(name, known)
    hint = f", the nearest is {near}" if near else ""
    return f"{name} is not known{hint}; --help lists all flags"


def _parser_of(composed: type[ComposedConfig], prog: str | None) -> Parser:
    description = (composed.__doc__ or "").split("\n")[0]
    parser = Parser(prog=prog, description=description, usage="%(prog)s [--config FILE.yaml] FLAGS")
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="flags from a file; those on the command line win",
    )
    for config_class in section_types(composed).values():
        add_config_flags(parser, config_class)
    for words, reason in composed.ignored_flags.items():
        name, *value = words.split()
        kind: dict[str, Any] = {"metavar": value[0], "nargs": "?"} if value else {"action": "store_true"}
        kind |= {"dest": _IGNORED + name, "default": argparse.SUPPRESS}
        parser.add_argument("--" + name, help=f"accepted and ignored: {reason}", **kind)
    # torch.distributed.launch passes it; the environment says the same.
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)
    return parser


_NEGATIVE_NUMBER = re.compile(r"-[0-9.]+(e[-+]?[0-9]+)?", re.IGNORECASE)


def _values_attached(words: Iterable[str], switches: Collection[str]) -> list[str]:
    """`--lr -1e-4` as `--lr=-1e-4`: argparse takes the second word for a flag, and says that a value is missing.

    Also what follows one of `switches`, which take no value, so that `_without_refused` can say so.
    """
    joined: list[str] = []
    for word in words:
        last = joined[-1] if joined else ""
        stray = last in switches and not word.startswith("-")
        if stray or (_NEGATIVE_NUMBER.fullmatch(word) and re.fullmatch("--[^=]+", last)):
            joined[-1] += "=" + word
        else:
            joined.append(word)
    return joined


def _without_refused(
    words: Sequence[str], actions: Mapping[str, argparse.Action]
) -> tuple[list[str], list[tuple[str, Invalid]]]:
    """`words` but for those at which argparse would end, and for each of these its destination and what is wrong.

    They are switches with a value, and flags without the one that they need.
    """
    kept: list[str] = []
    refused: list[tuple[str, Invalid]] = []
    for word, following in zip(words, [*words, "--"][1:], strict=True):
        name, equals, value = word.partition("=")
        action, problem = actions.get(name), ""
        if action is not None and equals and action.nargs == 0:
            problem = f"{name} {value}: it takes no value{_opposite_text(name, action)}"
        elif action is not None and not equals and action.nargs in (None, "+") and _is_flag(following):
            accepted = action.type.accepted if isinstance(action.type, _Reader) else ""
            problem = f"{name}: no value follows it" + (f"; it must be {accepted}" if accepted else "")
        if action is not None and problem:
            refused.append((action.dest, Invalid(problem)))
        else:
            kept.append(word)
    return kept, refused


def _is_flag(word: str) -> bool:
    """Whether argparse takes it for a flag, known or not; negative numbers are attached to theirs already."""
    return len(word) > 1 and word.startswith("-") and " " not in word


def _opposite_text(name: str, action: argparse.Action) -> str:
    if not isinstance(action, argparse.BooleanOptionalAction):
        return ""
    positive = "--" + name.removeprefix("--no-")
    if name != positive and positive in action.option_strings:
        return f"; {positive} turns it on"
    return f"; --no-{name.removeprefix('--')} turns it off"


def with_config_file(words: list[str]) -> list[str]:
    """`words` behind those of the file that `--config` names, so that the command line wins."""
    parser = Parser(add_help=False)
    parser.add_argument("--config", nargs="?")
    path = parser.parse_known_args(words)[0].config
    return words if path is None else flags_from_yaml(path) + words


def _tell_ignored(composed: type[ComposedConfig], namespace: argparse.Namespace) -> None:
    """A line on the first rank of each node for every flag that was given and does nothing."""
    if not speaks_for_node():
        return
    for words, reason in composed.ignored_flags.items():
        name = words.split()[0]
        if _IGNORED + name in vars(namespace):
            say(f"--{name} is ignored: {reason}")


def read_flags(
    composed: type[ComposedConfig], argv: Sequence[str] | None = None, *, prog: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """What the command line (`sys.argv` where `argv` is None) and `--config FILE.yaml` give, and what is no flag.

    Returns values by field name, one that cannot be read being `Invalid`, and a sentence for each unknown flag; both
    are for `compose`.
    """
    parser = _parser_of(composed, prog)
    actions = {name: action for action in parser._actions for name in action.option_strings}
    switches = [name for name, action in actions.items() if action.nargs == 0 and action.dest != "help"]
    given = _values_attached(with_config_file(list(sys.argv[1:] if argv is None else argv)), switches)
    words, refused = _without_refused(given, actions)
    misspelt = [word for word in words if re.match("-h.", word)]  # argparse would end: -h with a value
    namespace, extras = parser.parse_known_args([word for word in words if word not in misspelt])
    _tell_ignored(composed, namespace)
    problems = unknown_flag_problems(misspelt + extras, parser, composed)
    owned = {f.name for section in section_types(composed).values() for f in dataclasses.fields(section)}
    problems += [invalid.problem for name, invalid in refused if name not in owned]
    return _field_values(namespace) | dict(refused), problems


def parse_composed(
    composed: type[Composed],
    argv: Sequence[str] | None = None,
    *,
    world_size: int | None = None,
    prog: str | None = None,
    check_inputs: bool = True,
) -> Composed:
    """Read the command line (`sys.argv` where `argv` is None) and `--config FILE.yaml` into a composed config.

    `world_size` is the number of ranks, from the environment where None. Raises `ConfigError` with every complaint:
    unknown flags, values that cannot be read, each section's own, those of the combination and, unless `check_inputs`
    is false, those of files that are named and cannot be used.
    """
    values, problems = read_flags(composed, argv, prog=prog)
    ranks = launched_ranks() if world_size is None else world_size
    return compose(composed, values, ranks, problems, check_inputs)
