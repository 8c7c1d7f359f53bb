"""The file that `--config` names: YAML of flags without their dashes, read as words of a command line."""

import datetime
from typing import Any

import yaml

from megatron.base.complaints import ConfigError

# Dates too, for a text that looks like one is text.
_PLAIN = (str, int, float, datetime.date, type(None))


class _OnceEach(yaml.SafeLoader):
    """Reads YAML of plain values; a name that stands twice in a mapping is an error, with `-` and `_` alike."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (LookupError, AttributeError, TypeError, ValueError, OverflowError) as error:
            if not isinstance(node, yaml.ScalarNode):
                raise
            kind = node.tag.rpartition(":")[2]
            raise ValueError(f"{node.value!r} in line {node.start_mark.line + 1} is no {kind}") from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [str(key.value).replace("_", "-") for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} stands in it more than once")
        return super().construct_mapping(node, deep)


def flags_from_yaml(path: str) -> list[str]:
    """The content of a YAML file of `name: value` lines as command-line words, so that both are read alike.

    Names are the flags' own, with `-` or `_`; true and false give `--name` and `--no-name`, null gives nothing, a list
    gives several values. Raises `ConfigError` naming the file where it is absent or not such a mapping.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            content = yaml.load(stream, _OnceEach)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([f"--config {path}: it cannot be read ({' '.join(str(error).split())})"]) from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError([f"--config {path}: it must be a mapping of flag names to values"])
    words: list[str] = []
    for key, value in (content or {}).items():
        if key == "config" or isinstance(value, dict):
            what = "another file" if key == "config" else "further names"
            raise ConfigError([f"--config {path}: {key} holds {what}; write all flags at the top of this file"])
        if not all(isinstance(v, _PLAIN) for v in (value if isinstance(value, list) else [value])):
            raise ConfigError([f"--config {path}: {key} holds more than plain values or a list of them"])
        words += _yaml_words(str(key).replace("_", "-"), value)
    return words


def _yaml_words(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]
