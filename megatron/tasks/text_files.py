"""Files of text that a flag names, and JSON of anybody's: UTF-8, an object on each line."""

import json
from pathlib import Path
from typing import Any, NamedTuple


class Line(NamedTuple):
    """A line of a file that is not of blanks alone, by its number from 1 on."""

    number: int
    text: str


def read_utf8(flag: str, path: str) -> str:
    """The text of the file that `flag` names, its line ends as they are. Raises ValueError where it is no UTF-8."""
    try:
        return Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path}: it is not UTF-8 ({error.reason} at byte {error.start})") from None


def read_lines(flag: str, path: str) -> list[Line]:
    """The lines of a file but those of blanks. Raises ValueError where it is no UTF-8."""
    return [Line(number, line) for number, line in enumerate(read_utf8(flag, path).split("\n"), 1) if line.strip()]


def read_objects(flag: str, path: str, name: str) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a file with one on each line, and the number of its line; `name` is a text in each.

    Raises ValueError naming the file, and the line where it is one that is wrong.
    """
    return [
        (line.number, _object(f"{flag} {path}, line {line.number}", line.text, name)) for line in read_lines(flag, path)
    ]


def _object(where: str, line: str, name: str) -> dict[str, Any]:
    wanted = f'{where}: it must be a JSON object with a text as "{name}"'
    try:
        value = parse_json(line)
    except json.JSONDecodeError as error:  # whose own words begin to count lines at this one
        raise ValueError(f"{wanted} ({error.msg} at character {error.pos + 1})") from None
    except ValueError as error:
        raise ValueError(f"{wanted} ({error})") from None
    if not isinstance(value, dict) or not isinstance(value.get(name), str):
        raise ValueError(wanted)
    return value


def parse_json(text: str) -> Any:
    """What JSON says. Raises ValueError where it is none, nests too deeply, or says what no text can hold."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("half of a letter is in it, a surrogate (\\ud800 to \\udfff) without the other half") from None
    return value
