"""Files of prompts and of the texts that were written to them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.base.files import atomic_write


def read_prompts(path: str) -> list[dict[str, Any]]:
    """The prompts of a file, each a dict whose "prompt" is a text, and which may hold more.

    A file whose name ends in .jsonl or .json has such an object on each line; of any other file each line is a prompt.
    Lines of blanks are passed over. Raises ValueError naming the file, and the line where it is one that is wrong.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--sample-input-file {path}: it is not UTF-8 ({error.reason} at byte {error.start})"
        ) from None
    named = Path(path).suffix in (".jsonl", ".json")
    there = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    prompts = [_object(path, number, line) if named else {"prompt": line.rstrip("\r")} for number, line in there]
    if not prompts:
        raise ValueError(f"--sample-input-file {path}: there is no prompt in it")
    return prompts


def _object(path: str, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise ValueError(f'--sample-input-file {path}, line {number}: it must be a JSON object with a text as "prompt"')
    return value


def write_lines(path: str, lines: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line; the file takes its name when all of it is written."""
    with atomic_write(path) as stream:
        for line in lines:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
